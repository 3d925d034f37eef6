"""Devices of unequal kind in one run: how near does training come to the sum of their speeds?

    python benchmarks/mixed_speeds.py [--steps 100] [--json FILE]

Three workers of which one is three times as fast, two of which one is four times as fast, and three
of which one is so slow that it should get no work. Work is dealt by speed. The time of a sample is
slept, so that two cores are enough. Two ideals, as for `slow_worker.py`: what they could sleep
through, with nothing lost; and, in the same run, the sum of the samples per second that each
shows while it computes. Beside it the same training in one process: the largest difference of a
parameter, and how often a sample was trained on too often or too seldom.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from slow_worker import median_rate, rate
from turns import HERE, write

import instep
from instep.report.figures.summary import idle_words
from instep.store.run_folder import RunFolder

RECIPE = f"{HERE / 'recipes' / 'of_speeds.py'}:recipe"
PARTS, BATCH = 32, 64
CASES = (((1.0, 1.0, 3.0), 0.016), ((1.0, 4.0), 0.016), ((1.0, 1.0, 0.05), 0.006))
"""Speeds of the workers, and seconds of a sample at speed 1."""


def train(folder: Path, name: str, speeds: list[float], sample_s: float, steps: int) -> RunFolder:
    done = instep.train(
        RECIPE,
        name=name,
        runs=folder,
        workers=len(speeds),
        seed=7,
        quiet=True,
        arguments={
            "places": str(folder / f"{name}-places"),
            "speeds": speeds,
            "sample_s": sample_s,
        },
        train={"steps": steps, "global_batch": BATCH, "micro_batches": PARTS, "threads": 1},
    )
    return RunFolder(done.path)


def sum_of_speeds(run: RunFolder, workers: int, first: int) -> float:
    """Samples per second of all workers, each while it computes, in its median step."""
    whole = 0.0
    for worker in range(workers):
        steps = run.steps_of(worker)
        steps = steps[(steps["step"] >= first) & (steps["samples"] > 0)]
        busy_s = steps["load_s"] + steps["forward_s"] + steps["backward_s"]
        whole += float(np.median(steps["samples"] / busy_s)) if len(steps) else 0.0
    return whole


def apart(one: RunFolder, other: RunFolder) -> float:
    """The largest difference of a parameter."""
    mine, theirs = (load_file(run.path / "model.safetensors") for run in (one, other))
    return max(float((mine[name] - theirs[name]).abs().max()) for name in mine)


def case(folder: Path, speeds: list[float], sample_s: float, steps: int) -> dict[str, Any]:
    name = "-".join(f"{each:g}" for each in speeds)
    began = os.getloadavg()[0]
    run = train(folder, name, speeds, sample_s, steps)
    alone = train(folder, f"{name}-alone", [1e6], sample_s, steps)
    first = run.named("work_dealt")[0]["step"]
    whole = sum_of_speeds(run, len(speeds), first)
    found = {
        "speeds": speeds,
        "steps": steps,
        "sample_ms": 1e3 * sample_s,
        "dealt": [[e["step"], e["reason"], *e["micro_batches"]] for e in run.named("work_dealt")],
        "of_ideal_once_dealt": rate(run, first) / (sum(speeds) / sample_s),
        "of_speeds_once_dealt": rate(run, first) / whole,
        "of_speeds_median_step": median_rate(run, first) / whole,
        "largest_difference": apart(run, alone),
        "repeated_samples": run.audit.repeated,
        "missing_samples": run.audit.missing,
        "generations": len(run.members.generations),
        "idle": idle_words(run),
        "load": round(began, 1),
    }
    print(json.dumps(found), file=sys.stderr, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        found = [case(Path(text), [*speeds], each, args.steps) for speeds, each in CASES]
    mixed = [each for each in found if not each["idle"]]
    total = {"of_speeds": statistics.mean(each["of_speeds_median_step"] for each in mixed)}
    print(json.dumps(total))
    if args.json:
        write(args.json, found)


if __name__ == "__main__":
    main()
