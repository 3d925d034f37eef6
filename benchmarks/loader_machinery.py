"""Could torch's `DataLoader` machinery carry instep's reading, in place of processes of our own?

The same keyed slices of the same dataset are read by instep's loader processes, and by
a `DataLoader` with persistent workers whose sampler yields slices and whose dataset answers
each with a batch. Measured in turns within one run: start to first batch, batches per
second of small and large samples, what a killed process costs, and what it costs to begin
anew in the middle of an epoch (as when the number of workers changes):

    python benchmarks/loader_machinery.py [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from instep.data.loader import Loader, Slice
from instep.data.reading.fetch import Fetch

BATCH, COUNT, PROCESSES = 64, 200, 2


class Samples:
    """Rows of floats, made in Python one by one."""

    def __init__(self, values: int) -> None:
        self.values = values

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((self.values,), float(index)), index % 10


def slices(count: int) -> list[Slice]:
    return [Slice(0, n * BATCH, (n + 1) * BATCH) for n in range(count)]


class Instep:
    name = "instep"

    def __init__(self, dataset: Any) -> None:
        self._loader = Loader(dataset, seed=1, shuffle=True, processes=PROCESSES)

    def read(self, parts: list[Slice]) -> Iterator[Any]:
        return (read.batch for read in self._loader.read(parts))

    def pids(self) -> list[int]:
        return self._loader.pids

    def close(self) -> None:
        self._loader.close()


class Keyed(Dataset[Any]):
    """A dataset of slices: what the `DataLoader`'s workers would ask for."""

    def __init__(self, dataset: Any) -> None:
        self._fetch = Fetch(dataset, seed=1, shuffle=True)

    def __getitem__(self, part: Slice) -> Any:
        return self._fetch(Slice(*part))[0]

    def __len__(self) -> int:
        return self._fetch.samples


class Torch:
    name = "torch"

    def __init__(self, dataset: Any) -> None:
        self.parts: list[Slice] = []
        self._loader: Any = DataLoader(
            Keyed(dataset),
            batch_size=None,
            sampler=self,  # asked anew whenever it is iterated
            num_workers=PROCESSES,
            persistent_workers=True,
            collate_fn=lambda batch: batch,
        )

    def __iter__(self) -> Iterator[Slice]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def read(self, parts: list[Slice]) -> Iterator[Any]:
        self.parts = parts
        return iter(self._loader)

    def pids(self) -> list[int]:
        return [worker.pid for worker in self._loader._iterator._workers]

    def close(self) -> None:
        iterator = self._loader._iterator
        if iterator is not None:
            with suppress(RuntimeError):  # it raises where a worker was killed
                iterator._shutdown_workers()
            self._loader._iterator = None


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measure(kind: type[Instep] | type[Torch], values: int) -> dict[str, Any]:
    """One round of one machinery."""
    dataset = Samples(values)
    begin = time.perf_counter()
    reader = kind(dataset)
    loads = reader.read(slices(COUNT))
    next(loads)
    found: dict[str, Any] = {"start_s": time.perf_counter() - begin}
    took_s = seconds(lambda: [None for _ in loads])
    found["batches_per_s"] = (COUNT - 1) / took_s
    loads = reader.read(slices(COUNT))
    list(islice(loads, 20))
    found["again_s"] = seconds(lambda: next(iter(reader.read(slices(COUNT)))))
    loads = reader.read(slices(COUNT))
    list(islice(loads, 20))
    os.kill(reader.pids()[-1], signal.SIGKILL)
    begin, got = time.perf_counter(), 20
    try:
        for _ in loads:
            got += 1
    except (RuntimeError, OSError, EOFError) as error:
        found["killed"] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    found["after_kill"] = f"{got} of {COUNT} batches in {time.perf_counter() - begin:.2f} s"
    found["close_s"] = seconds(reader.close)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    answer: dict[str, Any] = {}
    for values in (16, 784, 10_000):
        rounds: dict[str, list[dict[str, Any]]] = {"instep": [], "torch": []}
        for _ in range(args.rounds):
            for kind in (Instep, Torch):
                rounds[kind.name].append(measure(kind, values))
        for name, each in rounds.items():
            figures = {
                key: median(one[key] for one in each)
                for key in ("start_s", "batches_per_s", "again_s", "close_s")
            }
            words = {key: each[-1][key] for key in ("killed", "after_kill") if key in each[-1]}
            answer[f"{name}, {values} floats"] = {**figures, **words}
            print(
                f"{name:7} {values:7} floats  "
                + "  ".join(f"{key} {value:.4g}" for key, value in figures.items()),
                *words.values(),
                sep="  ",
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(answer, indent=1))


if __name__ == "__main__":
    main()
