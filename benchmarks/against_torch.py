"""Is instep as fast as what one writes by hand with PyTorch, with the same model, data and threads?

    python benchmarks/against_torch.py [--case mlp|gpt|zero3|zero2|1f1b|all] [--windows 16]
        [--json FILE]

`mlp` and `gpt` are beside DDP, `zero3` and `zero2` beside FSDP2 and `1f1b` beside a pipeline of two
stages cut by hand, all with the GPT of `gpt`; the rivals are in rival.py. Two workers on this
machine, one thread each, in turns (see turns.py). The figure is the median of our speed over
theirs; above 1, instep is faster. Processes of a mesh give freed memory back at once, which
a rival does not do; `--malloc plain` leaves that out.
"""

import argparse
import os
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

GPT = Case("recipes/gpt.py:recipe", 16, 8.0)
CASES: dict[str, tuple[Case, str, dict[str, object]]] = {
    "mlp": (Case("recipes/mlp.py:recipe", 128, 2.0), "ddp", {}),
    "gpt": (GPT, "ddp", {}),
    "zero3": (GPT, "zero3", {"mesh.shard": 2}),
    "zero2": (GPT, "zero2", {"mesh.shard": 2, "mesh.zero": 2}),
    "1f1b": (GPT, "1f1b", {"mesh.stages": 2, "mesh.cuts": ["blocks.4"]}),
}
"""What is trained, beside what, and the job's keys."""


def rival(case: Case, name: str, times: Path) -> Program:
    return Program(
        [sys.executable, str(HERE / "rival.py"), str(HERE / case.recipe), "--steps", ENDLESS,
         "--as", name, "--global-batch", str(case.global_batch), "--times", str(times)]
    )  # fmt: skip


def compare(name: str, windows: int) -> dict[str, object]:
    case, other, keys = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        ours, times = Path(text) / "instep", Path(text) / "rival.times"
        settings = {"train.global_batch": case.global_batch, **keys}
        programs = {other: rival(case, other, times), "instep": instep(case.recipe, settings, ours)}
        with ended(programs):
            wait_for_steps(lambda: times.stat().st_size // 8 if times.exists() else 0)
            wait_for_steps(lambda: len(times_of(ours)))
            take_turns(programs, case.turn_s, windows)
        began = {other: np.fromfile(times, "<f8"), "instep": times_of(ours)}
        steps = {p: steps_s(began[p], programs[p].turns[:windows]) for p in programs}
    ratios = [1 / ratio for ratio in over(steps["instep"], steps[other])]
    print(f"{name}  speed over {other} {in_words(ratios)}", flush=True)
    speeds = {p: [case.global_batch / step for step in of] for p, of in steps.items()}
    return {"case": name, f"speed over {other}": summed_up(ratios), "samples_per_second": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=[*CASES, "all"], default="all")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--malloc", choices=["launcher", "plain"], default="launcher")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.malloc == "plain":
        os.environ.update(MALLOC_MMAP_THRESHOLD_="33554432", MALLOC_TRIM_THRESHOLD_="1073741824")
    names = list(CASES) if args.case == "all" else [args.case]
    results = [compare(name, args.windows) for name in names]
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
