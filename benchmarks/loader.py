"""What does loading cost a training step?

A step is a fixed number of matrix products, as long as a step of 10 ms or 1 ms.
It runs with nothing to load and then with each way of loading, in turns within
one run, so that a noisy machine disturbs all alike. The figure is the time that
loading adds, as a share of the step, from the fastest round of each: what other
programs take is no cost of loading. The median round stands beside it. Goal:
under 2 % of a 10 ms step for small samples. Run it on a quiet machine:

    python benchmarks/loader.py [--threads 1] [--rounds 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from instep.data.loader import Loader, Slice
from instep.data.order import position

STEPS = {0.010: 40, 0.001: 100}
"""Seconds of a step, and steps of a round."""

WAYS = ("torch 0", "torch 2", "instep 0", "instep 2", "instep auto")


class Slow:
    """Samples that take a while: computed in Python, or waited for."""

    def __init__(self, seconds: float, *, computes: bool) -> None:
        self.seconds, self.computes = seconds, computes

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index >= len(self):
            raise IndexError(index)
        if not self.computes:
            time.sleep(self.seconds)
        else:
            end = time.thread_time() + self.seconds
            while time.thread_time() < end:
                pass
        return torch.full((784,), float(index)), index % 10


def datasets() -> dict[str, tuple[Any, int]]:
    """Name to (dataset, batch)."""
    small = TensorDataset(torch.randn(60_000, 784), torch.randint(0, 10, (60_000,)))
    return {
        "784 floats, batch 64": (small, 64),
        "0.3 ms waiting, batch 16": (Slow(0.3e-3, computes=False), 16),
        "0.3 ms computing, batch 16": (Slow(0.3e-3, computes=True), 16),
    }


def make_step(seconds: float) -> Callable[[], None]:
    """Work of about so many seconds on this process's threads."""
    matrix = torch.full((160, 160), 1e-3)

    def work(products: int) -> float:
        begin = time.perf_counter()
        for _ in range(products):
            matrix @ matrix
        return time.perf_counter() - begin

    work(100)
    products = max(1, round(seconds / (min(work(100) for _ in range(5)) / 100)))
    return lambda: void(work(products))


def void(_: object) -> None:
    """Drop a value."""


def open_way(way: str, dataset: Any, batch: int, stack: ExitStack) -> tuple[Iterator[Any], str]:
    """An endless run of batches, and what was chosen."""
    kind, processes = way.split()
    if kind == "torch":
        loader = DataLoader(dataset, batch, shuffle=True, num_workers=int(processes))
        return (item for _ in count() for item in loader), ""
    ours = Loader(
        dataset,
        seed=1,
        shuffle=True,
        processes="auto" if processes == "auto" else int(processes),
    )
    stack.callback(ours.close)
    places = (Slice(*position(step, len(dataset), batch)) for step in count(1))
    return (read.batch for read in ours.read(places)), ours.mode


def timed(step: Callable[[], None], steps: int, batches: Iterator[Any] | None) -> float:
    begin = time.perf_counter()
    for _ in range(steps):
        if batches is not None:
            next(batches)
        step()
    return (time.perf_counter() - begin) / steps


def measure(dataset: Any, batch: int, step_s: float, rounds: int) -> list[dict[str, Any]]:
    """One row for each way."""
    step, steps = make_step(step_s), STEPS[step_s]
    with ExitStack() as stack:
        opened = {way: open_way(way, dataset, batch, stack) for way in WAYS}
        for batches, _ in opened.values():
            next(batches)  # processes are up, caches are warm
        loaded: dict[str, list[float]] = {way: [] for way in WAYS}
        alone: list[float] = []
        for _ in range(rounds):
            for way, (batches, _) in opened.items():
                loaded[way].append(timed(step, steps, batches))
                alone.append(timed(step, steps, None))
    return [
        {
            "step_ms": step_s * 1e3,
            "way": way,
            "mode": opened[way][1],
            "share": min(found) / min(alone) - 1,
            "median_share": median(found) / median(alone) - 1,
        }
        for way, found in loaded.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1, help="of the step")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    print(f"{'samples':28}{'step':>7}  {'way':13}{'mode':11}{'added':>9}{'median':>9}")
    for name, (dataset, batch) in datasets().items():
        for step_s in STEPS:
            for row in measure(dataset, batch, step_s, options.rounds):
                rows.append({"samples": name, **row})
                print(
                    f"{name:28}{row['step_ms']:4.0f} ms  {row['way']:13}{row['mode']:11}"
                    f"{row['share']:9.1%}{row['median_share']:9.1%}",
                    flush=True,
                )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
