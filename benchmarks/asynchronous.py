"""What do servers that wait for nobody gain where a worker is slow, and what do they lose?

    python benchmarks/asynchronous.py slow [--seconds 110] [--times 2] [--part 0.1] [--only NAME]
    python benchmarks/asynchronous.py loss [--epochs 6] [--seeds 3]

`slow`: one of four workers is twice as slow for a tenth of each period of 5 s, in every other
period (samples are slept, so two cores are enough). For each strategy, in one run: the samples of a
period in which it is slow, over the mean of the two around it in which nobody is. A last run of
`bounded_stale` has no slow worker at all: what it shows is noise. If no time but its own is lost,
the part that is kept is 1 - part * (1 - 1 / times) / workers; if all wait for it (`all_reduce`
deals evenly here), 1 - part * (1 - 1 / times).

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

import numpy as np
import torch
from turns import over

import instep
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder

RECIPES = Path(__file__).parent / "recipes"
sys.path.append(str(RECIPES))
from recipes.slow_now_and_then import PERIOD_S, is_slow  # noqa: E402

WORKERS, PARTS, UNIT = 4, 8, 8
SAMPLE_S = 0.01
SLOW: dict[str, tuple[dict[str, Any], bool]] = {
    "bounded_stale": ({"name": "bounded_stale"}, True),
    "server_async": ({"name": "server_async"}, True),
    "all_reduce": ({"name": "all_reduce"}, True),
    "nobody slow": ({"name": "bounded_stale"}, False),
}
"""By name, what is trained, and whether a worker is slow."""
LATE: dict[str, dict[str, Any]] = {
    "server_async": {"name": "server_async"},
    "compensated": {"name": "server_async", "options": {"compensation": 0.04}},
    "bounded_stale": {"name": "bounded_stale", "options": {"compensation": 0.04}},
}


def kept(run: RunFolder, who: set[int]) -> list[float]:
    """Of each period in which somebody may be slow, what it has of the samples of those around it.

    Args:
        run: it has ended.
        who: the workers whose samples are counted.
    """
    rows = run.steps
    ends, last = step_ends(rows), int(rows["step"].max())
    over_at = np.array([ends[rows["step"] == step].max() for step in range(1, last + 1)])
    count = np.isin(rows["worker"], list(who)) * rows["samples"]
    samples = np.bincount(rows["step"], count, last + 1)[1:]
    order = np.argsort(over_at)
    moments, done = over_at[order], np.cumsum(samples[order])
    first = (moments[0] // PERIOD_S + 2) * PERIOD_S
    first += 0.0 if not is_slow(first) else PERIOD_S  # begins with one in which nobody is slow
    edges = np.arange(first, moments[-1], PERIOD_S)
    each = np.diff(np.interp(edges, moments, done)).tolist()
    return over(each[1::2], each[0::2])


def interval(ratios: list[float]) -> dict[str, Any]:
    """Their mean, and where it lies with 95 % (normal)."""
    mean, spread = statistics.fmean(ratios), statistics.stdev(ratios)
    off = 1.96 * spread / len(ratios) ** 0.5
    figures = {"mean": mean, "low": mean - off, "high": mean + off}
    return {**{name: round(value, 4) for name, value in figures.items()}, "periods": len(ratios)}


def slow(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """How much of its rate each strategy keeps, and the workers that are not slow."""
    found = dict[str, Any]()
    for name in args.only:
        sync, one = SLOW[name]
        mark = folder / f"marked-{len(found)}"
        done = instep.train(
            f"{RECIPES / 'slow_now_and_then.py'}:recipe",
            name=f"run-{len(found)}",
            runs=folder,
            workers=WORKERS,
            seed=7,
            quiet=True,
            sync=sync,
            arguments={
                "mark": str(mark),
                "sample_s": SAMPLE_S,
                "times": args.times if one else 1.0,
                "part": args.part,
            },
            train={
                "steps": int(args.seconds * WORKERS / (PARTS * UNIT * SAMPLE_S)),
                "global_batch": PARTS * UNIT,
                "micro_batches": PARTS,
                "threads": 1,
                "deal": "even",
            },
        )
        run = RunFolder(done.path)
        marked = next(
            int(event["worker"])
            for event in run.named("worker_joined")
            if event["pid"] == int(mark.read_text())
        )
        everyone = set(range(WORKERS))
        found[name] = {
            "kept": interval(kept(run, everyone)),
            "kept_by_others": interval(kept(run, everyone - {marked})),
            "all": [round(ratio, 3) for ratio in kept(run, everyone)],
        }
        print(name, found[name], file=sys.stderr)
    lost = args.part * (1 - 1 / args.times)
    theory = {"nobody_waits": 1 - lost / WORKERS, "all_wait": 1 - lost}
    return {"workers": WORKERS, "part": args.part, "times": args.times, **theory, **found}


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
    parser.add_argument("--seconds", type=float, default=110.0, help="of each run")
    parser.add_argument("--times", type=float, default=2.0, help="as slow")
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
