"""Figures of some data, to be drawn: of a prepared folder, of a job, or of a run.

What nobody knows is left empty, and said in `unknown`. Ways in: `DataFigures`, and `of_run`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from instep.data.shards.manifest import Manifest
from instep.plain_file import plain
from instep.report.figures.lengths import PartLengths
from instep.report.figures.pixels import Pixels
from instep.report.figures.values import CountedValues

MOST_BAD, _LONGEST = 20, 1 << 20
"""Bad records that are shown; bytes of one that is read."""


class DataPart(NamedTuple):
    """Samples of one participant, or of one of `data.parts`."""

    samples: int
    share: float
    skew: float | None
    """Kullback-Leibler divergence of its labels from those of all, in nats; None: no labels."""
    shards: int = 0
    """Files of it, of `data.parts`; and how many of them are on this machine."""
    here: int = 0
    first: str = ""
    last: str = ""
    """Names of its first and its last file."""
    classes: Mapping[str, int] = {}
    """How often it has each label."""


class PreparedFolder(NamedTuple):
    """A prepared folder."""

    path: str
    manifest: Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFigures:
    """Figures of some data; what is empty is not known."""

    sides: Mapping[str, int]
    """Samples of each side, by its name."""
    split: str = ""
    """How they were divided, in words."""
    leaks: str = ""
    """A sentence on samples that are on both sides."""
    classes: Mapping[str, Mapping[str, Mapping[str, int]]]
    """How often each class is there: by what is counted, such as a column, then by side."""
    lengths: Sequence[PartLengths] = ()
    measured: str = ""
    """Which samples those are of, in words."""
    parts: Sequence[DataPart] = ()
    holders: str = "part"
    """The name of one of them."""
    folders: Sequence[PreparedFolder] = ()
    sample: Mapping[str, Any] | None = None
    """One sample, of `figures.sample.sample_table`."""
    images: Mapping[str, Pixels] = field(default_factory=dict)
    """Pictures in that sample, [height, width, 3], by the name of the part."""
    unknown: Sequence[str] = ()
    """Sentences on what is not known, and how to have it."""


def divergence(part: Mapping[Any, int], whole: Mapping[Any, int]) -> float:
    """Kullback-Leibler divergence of the labels of a part from those of all, in nats."""
    count, total = sum(part.values()), sum(whole.values())
    return sum(n / count * log(n / count * total / whole[label]) for label, n in part.items() if n)


def values_of(manifest: Manifest) -> dict[str, CountedValues]:
    """How often each value of a column is there, of columns whose values were counted."""
    found = {}
    for column in manifest.columns:
        if counts := manifest.statistics.get(column.name, {}).get("classes"):
            found[column.name] = CountedValues(column, counts)
    return found


def classes_of(manifest: Manifest) -> dict[str, Mapping[str, int]]:
    """How often each value of a column is there, of columns whose values are classes."""
    return {name: each.counts for name, each in values_of(manifest).items() if each.are_classes}


def classes_in(folders: Sequence[PreparedFolder]) -> dict[str, Mapping[str, Mapping[str, int]]]:
    """Counts of the values of columns, by column and folder, where no side is known."""
    return {
        f"{name} of {folder.path}": {"all": counts}
        for folder in folders
        for name, counts in classes_of(folder.manifest).items()
    }


def bad_records(folder: PreparedFolder) -> list[tuple[str, str]]:
    """Where the first bad records are, and what is wrong with each.

    Raises:
        OSError: the file cannot be read.
    """
    found: list[tuple[str, str]] = []
    if not folder.manifest.bad_file:
        return found
    with open(Path(folder.path) / folder.manifest.bad_file, "rb", opener=plain) as file:
        while len(found) < MOST_BAD and (line := file.readline(_LONGEST)).endswith(b"\n"):
            found.append(_place(line))
    return found


def _place(line: bytes) -> tuple[str, str]:
    try:
        record = json.loads(line)
        return str(record["where"]), str(record["error"])
    except (ValueError, KeyError, TypeError):  # damaged
        return "cannot be shown", line[:100].decode(errors="replace")
