"""Samples that are on both sides of a split: to validate on them tells nothing new.

Contents are compared (`contents.py`), so a dataset whose samples differ at each reading has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Duplicates(NamedTuple):
    """What the contents of two sides showed."""

    looked_at: list[int]
    """Samples of the training and of the validation side whose contents are known."""
    twins: list[tuple[int, int]]
    """Of each sample to validate on that is trained on too, in ascending order: its position, and
    that of the first one with its content."""


def duplicates(
    train: Iterable[tuple[int, int]], validation: Iterable[tuple[int, int]]
) -> Duplicates:
    """Compare (position, content) of samples of two sides.

    Those of the validation side are kept in memory, those of the training side only pass by.
    """
    validated = sorted(validation)
    wanted = {content for _, content in validated}
    first: dict[int, int] = {}
    trained = 0
    for position, content in train:
        trained += 1
        if content in wanted:
            first[content] = min(position, first.get(content, position))
    twins = [(position, first[content]) for position, content in validated if content in first]
    return Duplicates([trained, len(validated)], twins)
