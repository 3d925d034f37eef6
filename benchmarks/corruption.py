"""What does `check.corruption` cost, and does it ever find what is not there?

    python benchmarks/corruption.py [--case NAME] [--windows 8] [--steps 10000] [--json FILE]

Cost: two workers on this machine, one thread each, with it and without it, in turns
(see turns.py). Figures are step times, and CPU times of a step, over those without.
A turn holds several repetitions, which come every 10 steps or less often.

False alarms: a small net trained for `--steps` steps with it on two workers; what was
found is counted, and its parameters are compared with those of a run without it.
"""

import argparse
import os
import tempfile
from pathlib import Path

from turns import (
    HERE,
    Case,
    Program,
    cpu_steps_s,
    ended,
    in_words,
    over,
    steps_s,
    summed_up,
    take_turns,
    times_of,
    wait_for_steps,
    write,
)
from turns import instep as program

import instep
from instep.store.run_folder import RunFolder

MLP = Case("recipes/mlp.py:recipe", 128, 4.0)
SMALL_GPT = {"arguments.layers": 4, "arguments.width": 192, "arguments.heads": 3}
CASES = {
    "mlp, 8 micro-batches": (MLP, {"train.micro_batches": 8}),
    "mlp, 16 micro-batches": (MLP, {"train.micro_batches": 16}),
    "gpt of 2 million, 16 micro-batches": (
        Case("recipes/gpt.py:recipe", 16, 15.0),
        {"train.micro_batches": 16, **SMALL_GPT},
    ),
    "gpt of 10 million, 16 micro-batches": (
        Case("recipes/gpt.py:recipe", 16, 40.0),
        {"train.micro_batches": 16},
    ),
}
PROGRAMS = {"with": "true", "without": "false"}


def cost(name: str, windows: int) -> dict[str, object]:
    """One model in one setting, measured and printed."""
    case, options = CASES[name]
    settings: dict[str, object] = {
        **options,
        "train.global_batch": case.global_batch,
        "train.determinism": "bits",
    }
    with tempfile.TemporaryDirectory() as text:
        folders = {which: Path(text) / which for which in PROGRAMS}
        programs: dict[str, Program] = {}
        with ended(programs):
            for which, value in PROGRAMS.items():
                given = {**settings, "check.corruption": value}
                programs[which] = program(case.recipe, given, folders[which])
                wait_for_steps(lambda: len(times_of(folders[which])))  # noqa: B023
                programs[which].hold()
            take_turns(programs, case.turn_s, windows)
        found = sum(len(RunFolder(f / "bench").named("corruption_found")) for f in folders.values())
        steps = {p: steps_s(times_of(folders[p]), programs[p].turns[:windows]) for p in programs}
        cpu = {p: cpu_steps_s(steps[p], programs[p]) for p in programs}
    ratios, cpu_ratios = (over(times["with"], times["without"]) for times in (steps, cpu))
    print(
        f"{name}  with over without {in_words(ratios)}  CPU time {in_words(cpu_ratios)}", flush=True
    )
    return {
        "case": name,
        "load": os.getloadavg()[0],
        "with over without": summed_up(ratios),
        "cpu, with over without": summed_up(cpu_ratios),
        "found": found,
        "step_s": steps,
        "cpu_s": cpu,
    }


def false_alarms(steps: int) -> dict[str, object]:
    """What a long run without any fault finds."""
    train = {"steps": steps, "global_batch": 32, "determinism": "bits", "threads": 1}
    recipe = f"{HERE / 'recipes' / 'mlp.py'}:recipe"
    arguments = {"samples": 2000, "width": 16}
    with tempfile.TemporaryDirectory() as runs:
        done = {
            which: instep.train(
                recipe, name=which, runs=runs, workers=2, seed=7, quiet=True, train=train,
                arguments=arguments, check={"corruption": which == "with"},
            )
            for which in PROGRAMS
        }  # fmt: skip
        assert all(run.summary["steps"] == steps for run in done.values()), "a run was cut short"
        found = len(RunFolder(done["with"].path).named("corruption_found"))
        sums = {run.summary["parameters_sha256"] for run in done.values()}
    result = {"steps": steps, "workers": 2, "found": found, "same_parameters": len(sums) == 1}
    print(result, flush=True)
    return {"case": "false alarms", **result}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", choices=[*CASES, "all", "none"], default="all")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10_000, help="of the run without faults")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = {"all": list(CASES), "none": []}.get(args.case, [args.case])
    results = [false_alarms(args.steps)] if args.steps else []
    for name in names:
        results.append(cost(name, args.windows))
        if args.json:
            write(args.json, results)
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
