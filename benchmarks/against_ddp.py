"""Is instep as fast as plain PyTorch DDP, with the same model, data and threads?

    python benchmarks/against_ddp.py [--model mlp|gpt|all] [--windows 16] [--json FILE]

Two workers on this machine, one thread each, in turns (see turns.py). The
figure is the median of our speed over DDP's; above 1, instep is faster.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
from turns import (
    ENDLESS,
    HERE,
    Case,
    Program,
    ended,
    in_words,
    instep,
    over,
    steps_s,
    summed_up,
    take_turns,
    times_of,
    wait_for_steps,
    write,
)

CASES = {
    "mlp": Case("recipes/mlp.py:recipe", 128, 2.0),
    "gpt": Case("recipes/gpt.py:recipe", 16, 8.0),
}


def ddp(case: Case, times: Path) -> Program:
    return Program(
        [sys.executable, str(HERE / "ddp_rival.py"), str(HERE / case.recipe), "--steps", ENDLESS,
         "--global-batch", str(case.global_batch), "--times", str(times)]
    )  # fmt: skip


def compare(name: str, windows: int) -> dict[str, object]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        ours, times = Path(text) / "instep", Path(text) / "ddp.times"
        settings = {"train.global_batch": case.global_batch}
        programs = {"ddp": ddp(case, times), "instep": instep(case.recipe, settings, ours)}
        with ended(programs):
            wait_for_steps(lambda: times.stat().st_size // 8 if times.exists() else 0)
            wait_for_steps(lambda: len(times_of(ours)))
            take_turns(programs, case.turn_s, windows)
        began = {"ddp": np.fromfile(times, "<f8"), "instep": times_of(ours)}
        steps = {p: steps_s(began[p], programs[p].turns[:windows]) for p in programs}
    ratios = [1 / ratio for ratio in over(steps["instep"], steps["ddp"])]
    print(f"{name}  speed over ddp {in_words(ratios)}", flush=True)
    speeds = {p: [case.global_batch / step for step in of] for p, of in steps.items()}
    return {"case": name, "speed over ddp": summed_up(ratios), "samples_per_second": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*CASES, "all"], default="all")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = list(CASES) if args.model == "all" else [args.model]
    results = [compare(name, args.windows) for name in names]
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
