"""From the results of tasks to shards: which samples make which file, and what the manifest says.

A task's file becomes a shard as it is where it is of about the size of one; small ones are joined,
large ones divided. All is a function of the results in their order. Way in: `layout`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from instep.data.shards.columns import Column, Misfit, widened_all
from instep.data.shards.statistics import Figures
from instep.errors import DataError
from instep.prepare.messages import Mapped, Segment


class Planned(NamedTuple):
    """A shard that is to be."""

    name: str
    parts: list[Segment]
    samples: int
    whole: bool
    """Whether the one file of `parts` is the shard."""
    crc32: int
    """Checksum of that file."""


def columns_of(results: Sequence[Mapped]) -> list[Column]:
    """The columns that hold the samples of all tasks.

    Raises:
        DataError: there are none.
    """
    found: list[Column] | None = None
    for result in results:
        if result.samples:
            try:
                found = result.columns if found is None else widened_all(found, result.columns)
            except Misfit as error:
                raise DataError(f"{error}.") from None
    return found or []


def figures_of(results: Sequence[Mapped], columns: Sequence[Column]) -> dict[str, Any]:
    """The statistics of each column, merged in the order of tasks."""
    all_of = [Figures() for _ in columns]
    for result in results:
        if result.samples:
            for own, more in zip(all_of, result.figures, strict=True):
                own.take(more)
    tables = {c.name: own.as_table(c) for c, own in zip(columns, all_of, strict=True)}
    return {name: table for name, table in tables.items() if table}


def layout(results: Sequence[Mapped], columns: Sequence[Column], size: int) -> list[Planned]:
    """The shards, in order.

    Args:
        results: of all tasks, in order.
        columns: that all samples are to have.
        size: bytes that a shard has about.
    """
    kept = hashlib.sha256(repr(columns).encode()).hexdigest()
    return [_planned(group, columns, kept) for group in _groups(results, size)]


def _groups(results: Sequence[Mapped], size: int) -> Iterator[list[tuple[Mapped, int, int]]]:
    """The results that make each shard: with the first of its samples, and how many."""
    held, bytes_held = list[tuple[Mapped, int, int]](), 0
    for result in results:
        if not result.samples:
            continue
        if held and bytes_held + result.bytes > 1.5 * size:
            yield held
            held, bytes_held = [], 0
        if result.bytes >= 2 * size:
            count = round(result.bytes / size)
            cuts = [result.samples * at // count for at in range(count + 1)]
            for first, stop in pairwise(cuts):
                if stop > first:
                    yield [(result, first, stop - first)]
            continue
        held.append((result, 0, result.samples))
        bytes_held += result.bytes
        if bytes_held >= 0.75 * size:
            yield held
            held, bytes_held = [], 0
    if held:
        yield held


def _planned(group: list[tuple[Mapped, int, int]], columns: Sequence[Column], kept: str) -> Planned:
    parts = [part for of, first, count in group for part in _slice(of.parts, first, count)]
    text = repr([(of.key, first, count) for of, first, count in group]) + kept
    name = f"shard-{hashlib.sha256(text.encode()).hexdigest()[:16]}.arrow"
    alone = group[0][0]
    whole = (
        len(group) == 1
        and parts == alone.parts
        and len(parts) == 1
        and parts[0].first == 0
        and alone.columns == list(columns)
        and parts[0].file.endswith(f"{alone.key}.arrow")
    )
    return Planned(name, parts, sum(part.samples for part in parts), whole, alone.crc32)


def _slice(parts: Sequence[Segment], first: int, count: int) -> Iterator[Segment]:
    """Some samples of a result."""
    for part in parts:
        begin, stop = max(first, 0), min(first + count, part.samples)
        if stop > begin:
            yield Segment(part.file, part.first + begin, stop - begin)
        first -= part.samples


def moved(
    results: Sequence[Mapped], shards: Sequence[Planned], columns: Sequence[Column]
) -> Iterator[Mapped]:
    """The results with the places that their samples have in shards.

    Those are left out whose samples have wider columns there: another command may want them as
    they were.
    """
    places = iter([Segment(shard.name, 0, shard.samples) for shard in shards])
    left = Segment("", 0, 0)
    for result in results:
        parts, wanted = list[Segment](), result.samples
        while wanted:
            if not left.samples:
                left = next(places)
            count = min(wanted, left.samples)
            parts.append(Segment(left.file, left.first, count))
            left = Segment(left.file, left.first + count, left.samples - count)
            wanted -= count
        if not result.samples or result.columns == list(columns):
            yield msgspec.structs.replace(result, parts=parts)
