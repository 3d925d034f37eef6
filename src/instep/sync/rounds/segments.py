"""The parameters one after the other, cut where neither ranks nor participants show in a bit.

Who owns which stretch of them, and which stretch agrees at a time, follows from the cuts. What is
encoded, and where it goes, is in `exchange.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.buckets import laid_out_like
from instep.comm.codecs.base import CUT
from instep.errors import SpecError
from instep.words import plural

_MOST_SEGMENTS, _LONGEST = 64, 16 * CUT
_NEAR = 0.05
"""A fragment ends with a parameter if that is so near, as a part of a fragment, to where it would
end by size."""

Stretch = tuple[int, int]
"""Elements from one to another."""


class Segments:
    """Parameters, cut into segments.

    A segment is of one parameter: values of others do not show in how it is encoded, so that all
    ranks of a mesh that have the same of a parameter decode the same bits.

    Args:
        parameters: what this rank has of them.
        plain: tells which of them are sent as they are; none, if it is left out.
        fragments: into how many parts of about the same size they are cut, each of which has
            segments of its own.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        plain: Callable[[Tensor], bool] = lambda _: False,
        *,
        fragments: int = 1,
    ) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        each = -(-sum(sizes) // (fragments * _MOST_SEGMENTS * CUT)) * CUT
        each = max(CUT, min(each, _LONGEST))
        self.fragments = _fragments(sizes, fragments)
        """From where to where each goes; empty ones, of a model with fewer elements."""
        self.places = list[slice]()
        self.cuts: list[int] = []
        """Where segments begin, and where the last one ends."""
        self.plain: list[bool] = []
        """Of each segment, whether it is sent as it is."""
        self.length = 0
        for parameter, size in zip(parameters, sizes, strict=True):
            begin, self.length = self.length, self.length + size
            self.places.append(slice(begin, self.length))
            within = {start for start, _ in self.fragments if begin < start < self.length}
            self.cuts += sorted({*range(begin, self.length, each), *within})
            self.plain += [plain(parameter)] * (len(self.cuts) - len(self.plain))
        self.cuts.append(self.length)

    def of(self, start: int, stop: int) -> Iterator[tuple[int, slice]]:
        """Number and place of the segments from one cut to another."""
        for number, (low, high) in enumerate(zip(self.cuts, self.cuts[1:], strict=False)):
            if start <= low and high <= stop:
                yield number, slice(low, high)

    def stretches(
        self, owners: Sequence[int], size: int, fragment: Stretch | None = None
    ) -> list[Stretch]:
        """By rank, from where to where it owns them; those that own nothing have an empty one.

        Args:
            owners: ranks.
            size: how many ranks there are.
            fragment: of which; of all, if it is left out.
        """
        begin, end = fragment or (0, self.length)
        cuts, count = [cut for cut in self.cuts if begin <= cut <= end], len(owners)
        marks = [
            min(cut for cut in cuts if (cut - begin) * count >= n * (end - begin))
            for n in range(count)
        ]
        marks.append(end)
        found = [(end, end)] * size
        for place, rank in enumerate(owners):
            found[rank] = marks[place], marks[place + 1]
        return found

    def read(self, parameters: Sequence[Tensor], stretch: Stretch) -> Tensor:
        """The parameters' values in a stretch, [elements] float32, in memory of its own."""
        start, stop = stretch
        found = [
            parameter.detach().flatten()[max(start - place.start, 0) : stop - place.start].float()
            for parameter, place in zip(parameters, self.places, strict=True)
            if place.start < stop and start < place.stop
        ]
        device = parameters[0].device
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.float32, device=device)

    def give(self, parameters: Sequence[Tensor], values: Mapping[Stretch, Tensor]) -> None:
        """Give parameters the values of stretches [elements] as `.grad`, zero beside them."""
        length, device = self.length if values else 0, parameters[0].device
        flat = torch.zeros(length, dtype=torch.float32, device=device)
        for (start, stop), each in values.items():
            flat[start:stop] = each
        for parameter, place in zip(parameters, self.places, strict=True):
            parameter.grad = None
            if any(place.start < stop and start < place.stop for start, stop in values):
                part = flat[place].view(parameter.shape).to(parameter.dtype)
                parameter.grad = laid_out_like(part, parameter)


def _fragments(sizes: Sequence[int], count: int) -> list[Stretch]:
    length, ends, at = sum(sizes), [0], 0
    for size in sizes:
        ends.append(at := at + size)
    marks = []
    for number in range(count + 1):
        mark = number * length // count
        nearest = min(ends, key=lambda end: (abs(end - mark), end))
        marks.append(nearest if abs(nearest - mark) * count <= _NEAR * length else mark)
    return list(itertools.pairwise(marks))


def check_fragments(parameters: Sequence[Tensor], fragments: int) -> None:
    """Refuse a model that cannot be sent in so many fragments.

    Raises:
        SpecError: it cannot.
    """
    if any(parameter.dtype == torch.float64 for parameter in parameters):
        raise SpecError(
            "sync.options.fragments: the model has parameters of torch.float64, and fragments "
            "are sent as float32. Use float32, or fragments = 1."
        )
    if fragments > (count := sum(parameter.numel() for parameter in parameters)):
        raise SpecError(
            f"sync.options.fragments = {fragments}: the model has {plural(count, 'number')} to "
            "train, and each fragment needs one. Use fewer."
        )
