"""Writes the result of a task: its samples in a file, and what they are like beside them.

The file that says so is written last: a result counts once it is there. Way in: `write`.
"""

from __future__ import annotations

import pickle
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.data.raw import Chunk, Piece
from instep.data.shards.arrow_in import cast
from instep.data.shards.columns import Column, Misfit
from instep.data.shards.encode import Encoded
from instep.data.shards.manifest import lines_of
from instep.data.shards.statistics import Figures, take_batch
from instep.data.shards.views import View
from instep.data.shards.writer import ShardWriter, read_through
from instep.errors import DataError
from instep.plain_file import replace_plain
from instep.prepare.messages import Mapped, Segment

_MOST_AGAIN = 4 << 20
"""Bytes of records of one task that are tried again."""

_MOST_KEPT = 1 << 16
"""Characters of a bad record that are kept."""


class Wider(Exception):
    """A sample needs wider columns than the file has: the task begins again with them."""

    def __init__(self, columns: list[Column]) -> None:
        super().__init__()
        self.columns = columns


class Noted(NamedTuple):
    """Counts of the records of a task, and those that are bad."""

    records: int
    bad: list[dict[str, Any]]
    only_bad: dict[str, int]
    """Files of which it has bad records alone, with how many."""


def wide_parts(parts: Sequence[Segment], columns: Sequence[Column]) -> Iterator[list[View]]:
    """The samples of parts of files, as columns that hold all of them have them.

    Raises:
        DataError: a column cannot hold one of the numbers.
    """
    for part in parts:
        for views in read_through(Path(part.file), part.first, part.first + part.samples):
            try:
                wide = [cast(view, column) for view, column in zip(views, columns, strict=True)]
            except Misfit as error:
                raise DataError(f"{error}.") from None
            yield wide


def write(
    folder: Path,
    key: str,
    columns: list[Column],
    batches: Iterable[Encoded],
    notes: Callable[[], Noted],
) -> dict[str, Any]:
    """Write the samples of a task, and its result.

    Args:
        folder: of results.
        key: of the task.
        columns: of its samples.
        batches: the samples.
        notes: called once they are written.

    Returns:
        The result, as plain data.

    Raises:
        Wider: a batch has wider columns; nothing is left behind.
        OSError: it cannot be written; nothing is left behind.
    """
    figures = [Figures() for _ in columns]
    path = folder / f"{key}.arrow"
    with ShardWriter(path, columns) as writer:
        for batch in batches:
            if batch.columns != columns:
                raise Wider(batch.columns)
            if batch.views and batch.views[0].rows:
                writer.write(batch.views)
                take_batch(figures, columns, batch.views)
        writer.close()
    records, bad, only_bad = notes()
    if lines := lines_of(bad):
        replace_plain(folder / f"{key}.bad", lines)
    result = Mapped(
        key=key,
        samples=writer.samples,
        bytes=writer.bytes,
        records=records,
        bad=len(bad),
        only_bad=only_bad,
        columns=columns,
        figures=figures,
        parts=[Segment(str(path), 0, writer.samples)],
        crc32=writer.crc32,
        crc32_bad=zlib.crc32(lines),
    )
    replace_plain(folder / f"{key}.done", msgspec.json.encode(result).decode())
    found: dict[str, Any] = msgspec.to_builtins(result)
    return found


def kept_records(file: Path) -> list[tuple[Piece, int, bytes, bytes, bool]]:
    """The records of a result that are to be tried again.

    Raises:
        DataError: they are damaged; the result is removed with them.
    """
    try:
        found: list[tuple[Piece, int, bytes, bytes, bool]] = pickle.loads(file.read_bytes())
    except Exception:
        file.with_suffix(".done").unlink(missing_ok=True)
        file.unlink(missing_ok=True)
        raise DataError(f"{file} is damaged. Give the same command again.") from None
    return found


class Notices:
    """What is noticed while a task reads.

    Args:
        seeded: whether the generators are seeded for each record.
        copies: whether samples are copied as they are given.
    """

    def __init__(self, seeded: bool, copies: bool) -> None:
        self.seeded, self.copies = seeded, copies
        self.records = Counter[str]()
        """Records of each file."""
        self.given = 0
        """Records that could be decoded."""
        self.bad: list[dict[str, Any]] = []
        self.again: list[tuple[Piece, int, bytes, bytes, bool]] = []
        self._again_bytes = 0

    def take_bad(self, piece: Piece, chunk: Chunk) -> None:
        """Records that could not be decoded."""
        texts = chunk.texts or [b""] * len(chunk.bad)
        for (place, text), raw in zip(chunk.bad, texts, strict=True):
            self.records[piece.path] += 1
            self.add_bad(piece, place, text, raw)

    def add_bad(self, piece: Piece, place: int, text: str, record: Any) -> None:
        """A record that no sample was made of."""
        bad = {"file": piece.path, "format": piece.format, "place": place, "error": text}
        self.bad.append({**bad, **kept_text(record)})

    def try_again(self, piece: Piece, place: int, kept: bytes, digest: bytes) -> None:
        """A record that another process is to have too."""
        if self._again_bytes + len(kept) <= _MOST_AGAIN:
            self._again_bytes += len(kept)
            self.again.append((piece, place, kept, digest, self.seeded))

    def of_task(self) -> Noted:
        """Count the records, and sort those that were bad."""
        files = {bad["file"]: number for number, bad in reversed([*enumerate(self.bad)])}
        self.bad.sort(key=lambda bad: (files[bad["file"]], bad["place"]))
        places = Counter(file for file, _ in {(bad["file"], bad["place"]) for bad in self.bad})
        only = {file: count for file, count in places.items() if count == self.records[file]}
        return Noted(self.records.total(), self.bad, only)


def kept_text(record: Any) -> dict[str, Any]:
    """Make text of a bad record, as JSON if it was decoded; it is cut where it is long."""
    if not isinstance(record, bytes | str):
        try:
            record = msgspec.json.encode(record, enc_hook=repr)
        except (TypeError, ValueError):  # the function has changed it to something else
            record = repr(record)
    if isinstance(record, bytes):
        record = record.decode(errors="replace")
    return {"record": record[:_MOST_KEPT], "length": len(record)}
