"""Which tasks a preparation has: a function of the raw files and of what is asked for.

Files are cut at record boundaries, small ones are put together. The key of a task says what it
reads and what is made of it, so a result of the same key is the same one, of whichever command.
Way in: `files_of` and `tasks_of`.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.data import raw
from instep.data.raw import FORMATS, Piece, RawFormat
from instep.data.shards.columns import Column, as_plain
from instep.data.shards.urls.elsewhere import RawCopy, copies_of
from instep.errors import DataError, SpecError
from instep.prepare.asked import Asked
from instep.words import is_url, not_utf8

SMALLEST, LARGEST, PIECES = 1 << 20, 64 << 20, 128
"""A file is cut into about so many pieces of at least and at most so many bytes: what a killed
worker has to do again is little of the whole."""

_BREAKS = 16
"""One small file of so many begins a new task, by its name: so a new file changes few tasks."""

_MOST_FILES = 500
"""Small files of one task: its message is to be a small one, too."""

VERSION = 3
"""Of what tasks make; other versions do not use its results."""


class RawFile(NamedTuple):
    """One file of the sources."""

    path: Path
    format: str
    bytes: int
    modified_ns: int
    state: str
    """A digest of all its files: how each is called, its size, and when it was written; or the
    version of the file at a URL."""
    url: str = ""
    """The place of a file of another file system; `path` is a copy."""
    number: int = 0
    """63 bits of its name, and of how many of that name come before it."""
    stamp: str = ""
    """A digest of the inodes of all its files, and of when these were changed."""
    known: str = ""
    """The version that it had for an earlier command, if it is the same."""

    @property
    def version(self) -> str:
        """What tells it from a former file of its name."""
        return self.known or (self.state if self.url else digest_of([self.state, self.stamp]))

    @property
    def name(self) -> str:
        """The name in the manifest."""
        return self.url or str(self.path)

    @property
    def place(self) -> str:
        """Where it is, wherever the command was given."""
        return self.url or str(self.path.absolute())


class Group(NamedTuple):
    """The pieces of one task."""

    key: str
    pieces: list[Piece]


def files_of(asked: Asked) -> list[RawFile]:
    """The raw files, in their order.

    Raises:
        SpecError: a source does not exist, or is of no format that is known.
        DataError: a file cannot be read.
    """
    found = []
    copies = copies_of([source for source in asked.sources if is_url(source)])
    for path, name in raw.sources([each for each in asked.sources if not is_url(each)]):
        try:
            about = {each: os.stat(each) for each in FORMATS[name]().files(path)}
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}.") from None
        if not_utf8(str(path)) is not None:
            raise DataError(f"{str(path)!r}: its name is no UTF-8. Rename it.")
        if odd := [each for each, one in about.items() if not stat.S_ISREG(one.st_mode)]:
            raise DataError(f"{odd[0]} is no plain file, but a pipe or a device. Name files.")
        size = sum(one.st_size for one in about.values())
        modified = max(one.st_mtime_ns for one in about.values())
        states = [(os.path.relpath(p, path), a.st_size, a.st_mtime_ns) for p, a in about.items()]
        stamp = digest_of([(a.st_ino, a.st_ctime_ns) for a in about.values()])
        found.append(RawFile(path, name, size, modified, digest_of(states), stamp=stamp))
    to = Path(asked.to).resolve()
    for file in found:
        if file.path.resolve().is_relative_to(to):
            raise SpecError(f"--to {asked.to} has the source {file.path}. Name another folder.")
    return _numbered([*found, *map(_of_copy, copies)])


def _numbered(files: Sequence[RawFile]) -> list[RawFile]:
    """The same with numbers: that of a copy is that of the file."""
    numbered, of_name = list[RawFile](), Counter[str]()
    for file in files:
        name = os.path.basename(file.name)
        number = int(digest_of([name, of_name[name]]), 16) >> 33
        of_name[name] += 1
        numbered.append(file._replace(number=number))
    return numbered


def _of_copy(copy: RawCopy) -> RawFile:
    size = copy.path.stat().st_size
    return RawFile(copy.path, raw.format_of(copy.path), size, 0, copy.version, copy.url)


def cut(files: Sequence[RawFile], types: Mapping[str, str]) -> list[tuple[RawFile, list[Piece]]]:
    """The pieces of each file; those that are to be scanned have no state yet.

    Args:
        files: of the sources.
        types: of columns of CSV files, where their heads say another one.

    Raises:
        DataError: a file is damaged, or files do not go together.
        SpecError: there is no such column or type, or no file is CSV.
    """
    if types and not any(file.format == "csv" for file in files):
        raise SpecError("--type is for columns of CSV files, and no source is one.")
    formats: dict[str, RawFormat] = {}
    learned: dict[str, str] = {}
    for name in dict.fromkeys(file.format for file in files):
        formats[name] = FORMATS[name]()
        paths = [file.path for file in files if file.format == name]
        learned[name] = formats[name].learn(paths, types if name == "csv" else None)
    return [
        (file, formats[file.format].cut(file.path, _target(file), learned[file.format]))
        for file in files
    ]


def _target(file: RawFile) -> int:
    return min(max(file.bytes // PIECES, SMALLEST), LARGEST)


def groups_of(files: Iterable[tuple[RawFile, list[Piece]]], asked: Asked) -> list[Group]:
    """The tasks."""
    decides = json.dumps(asked.decides(), sort_keys=True)
    numbered = (
        (file, [msgspec.structs.replace(piece, number=file.number) for piece in pieces])
        for file, pieces in files
    )
    return [Group(_key(decides, of, pieces), pieces) for of, pieces in _gathered(numbered)]


def with_columns(groups: Sequence[Group], columns: Sequence[Column]) -> list[Group]:
    """The tasks with keys that also say which columns their samples are to have at least."""
    return [Group(digest_of([group.key, as_plain(columns)]), group.pieces) for group in groups]


def _gathered(
    files: Iterable[tuple[RawFile, list[Piece]]],
) -> Iterator[tuple[list[RawFile], list[Piece]]]:
    """Pieces, small ones together: files that they are of, and the pieces."""
    of, held, size = list[RawFile](), list[Piece](), 0
    for file, pieces in files:
        small = len(pieces) == 1 and file.bytes < SMALLEST
        fits = held and small and held[-1].format == file.format and size < SMALLEST
        fits = fits and len(held) < _MOST_FILES
        if held and not (fits and not _breaks(file)):
            yield of, held
            of, held, size = [], [], 0
        if small:
            of, held, size = [*of, file], [*held, *pieces], size + file.bytes
            continue
        for piece in pieces:
            yield [file], [piece]
    if held:
        yield of, held


def _breaks(file: RawFile) -> bool:
    return hashlib.blake2b(file.path.name.encode()).digest()[0] % _BREAKS == 0


def _key(decides: str, files: list[RawFile], pieces: list[Piece]) -> str:
    about = [(file.place, file.format, file.bytes, file.version) for file in files]
    own = [msgspec.to_builtins(msgspec.structs.replace(piece, path="")) for piece in pieces]
    return digest_of([VERSION, decides, about, own])


def digest_of(about: Any) -> str:
    """Digest what is JSON."""
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]


def plan_key(groups: Iterable[Group], asked: Asked) -> str:
    """A digest of all that decides the shards."""
    text = json.dumps(
        [[group.key for group in groups], asked.exchanges(), asked.shard_bytes, asked.unreadable]
    )
    return hashlib.sha256(text.encode()).hexdigest()
