"""Processes that compute one micro-batch together agree on what is in it.

Along `tensor` and `stages` each process reads the samples by itself. A sample that one of them
cannot read is left out by all. Now and then they compare what they have read: a dataset that draws
numbers of its own gives each another batch, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import msgspec
import torch

from instep.comm.base import Comm
from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import key
from instep.data.samples.contents import content_of, rows_of
from instep.data.samples.fingerprint import REMEDY
from instep.errors import DataError
from instep.state.broadcast import broadcast_bytes
from instep.words import listed, some_workers

FIRST, ONE_IN = 4, 256
"""Batches whose contents are compared: the first of a process, and then one of so many."""


class SameBatch:
    """One process's end of the agreement about one loader; it is the loader's `agree`.

    Args:
        comm: of the processes that get the same batches.
        workers: their numbers, by rank.
        axes: of the mesh, for messages.
        loader: all of them read the same slices from theirs, in the same order.
        device: of the tensors that `comm` moves.
        waiting: the context in which this process only waits for the others.
    """

    def __init__(
        self,
        comm: Comm,
        workers: Sequence[int],
        axes: str,
        loader: Loader,
        device: torch.device,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._comm, self._workers, self._axes = comm, workers, axes
        self._loader, self._device, self._waiting = loader, device, waiting
        self._reads = 0

    def __call__(self, part: Slice, read: Read) -> Read:
        """What all of them have of a slice.

        Raises:
            DataError: they have read different contents.
            PeerError: one of them was lost.
        """
        self._reads += 1
        compares = self._reads <= FIRST or self._reads % ONE_IN == 0
        if not (compares or self._loader.skips):
            return read
        while True:
            lost = key(len(read.skipped), *sorted(each.sample for each in read.skipped))
            content = _content(read.batch) if compares else 0
            skips, contents = zip(*self._gathered([lost, content]), strict=True)
            if len(set(skips)) == 1:
                break
            read = self._loader.read_without(part, self._lost_by_any(read))
        if len(set(contents)) > 1:
            self._refuse(part, read)
        return read

    def _gathered(self, own: Sequence[int]) -> list[list[int]]:
        """Numbers of each process, by rank."""
        part = torch.tensor(own, dtype=torch.int64, device=self._device)
        every = torch.empty(self._comm.size * len(own), dtype=torch.int64, device=self._device)
        with self._waiting():
            self._comm.all_gather(every, part).wait()
            found: list[list[int]] = every.view(-1, len(own)).tolist()
        return found

    def _lost_by_any(self, read: Read) -> list[Skipped]:
        """The samples that at least one of them could not read; the cause says which one."""
        own = msgspec.json.encode(read.skipped)
        with self._waiting():
            told = [
                broadcast_bytes(own, self._comm, rank, self._device)
                for rank in range(self._comm.size)
            ]
        by, causes = dict[int, list[int]](), dict[int, str]()
        for worker, text in zip(self._workers, told, strict=True):
            for sample, cause in msgspec.json.decode(text, type=list[Skipped]):
                by.setdefault(sample, []).append(worker)
                causes.setdefault(sample, cause)
        return [
            Skipped(sample, f"{causes[sample]} (on {some_workers(who)})")
            for sample, who in by.items()
        ]

    def _refuse(self, part: Slice, read: Read) -> None:
        lost = {each.sample for each in read.skipped}
        samples = [index for index in self._loader.indices(part).tolist() if index not in lost]
        rows = rows_of(read.batch, range(len(samples)))
        every = self._gathered([_content(row) for row in rows])
        which = [n for n, contents in enumerate(zip(*every, strict=True)) if len(set(contents)) > 1]
        what = f"sample {samples[which[0]]}" if which else f"samples {listed(samples, 4)}"
        raise DataError(
            f"{some_workers(self._workers)} compute a micro-batch together ([mesh] {self._axes}), "
            f"and each has read something else for {what}: the dataset, or what augments or "
            "collates it, draws random numbers that do not follow from the job's seed. "
            f"{REMEDY}."
        )


def _content(batch: Any) -> int:
    """0 for what has no content."""
    with suppress(Exception):  # a type of the user's may raise anything
        return content_of(batch)
    return 0
