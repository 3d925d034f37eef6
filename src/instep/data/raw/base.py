"""What a format of raw files can do, and the table of formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from instep.registry import Registry

if TYPE_CHECKING:
    import pyarrow as pa


class Piece(msgspec.Struct, frozen=True):
    """A part of a raw file that one task reads.

    `start` and `stop` are in the format's own unit: bytes, row groups, batches, images. The format
    says to which piece a record at a cut belongs; it belongs to one.
    """

    path: str
    format: str
    """A key of `FORMATS`."""
    start: int
    stop: int
    state: int = 0
    """What the reader has to know of everything before `start`, as `cut` or `settle` found it."""
    learned: str = ""
    """What the reader has to know of the whole source, of `RawFormat.learn`."""
    scan: bool = False
    """Whether all pieces of this file have to be scanned and settled before they are read."""
    number: int = 0
    """Of the file, for what is keyed by it: from its name, not from the folder that it lies in."""


class Chunk(NamedTuple):
    """Some records of a piece, in their order; a few thousand, or a few MB of them."""

    rows: pa.RecordBatch | list[Any]
    """Decoded records: columns where the format has columns, else one object for each."""
    places: Sequence[int]
    """Where each is: something that `where` makes words of. Rises within a file."""
    bad: list[tuple[int, str]]
    """Records that cannot be decoded: place, and what is wrong."""
    texts: Sequence[bytes] = ()
    """The bytes of each of `bad`, where the format knows them."""


class RawFormat(Protocol):
    """One format of raw files."""

    suffixes: tuple[str, ...]
    """Of its files, in lower case, as '.jsonl'."""

    compressed: bool
    """Whether its files may have '.gz' or '.zst' behind their suffix."""

    def files(self, path: Path) -> list[Path]:
        """The files that hold what is read from a path, in their order: itself, or a folder's."""

    def learn(self, paths: Sequence[Path], types: Mapping[str, str] | None = None) -> str:
        """Decide what all files of one source have in common, from their heads: types of columns,
        classes. Empty where a file says everything itself. `types` are those that the user says.

        Raises:
            DataError: the files do not go together.
        """

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut a file into pieces of about `target` bytes; one if it cannot be cut, none if it is
        empty. Without `learned`, the file is a source of its own.

        Raises:
            DataError: the file is not of this format, or is damaged.
        """

    def scan(self, piece: Piece) -> int:
        """Find what a piece does to the state of the reader; runs in any process, in any order."""

    def settle(self, pieces: list[Piece], scans: list[int]) -> list[Piece]:
        """Give all pieces of one file the state in which each begins, from what `scan` found.

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


class SingleFiles:
    """To inherit from, for formats of single files that say everything themselves, and of which a
    piece needs nothing of those before."""

    compressed = False

    def files(self, path: Path) -> list[Path]:
        """The file itself."""
        return [path]

    def learn(self, paths: Sequence[Path], types: Mapping[str, str] | None = None) -> str:
        """Nothing: each file says everything itself."""
        return ""

    def scan(self, piece: Piece) -> int:
        """Refuse: no piece has `scan`."""
        raise AssertionError("never asked for")

    def settle(self, pieces: list[Piece], scans: list[int]) -> list[Piece]:
        """Refuse: no piece has `scan`."""
        raise AssertionError("never asked for")


FORMATS: Registry = Registry(
    "raw format",
    {
        "arrow": "instep.data.raw.columns:Arrow",
        "csv": "instep.data.raw.csv:Csv",
        "images": "instep.data.raw.images:Images",
        "json_lines": "instep.data.raw.lines:JsonLines",
        "parquet": "instep.data.raw.columns:Parquet",
        "tar": "instep.data.raw.tar:Tar",
        "text": "instep.data.raw.lines:TextLines",
    },
)
"""Formats of raw files, by name."""
