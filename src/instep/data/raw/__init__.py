"""How raw files are read: where each may be cut, and which records lie between two cuts.

A file is cut at record boundaries that follow from the file alone, so the records of a piece,
and their order, never depend on how many workers read. To add a format: write a class with the
methods of `RawFormat` in a file of this folder, then add its line to `FORMATS`. Nothing here
knows shards, samples, processes or the user's function. Importing this package does not import
pyarrow or torch. Way in: `format_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from instep.registry import Registry

if TYPE_CHECKING:
    import pyarrow as pa


class Piece(msgspec.Struct, frozen=True):
    """A part of a raw file that one task reads.

    `start` and `stop` are in the format's own unit: bytes, frames, row groups, members. A record
    belongs to the piece in which it begins.
    """

    path: str
    format: str
    """A key of `FORMATS`."""
    start: int
    stop: int
    state: int = 0
    """What the reader has to know of everything before `start`, as `settle` found it."""


class Chunk(NamedTuple):
    """Some records of a piece, in their order; a few thousand, or a few MB of them."""

    rows: pa.RecordBatch | list[Any]
    """Decoded records: columns where the format has columns, else one object for each."""
    places: Sequence[int]
    """Where each is: something that `where` makes words of. Rises within a file."""
    bad: list[tuple[int, str]]
    """Records that cannot be decoded: place, and what is wrong."""


class RawFormat(Protocol):
    """One format of raw files."""

    suffixes: tuple[str, ...]
    """Of its files, in lower case, as '.jsonl'; '.gz' and '.zst' behind are understood by all."""

    scans: bool
    """Whether pieces have to be scanned (`scan`, `settle`) before they can be read."""

    def cut(self, path: Path, target: int) -> list[Piece]:
        """Cut a file into pieces of about `target` bytes; one if it cannot be cut.

        Raises:
            DataError: the file is not of this format, or is damaged.
        """

    def scan(self, piece: Piece) -> int:
        """Find what a piece does to the state of the reader; runs in any process, in any order."""

    def settle(self, pieces: list[Piece], scans: list[int]) -> list[Piece]:
        """Give the pieces of one file the state in which each begins.

        Raises:
            DataError: the file ends in a state in which it cannot (an open quote).
        """

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Decode the records of a piece.

        Raises:
            DataError: the file is damaged, or has changed since it was cut.
        """

    def where(self, path: Path, place: int) -> str:
        """Say where a record is, as 'line 17'. May read the file up to there."""


FORMATS: Registry = Registry("raw format", {})
"""Formats of raw files, by name."""
