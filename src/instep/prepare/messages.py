"""What the master of a preparation and its workers tell each other: tasks, and their results."""

from __future__ import annotations

from typing import Any

import msgspec

from instep.data.raw import Piece
from instep.data.shards.columns import Column
from instep.data.shards.statistics import Figures
from instep.prepare.asked import Asked


class Segment(msgspec.Struct, frozen=True):
    """Some samples of a file of samples."""

    file: str
    first: int
    samples: int


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker."""

    asked: Asked
    folder: str
    """Where results of tasks lie."""


class Scan(msgspec.Struct, frozen=True, tag=True):
    """What a piece of a file does to the state of its reader."""

    number: int
    piece: Piece


class Head(msgspec.Struct, frozen=True, tag=True):
    """The columns of the first samples that there are, of these pieces in their order."""

    number: int
    pieces: list[Piece]


class Map(msgspec.Struct, frozen=True, tag=True):
    """Samples of the records of some pieces, into a file."""

    number: int
    key: str
    pieces: list[Piece]
    columns: list[Column]


class Again(msgspec.Struct, frozen=True, tag=True):
    """A few records once more, in another process: whether the samples are the same ones."""

    number: int
    file: str
    """Pickled (piece, place, record, digest of its samples, whether it draws) of each. In a file:
    whoever sends a large message to a process that is stopped waits for it."""


class Sort(msgspec.Struct, frozen=True, tag=True):
    """The samples of one result by their numbers: of a shuffle, or of their key."""

    number: int
    key: str
    task: int
    """Which of the results in their order."""
    parts: list[Segment]
    columns: list[Column]


class Merge(msgspec.Struct, frozen=True, tag=True):
    """The samples of a range of numbers, of all sorted results."""

    number: int
    key: str
    sorted: list[str]
    """Keys of `Sort`, in the order of results."""
    first: int
    stop: int
    columns: list[Column]


class Join(msgspec.Struct, frozen=True, tag=True):
    """A shard of the samples of other files."""

    number: int
    parts: list[Segment]
    columns: list[Column]
    to: str


class Digest(msgspec.Struct, frozen=True, tag=True):
    """The digests of blocks of samples, of shards in their order."""

    number: int
    files: list[tuple[str, int]]
    first: int
    stop: int


class Sum(msgspec.Struct, frozen=True, tag=True):
    """The CRC-32 of some bytes of a raw file."""

    number: int
    path: str
    first: int
    stop: int


Task = Scan | Head | Map | Again | Sort | Merge | Join | Digest | Sum


class Mapped(msgspec.Struct, kw_only=True):
    """The result of a `Map`; the file beside its samples has it too."""

    key: str
    samples: int
    bytes: int
    records: int
    bad: int
    """Records without a sample; `KEY.bad` has them."""
    columns: list[Column]
    figures: list[Figures]
    parts: list[Segment]
    """Where the samples are, in their order."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A task's result."""

    number: int
    value: Any = None
    again: str = ""
    """The file of an `Again`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A task cannot be done: the error that ends the command."""

    number: int
    kind: str
    """A class of `errors.py`."""
    text: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""

    where: str = ""
    """Where it reads."""
    records: int = 0
    """Records of its present task so far."""


Answer = Done | Failed | Beat
