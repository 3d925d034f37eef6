"""A look at samples of a dataset, each read once: their contents, and how long a few are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from instep.data.order import Order, key
from instep.data.reading.streams.mixed import AnyStream
from instep.data.samples.contents import content_of
from instep.report.figures.lengths import sizes_of

_OF_LOOK = 63


class FewSamples(NamedTuple):
    """Contents and sizes of samples."""

    contents: list[tuple[int, int]]
    """(position, content) of each sample that has a content."""
    sizes: list[dict[str, int]]
    """Sizes of each that could be read, by the name of its part."""
    first: list[tuple[int, Any]]
    """(position, sample) of the first one that could be read; or none."""


def look(dataset: Any, seed: int, most: int) -> FewSamples:
    """Read a keyed choice of samples; unreadable ones are reported when they are trained on."""
    found = FewSamples([], [], [])
    samples = len(dataset)
    if isinstance(dataset, AnyStream):
        numbers = dataset.few(most)
    else:
        order = Order(samples, key(seed, _OF_LOOK))
        numbers = order.indices(0, 0, min(samples, most)).tolist()
    for index in numbers:
        with suppress(Exception):
            sample = dataset[index]
            if not found.first:
                found.first.append((index, sample))
            found.sizes.append(sizes_of(sample))
            found.contents.append((index, content_of(sample)))
    return found


def every_content(dataset: Any, told: Callable[[], None]) -> Iterator[tuple[int, int]]:
    """Read all samples in order: (position, content) of each that has a content.

    Args:
        dataset: with a length.
        told: is called after each.
    """
    for index in range(len(dataset)):
        content = None
        with suppress(Exception):
            content = content_of(dataset[index])
        if content is not None:
            yield index, content
        told()
