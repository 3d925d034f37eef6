"""Several streams as one dataset in which a number is a sample of one of their parts.

Each is read as a stream by itself (`stream.py`); a number tells which. Which samples make a step,
`shares.py` says. Ways in: `JoinedStreams`, `MixedStreams`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, IterableDataset

from instep.data.order import Indices
from instep.data.reading.streams.shares import MixedPlan
from instep.data.reading.streams.stream import COUNT_S, HEADS, LENGTHS, Stream, is_stream

MEASURED = 256
"""First samples of a stream by which the tokens of one are known."""


class JoinedStreams(IterableDataset[Any]):
    """Streams of a recipe by their names; a run reads each of them by itself."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        self.sources = dict(sources)

    @property
    def names(self) -> list[str]:
        """Their names."""
        return list(self.sources)

    def __iter__(self) -> Iterator[Any]:
        """All samples, one stream after the other."""
        for each in self.sources.values():
            yield from each


def are_streams(given: Any) -> bool:
    """Whether this is a dict of streams."""
    if not isinstance(given, dict) or not given:
        return False
    return all(
        isinstance(name, str)
        and is_stream(each)
        and not isinstance(each, DataLoader)
        and not hasattr(each, "__next__")
        for name, each in given.items()
    )


class MixedStreams:
    """Samples of several streams, by the numbers of their plans.

    Args:
        streams: the number of each is its `source` in the plan.
        plan: how they are mixed.
        length: of a sample in a list of samples, by its place; None where nobody says it.
    """

    def __init__(
        self,
        streams: Sequence[Stream],
        plan: MixedPlan,
        length: Callable[[Any, int], Any] | None = None,
    ) -> None:
        self.streams, self.plan, self._length = list(streams), plan, length
        self._known: list[list[int]] = []

    @property
    def names(self) -> list[str]:
        """Those of the streams."""
        return [each.given.name for each in self.streams]

    @property
    def has_state(self) -> bool:
        """Whether each of the datasets says where it is."""
        return all(each.has_state for each in self.streams)

    once = None
    """No stream of a mixture is read once."""

    def __len__(self) -> int:
        return self.plan.samples

    def __getitem__(self, number: int) -> Any:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: Sequence[int] | Indices) -> list[Any]:
        """Samples by their numbers, in this order.

        Raises:
            DataError: a stream has other samples than before, or cannot be divided so.
        """
        found: list[Any] = [None] * len(numbers)
        for source, stream in enumerate(self.streams):
            places = [at for at, n in enumerate(numbers) if n % len(self.streams) == source]
            rows = stream.__getitems__([int(numbers[at]) for at in places]) if places else []
            for at, row in zip(places, rows, strict=True):
                found[at] = row
        return found

    def named(self, number: int) -> str:
        """Name a sample for messages."""
        return self.streams[number % len(self.streams)].named(number)

    def few(self, most: int) -> list[int]:
        """Numbers of the first samples of part 0 of each, which cost little to read."""
        each = max(1, most // len(self.streams))
        return [number for stream in self.streams for number in stream.few(each)]

    def answer(self, question: tuple[int, int, int]) -> Any:
        """Answer one of `QUESTIONS`: as `heads`, `counted` or `lengths`."""
        if question == HEADS:
            return self.heads()
        return self.counted(COUNT_S) if question == LENGTHS else self.lengths()

    def heads(self) -> list[list[int]]:
        """Those of each stream (`Stream.heads`), one after the other."""
        return [head for stream in self.streams for head in stream.heads()]

    def counted(self, seconds: float) -> list[int]:
        """Count on for so long: the samples of each part; empty while they are not all known."""
        while len(self._known) < len(self.streams):
            if not (sizes := self.streams[len(self._known)].counted(seconds)):
                return []
            self._known.append(sizes)
        return [size for sizes in self._known for size in sizes]

    def lengths(self) -> list[float]:
        """The mean length of the first samples of each stream; 0 where it has none."""
        if self._length is None:
            return []
        means = []
        for stream in self.streams:
            rows = stream.first(MEASURED)
            told = [self._length(rows, place) for place in range(len(rows))]
            means.append(float(np.mean(told)) if told else 0.0)
        return means


AnyStream = Stream | MixedStreams
"""A stream, or several, as a job divides them."""
