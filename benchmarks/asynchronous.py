"""What do servers that wait for nobody gain where a worker is slow, and what do they lose?

    python benchmarks/asynchronous.py slow [--steps 600] [--rounds 1] [--part 0.1] [--only NAME ...]
    python benchmarks/asynchronous.py loss [--epochs 6] [--seeds 3]

`slow`: one of four workers is twice as slow for a tenth of the time (samples are slept, so two
cores are enough; all_reduce deals evenly). For each strategy: the rate from its fifth step on,
over that of the same run in which nobody is slow. The runs take turns.

`loss`: the last validation loss of four workers, over that of `all_reduce` with updates of the same
size, for several seeds. A gradient is late by about three updates.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import instep
from instep.store.run_folder import RunFolder, step_ends

RECIPES = Path(__file__).parent / "recipes"
WORKERS, PARTS, UNIT = 4, 8, 8
FIRST = 5
SLOW = {
    "bounded_stale": {"name": "bounded_stale"},
    "server_async": {"name": "server_async"},
    "all_reduce": {"name": "all_reduce"},
}
LATE: dict[str, dict[str, Any]] = {
    "server_async": {"name": "server_async"},
    "compensated": {"name": "server_async", "options": {"compensation": 0.04}},
    "bounded_stale": {"name": "bounded_stale", "options": {"compensation": 0.04}},
}


def rate(run: RunFolder) -> float:
    """Steps per second, from the end of step `FIRST` on."""
    steps = run.steps
    ends = [float(step_ends(steps[steps["step"] == n]).max()) for n in (FIRST, run.last_step)]
    return (run.last_step - FIRST) / (ends[1] - ends[0])


def slow(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """How much of its rate each strategy keeps."""
    kept: dict[str, list[float]] = {name: [] for name in args.only}
    for number in range(args.rounds):
        for name, sync in SLOW.items():
            if name not in args.only:
                continue
            rates = []
            for times in (2.0, 1.0):
                mark = folder / f"mark-{number}-{name}-{times}"
                done = instep.train(
                    f"{RECIPES / 'slow_now_and_then.py'}:recipe",
                    name=mark.name,
                    runs=folder,
                    workers=WORKERS,
                    seed=7,
                    quiet=True,
                    sync=sync,
                    arguments={
                        "mark": str(mark),
                        "sample_s": 0.004,
                        "times": times,
                        "part": args.part,
                    },
                    train={
                        "steps": args.steps,
                        "global_batch": PARTS * UNIT,
                        "micro_batches": PARTS,
                        "threads": 1,
                        "deal": "even",
                    },
                )
                rates.append(rate(RunFolder(done.path)))
            kept[name].append(round(rates[0] / rates[1], 3))
            print(name, kept[name], [round(each, 2) for each in rates], file=sys.stderr)
    return {"workers": WORKERS, "steps": args.steps, "part": args.part, "rate_kept": kept}


def loss(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The validation loss of each strategy in terms of that of all_reduce."""
    over: dict[str, list[float]] = {name: [] for name in LATE}

    def trained(name: str, seed: int, sync: dict[str, Any], parts: int, workers: int) -> float:
        done = instep.train(
            f"{RECIPES / 'noisy_digits.py'}:recipe",
            name=f"{name}-{seed}",
            runs=folder,
            workers=workers,
            seed=seed,
            quiet=True,
            sync=sync,
            train={
                "epochs": args.epochs,
                "global_batch": 16 * parts,
                "micro_batches": max(parts, workers),
                "threads": 1,
            },
        )
        return float(RunFolder(done.path).validations[-1]["metrics"]["loss"])

    for seed in range(args.seeds):
        whole = trained("whole", seed, {"name": "all_reduce"}, 1, 1)
        for name, sync in LATE.items():
            over[name].append(round(trained(name, seed, sync, WORKERS, WORKERS) / whole, 4))
        print(seed, whole, {name: each[-1] for name, each in over.items()}, file=sys.stderr)
    medians = {name: statistics.median(each) for name, each in over.items()}
    return {"epochs": args.epochs, "loss_over_all_reduce": over, "medians": medians}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["slow", "loss"])
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--part", type=float, default=0.1)
    parser.add_argument("--only", nargs="+", choices=list(SLOW), default=list(SLOW))
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        begin = os.getloadavg()[0]
        found = (slow if args.what == "slow" else loss)(args, Path(folder))
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "load": [round(begin, 1), round(os.getloadavg()[0], 1)],
            args.what: found,
        }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
