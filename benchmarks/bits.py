"""What does `train.determinism = "bits"` cost against "order", and which part of it costs?

    python benchmarks/bits.py [--model gpt] [--micro-batches 8] [--windows 8] [--json FILE]

Two workers on this machine, one thread each, in turns (see turns.py). Figures
are step times over step times, and CPU time of a step over CPU time of a step,
which other work on the machine moves less: "bits" over "order", and its two parts, not
merging micro-batches ("order" with merge = "never" over "order") and all the
rest ("bits" over "order" with merge = "never").
"""

import argparse
import os
import tempfile
from pathlib import Path

from turns import (
    Case,
    Program,
    cpu_steps_s,
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
    "mlp": Case("recipes/mlp.py:recipe", 128, 1.5),
    "gpt": Case("recipes/gpt.py:recipe", 16, 8.0),
    "conv": Case("recipes/conv.py:recipe", 64, 1.5),
    "lstm": Case("recipes/lstm.py:recipe", 64, 1.5),
    "embedding": Case("recipes/embedding.py:recipe", 256, 1.5),
}
PROGRAMS: dict[str, dict[str, object]] = {
    "order": {"train.determinism": "order"},
    "apart": {"train.determinism": "order", "train.merge": "never"},
    "bits": {"train.determinism": "bits"},
}


def compare(name: str, micro_batches: int, windows: int) -> dict[str, object]:
    """One model in one setting, measured and printed."""
    case = CASES[name]
    batch = {"train.global_batch": case.global_batch, "train.micro_batches": micro_batches}
    with tempfile.TemporaryDirectory() as text:
        folders = {program: Path(text) / program for program in PROGRAMS}
        programs: dict[str, Program] = {}
        with ended(programs):
            for program, settings in PROGRAMS.items():
                programs[program] = instep(case.recipe, {**batch, **settings}, folders[program])
                wait_for_steps(lambda: len(times_of(folders[program])))  # noqa: B023
                programs[program].hold()
            take_turns(programs, case.turn_s, windows)
        steps = {p: steps_s(times_of(folders[p]), programs[p].turns[:windows]) for p in programs}
        cpu = {p: cpu_steps_s(steps[p], programs[p]) for p in programs}
    ratios = ratios_of(steps)
    cpu_ratios = ratios_of(cpu)
    print(
        f"{name}, {micro_batches} micro-batches  "
        + "  ".join(f"{what} {in_words(of)}" for what, of in ratios.items())
        + "  CPU time: "
        + "  ".join(f"{what} {in_words(of)}" for what, of in cpu_ratios.items()),
        flush=True,
    )
    return {
        "case": name,
        "micro_batches": micro_batches,
        "load": os.getloadavg()[0],
        "ratios": {what: summed_up(of) for what, of in ratios.items()},
        "cpu_ratios": {what: summed_up(of) for what, of in cpu_ratios.items()},
        "step_s": steps,
        "cpu_s": cpu,
    }


def ratios_of(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Of each turn, from the times of a step in each program."""
    return {
        "bits over order": over(times["bits"], times["order"]),
        "apart over merged": over(times["apart"], times["order"]),
        "bits over apart": over(times["bits"], times["apart"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=[*CASES, "all"], default="all")
    parser.add_argument("--micro-batches", type=int, choices=[2, 8], help="default: both")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = list(CASES) if args.model == "all" else [args.model]
    settings = [args.micro_batches] if args.micro_batches else [2, 8]
    results = []
    for name, each in [(name, each) for name in names for each in settings]:
        results.append(compare(name, each, args.windows))
        if args.json:
            write(args.json, results)


if __name__ == "__main__":
    main()
