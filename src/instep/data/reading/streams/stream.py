"""A stream of which any sample can be asked for, by number; forward is fast."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from instep.data.order import Indices
from instep.data.reading.streams.given import GivenStream, hash_of
from instep.data.reading.streams.kept import KeptWindows
from instep.data.reading.streams.once import KeptSamples, OncePart
from instep.data.reading.streams.part import StreamPart
from instep.data.reading.streams.turns import StreamPlan
from instep.errors import DataError

HEADS, LENGTHS, TOKENS = (-5, 0, 0), (-6, 0, 0), (-7, 0, 0)
"""Asked in place of a slice: how the parts begin, how many samples each has, how long samples of
each stream of a mixture are."""

LET_GO = (-8, 0, 0)
"""Said of what is read once: leave the parts to other processes."""

QUESTIONS = (HEADS, LENGTHS, TOKENS, LET_GO)

COUNT_S = 0.5
"""For so long at a time samples are counted."""

HEAD = 32
"""Samples by which parts are compared."""

_IDLE = 64
"""A part of which so many reads have wanted nothing is closed, and twice as many as any part that
was wanted again has waited."""


def is_stream(dataset: Any) -> bool:
    """Whether a dataset gives samples one after the other alone."""
    if isinstance(dataset, IterableDataset):
        return True
    kind = type(dataset)
    return hasattr(kind, "__iter__") and not hasattr(kind, "__getitem__")


class Stream:
    """Samples of a stream, by the numbers of its plan.

    Args:
        given: as the user gave it.
        plan: how it is divided.
        seed: of the job.
        folder: for states that other processes continue from; None for none.
        writer: number of this process there.
        first_file: number of the files of part 0 there.
        once: for what cannot be read again; None for what can.
    """

    def __init__(
        self,
        given: GivenStream,
        plan: StreamPlan,
        seed: int,
        folder: Path | None = None,
        writer: int = 0,
        *,
        first_file: int = 0,
        once: KeptSamples | None = None,
    ) -> None:
        self.given, self.plan = given, plan
        self._seed, self._folder, self._writer = seed, folder, writer
        self._first_file, self.once = first_file, once
        self._parts: dict[int, StreamPart | OncePart] = {}
        self._used: dict[int, int] = {}
        self._reads, self._idle = 0, _IDLE
        self._counting: Iterator[list[int]] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """All but iterators: another process has its own.

        Raises:
            DataError: only forks can read it.
        """
        if self.once is not None:
            raise DataError("memory for what is read once is shared with forks alone")
        return vars(self) | {"_parts": {}, "_used": {}, "_counting": None}

    @property
    def has_state(self) -> bool:
        """Whether the dataset says where it is."""
        return self.given.has_state and self.once is None

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int] | Indices) -> list[Any]:
        """Samples by their numbers, in this order.

        Raises:
            DataError: the stream has other samples than before, or cannot be divided so.
        """
        self._reads += 1
        places = [self.plan.place(int(number)) for number in numbers]
        found = [self._part(place.part).sample(place.epoch, place.at) for place in places]
        if (
            self.once is None
        ):  # else only `LET_GO` closes one: what comes next is not to be had anew
            idle = self._reads - self._idle
            for part in [p for p in self._parts if self._used[p] < idle]:
                self._close(part)
        return found

    def named(self, number: int) -> str:
        """Name a sample for messages."""
        part, epoch, at = self.plan.place(number)
        return f"sample {at:,} of part {part} of {self.given.named}, in epoch {epoch + 1},"

    def few(self, most: int) -> list[int]:
        """Numbers of the first samples of part 0, which cost little to read."""
        first = min(most, self.plan.window_of(0, 0)) if self.once is None else 0
        return [self.plan.number(0, 0, count) for count in range(first)]

    def answer(self, question: tuple[int, int, int]) -> Any:
        """Answer one of `QUESTIONS`: as `heads`, or as `counted`."""
        if question == LET_GO:
            for part in [*self._parts]:
                self._close(part)
            return None
        return self.heads() if question == HEADS else self.counted(COUNT_S)

    def heads(self) -> list[list[int]]:
        """The contents of the first samples of each part, and last those of part 0 once more."""
        parts = [self._made(number) for number in range(self.plan.parts)]
        return [[*map(hash_of, part.head(HEAD))] for part in (*parts, parts[0])]

    def first(self, most: int) -> list[Any]:
        """Read about so many of its first samples, evenly from all parts."""
        each = -(-most // self.plan.parts)
        return [s for number in range(self.plan.parts) for s in self._made(number).head(each)]

    def counted(self, seconds: float) -> list[int]:
        """Count on for so long: the samples of each part; empty while they are not all known."""
        began = time.monotonic()
        if self._counting is None:
            self._counting = self._count()
        for sizes in self._counting:
            if len(sizes) == self.plan.parts:
                return sizes
            if time.monotonic() - began > seconds:
                break
        return []

    def _count(self) -> Iterator[list[int]]:
        sizes: list[int] = []
        for number in range(self.plan.parts):
            sizes.append(0)
            for sizes[-1] in self._made(number).length():
                yield []
        yield sizes

    def _part(self, number: int) -> StreamPart | OncePart:
        self._idle = max(self._idle, 2 * (self._reads - self._used.get(number, self._reads)))
        self._used[number] = self._reads
        if number not in self._parts and self.once is not None:
            self._parts[number] = OncePart(self.given, self.plan, number, self._seed, self.once)
        elif number not in self._parts:
            self._parts[number] = self._made(number)
        return self._parts[number]

    def _close(self, number: int) -> None:
        part = self._parts.pop(number)
        if isinstance(part, OncePart):
            part.close()

    def _made(self, number: int) -> StreamPart:
        kept = KeptWindows(self._folder, self._first_file + number, self._writer)
        return StreamPart(self.given, self.plan, number, self._seed, kept)
