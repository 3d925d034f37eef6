"""Tar files of samples, as WebDataset has them: members with one key, behind each other, are one.

The key of a member is its path up to the first dot of its base name; what follows the dot, in lower
case, names the field. Members without a dot, and those as `__name__`, are no part of a record.
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from instep.data.raw.base import Chunk, Piece, SingleFiles
from instep.data.raw.opened import opened
from instep.errors import DataError, one_line
from instep.words import not_utf8

LARGEST = 256 << 20
"""Bytes of a record at most."""

_KEY = "__key__"
"""The field of the key, of type str."""

_BYTES, _RECORDS = 4 << 20, 1024
"""Of a chunk: about, and at most."""

_NAME = re.compile(r"((?:.*/|)[^.]+)[.]([^/]*)", re.DOTALL)


class _Member(NamedTuple):
    """A member that belongs to a record."""

    key: str
    field: str
    about: tarfile.TarInfo


class Stored(NamedTuple):
    """Where the bytes of a member lie in its file."""

    field: str
    offset: int
    size: int


class Tar(SingleFiles):
    """A dict for each key: `__key__` (str), and the bytes of each of its members by its field."""

    suffixes = (".tar",)

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut where records begin; only headers are read.

        Raises:
            DataError: the members of one key are in two places; or the file is damaged.
        """
        starts, end, seen = list[int](), 0, set[str]()
        with _opened(path) as file:
            for key, members in groupby(_members(path, file, 0), lambda member: member.key):
                if key in seen:
                    raise DataError(
                        f"{path} has members of the key {key!r} in two places. They are one record "
                        "if they lie behind each other: sort the names, and write it again."
                    )
                seen.add(key)
                first = next(members)
                if not starts or first.about.offset - starts[-1] >= target:
                    starts.append(first.about.offset)
                for member in (first, *members):
                    end = member.about.offset_data + member.about.size
        stops = [*starts[1:], end]
        return [Piece(str(path), "tar", a, b) for a, b in zip(starts, stops, strict=bool(starts))]

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Read records; one with a link, a field twice or too many bytes is bad."""
        chunk, size = Chunk(list[Any](), list[int](), []), 0
        with _opened(piece.path) as file:
            inside = _members(piece.path, file, piece.start, piece.stop)
            for key, group in groupby(inside, lambda member: member.key):
                members = list(group)
                place = members[0].about.offset
                wrong = _wrong(members)
                if wrong:
                    chunk.bad.append((place, wrong))
                    continue
                record: dict[str, Any] = {_KEY: key}
                for member in members:
                    record[member.field] = _data(piece.path, file, member.about)
                    size += member.about.size
                assert isinstance(chunk.rows, list)
                assert isinstance(chunk.places, list)
                chunk.rows.append(record)
                chunk.places.append(place)
                if size >= _BYTES or len(chunk.rows) >= _RECORDS:
                    yield chunk
                    chunk, size = Chunk(list[Any](), list[int](), []), 0
        yield chunk

    def where(self, path: Path, place: int) -> str:
        """The name of its first member."""
        with _opened(path) as file:
            return f"member {next(_members(path, file, place)).about.name!r}"


def records_of(path: Path) -> Iterator[tuple[str, list[Stored]]]:
    """The key of each record, and where its members lie; only headers are read.

    Raises:
        DataError: the file cannot be read or is damaged, or a record in it is bad.
    """
    seen = set[str]()
    with _opened(path) as file:
        for key, group in groupby(_members(path, file, 0), lambda member: member.key):
            members = list(group)
            wrong = "its members are in two places" if key in seen else _wrong(members)
            if not wrong and any(member.about.issparse() for member in members):
                wrong = "a member is stored with holes"
            if wrong:
                raise DataError(f"{path}, record {key!r}: {wrong}. Write the file again.")
            seen.add(key)
            yield (
                key,
                [Stored(m.field, m.about.offset_data, m.about.size) for m in members],
            )


@contextmanager
def _opened(path: str | Path) -> Iterator[BinaryIO]:
    try:
        with opened(path) as file:
            yield file
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _members(
    path: str | Path, file: BinaryIO, start: int, stop: int | None = None
) -> Iterator[_Member]:
    """Those from one place to another that belong to records.

    Raises:
        DataError: a header is damaged, or the file ends too early.
    """
    file.seek(start)
    place = start
    try:
        archive: Any = tarfile.open(fileobj=file, mode="r:")  # noqa: SIM115
        while (about := archive.next()) is not None:
            if stop is not None and about.offset >= stop:
                return
            archive.members.clear()  # else it keeps all
            place = about.offset
            found = _NAME.fullmatch(about.name)
            if found and not about.isdir() and not re.fullmatch("__.*__", about.name):
                yield _Member(found[1], found[2].lower(), about)
    except tarfile.TarError as error:
        raise _damaged(path, place, one_line(error)) from error
    # `tarfile` takes a damaged header for the end
    file.seek(archive.offset)
    if file.read(tarfile.BLOCKSIZE).strip(b"\0"):
        raise _damaged(path, archive.offset, "no header of a member is there")
    _check_end(path, file)


def _check_end(path: str | Path, file: BinaryIO) -> None:
    """Refuse more files behind the end of the first, which no program would read."""
    while data := file.read(1 << 20):
        if data.strip(b"\0"):
            place = file.tell() - len(data.lstrip(b"\0"))
            raise DataError(
                f"{path} ends as a tar file, and more begins at byte {place:,}: it may be several "
                "tar files, one behind the other. Name each by itself, or join them with "
                "tar --concatenate."
            )


def _damaged(path: str | Path, place: int, said: str) -> DataError:
    return DataError(
        f"{path} is damaged or cut short: it can be read up to byte {place:,} ({said}). "
        "Get it again."
    )


def _wrong(members: list[_Member]) -> str:
    """What is wrong with a record; empty if nothing is."""
    fields = [member.field for member in members]
    for member in members:
        if member.field == _KEY:
            return f"the member {member.about.name!r} has the name of the key's field"
        if not_utf8(member.about.name) is not None:
            return f"the name of the member {member.about.name!r} is no UTF-8"
        if not member.about.isreg():
            return f"the member {member.about.name!r} is no file, but a link or a device"
        if fields.count(member.field) > 1:
            return f"the member {member.about.name!r} is there twice"
    if sum(member.about.size for member in members) > LARGEST:
        return f"the record is larger than {LARGEST >> 20:,} MB, and none may be"
    return ""


def _data(path: str | Path, file: BinaryIO, about: tarfile.TarInfo) -> bytes:
    if about.issparse():
        with tarfile.open(fileobj=opened(path), mode="r:") as archive:
            return archive.extractfile(about).read()  # type: ignore[union-attr]
    file.seek(about.offset_data)
    data = file.read(about.size)
    if len(data) < about.size:
        raise _damaged(path, about.offset, f"{about.name!r} is not whole")
    return data
