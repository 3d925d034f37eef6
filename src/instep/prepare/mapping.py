"""From raw records to samples in a file: what a worker does most of the time.

Records that no sample can be made of are kept aside, and one record of `ONE_IN` is noted for
another process to try. Nothing here knows processes. Way in: `Mapping`.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from instep.data.raw import FORMATS, Chunk, Piece, RawFormat
from instep.data.raw.images import undecodable
from instep.data.shards.arrow_in import encode_batch
from instep.data.shards.columns import Column, Misfit
from instep.data.shards.encode import Encoded, ImageFile, encode
from instep.data.shards.views import bytes_of
from instep.data.shards.writer import BATCH_BYTES
from instep.errors import DataError, InstepError, one_line
from instep.plain_file import replace_plain
from instep.prepare.asked import Asked
from instep.prepare.function import (
    Bad,
    Draws,
    Function,
    Reuses,
    Tokens,
    add_parts,
    digest_of,
    mapper_of,
    next_trial,
    several,
)
from instep.prepare.messages import Done, Map
from instep.prepare.results import Noted, Notices, Wider, kept_records, write

_HEAD = 64
"""Samples that say what the columns are."""

_FIRST = 16
"""Samples of the first batch of a file; of others as many as make `BATCH_BYTES`."""

_DECODED = 8192
"""Rows of columns that are objects of Python at a time."""

_MOST_ROWS = 16384
"""Samples of one record batch."""


Origin = tuple[Piece, int, Any]
"""What a sample was made of: piece, place and record."""


class _Held:
    """Samples that wait for their batch, and what each was made of."""

    def __init__(self, size: int) -> None:
        self.size = size
        """Samples of the next batch."""
        self.samples: list[Any] = []
        self.of: list[Origin] = []
        self._parts = set[int]()

    def first(self) -> tuple[list[Any], list[Origin]]:
        """The next batch, whose samples wait no longer."""
        samples, self.samples = self.samples[: self.size], self.samples[self.size :]
        of, self.of = self.of[: self.size], self.of[self.size :]
        if self._parts:
            self._parts.clear()
            for sample in self.samples:
                add_parts(sample, self._parts)
        return samples, of

    def check(self, sample: Any) -> None:
        """Note what a sample consists of.

        Raises:
            Reuses: one that waits has a part of it.
        """
        if add_parts(sample, self._parts):
            raise Reuses


class Mapping:
    """Makes samples of the records of pieces.

    Args:
        asked: sources and function.
        folder: for results.
        beat: told now and then where this process reads.

    Raises:
        InstepError: the user's function cannot be loaded.
    """

    def __init__(self, asked: Asked, folder: Path, beat: Callable[[str, int], None]) -> None:
        self._asked, self._folder, self._beat = asked, folder, beat
        self._mapper = mapper_of(asked)
        self._formats: dict[str, RawFormat] = {}

    def format(self, piece: Piece) -> RawFormat:
        """The format of a piece."""
        if piece.format not in self._formats:
            self._formats[piece.format] = FORMATS[piece.format]()
        return self._formats[piece.format]

    def head(self, pieces: Sequence[Piece]) -> list[Column]:
        """The columns of the first samples."""
        for batch in self._batches(pieces, _HEAD, None, Notices(seeded=True, copies=True)):
            if batch.columns:
                return batch.columns
        return []

    def map(self, task: Map) -> Done:
        """The samples of a task, in a file.

        Raises:
            InstepError: a record ends the command.
        """
        columns, seeded, copies = task.columns, False, False
        while True:
            notes = Notices(seeded, copies)
            try:
                batches = self._batches(task.pieces, _FIRST, columns, notes)
                ends = partial(self._ended, task.key, notes)
                result = write(self._folder, task.key, columns, batches, ends)
            except Wider as wider:
                columns = wider.columns
            except Draws:
                seeded = True
            except Reuses:
                copies = True
            else:
                again = self._folder / f"{task.key}.again"
                return Done(task.number, result, str(again) if notes.again else "")

    def _ended(self, key: str, notes: Notices) -> Noted:
        """Keep records for another process to try, of this command or of a later one. Returns what
        the task has noticed."""
        if notes.again:
            replace_plain(self._folder / f"{key}.again", pickle.dumps(notes.again))
        return notes.of_task()

    def _batches(
        self,
        pieces: Sequence[Piece],
        first: int,
        columns: list[Column] | None,
        notes: Notices,
    ) -> Iterator[Encoded]:
        """The samples of pieces, in batches: the first has `first`, later ones are of even size."""
        held = _Held(first)
        if isinstance(self._mapper, Function):
            self._mapper.copies = notes.copies
        for piece in pieces:
            for chunk in self.format(piece).read(piece):
                self._beat(piece.path, notes.records.total())
                notes.take_bad(piece, chunk)
                if self._mapper is None and isinstance(chunk.rows, pa.RecordBatch):
                    batch = self._whole(piece, chunk, columns, notes)
                    columns = batch.columns or columns
                    yield batch
                    continue
                for _ in self._made(piece, chunk, held, notes):
                    while len(held.samples) >= held.size:
                        batch = self._encoded(*held.first(), columns, notes)
                        columns = batch.columns or columns
                        yield batch
                        held.size = _next_size(batch, held.size)
                self._stop_at_bad(notes)
        if held.samples:
            yield self._encoded(held.samples, held.of, columns, notes)

    def _whole(
        self, piece: Piece, chunk: Chunk, columns: list[Column] | None, notes: Notices
    ) -> Encoded:
        """The samples of a record batch, as it is."""
        assert isinstance(chunk.rows, pa.RecordBatch)
        notes.records[piece.path] += chunk.rows.num_rows
        try:
            found = encode_batch(chunk.rows, columns)
        except Misfit as error:
            raise DataError(f"{piece.path}: {one_line(error)}.") from None
        for row, text in found.misfits:
            record = chunk.rows.slice(row, 1).to_pylist()[0]
            notes.add_bad(piece, chunk.places[row], text, record)
        self._stop_at_bad(notes)
        return found

    def _made(self, piece: Piece, chunk: Chunk, held: _Held, notes: Notices) -> Iterator[None]:
        """Put the samples of a chunk's records where they wait, some at a time."""
        if isinstance(chunk.rows, pa.RecordBatch):
            for first in range(0, chunk.rows.num_rows, _DECODED):
                rows = chunk.rows.slice(first, _DECODED).to_pylist()
                places = list(chunk.places[first : first + _DECODED])
                yield from self._made_of(piece, rows, places, held, notes)
        else:
            yield from self._made_of(piece, chunk.rows, list(chunk.places), held, notes)

    def _made_of(
        self, piece: Piece, rows: list[Any], places: list[int], held: _Held, notes: Notices
    ) -> Iterator[None]:
        at = 0
        while at < len(rows):
            stop = at + min(next_trial(notes.given + 1) - notes.given, held.size)
            given = self._given(piece, rows[at:stop], places[at:stop], notes)
            self._keep(piece, rows[at:stop], places[at:stop], given, held, notes)
            yield
            at = stop

    def _given(
        self, piece: Piece, rows: list[Any], places: list[int], notes: Notices
    ) -> Sequence[Any]:
        """What is made of some records: a sample, several, None or a `Bad` of each."""
        mapper = self._mapper
        trial = next_trial(notes.given) == notes.given
        notes.records[piece.path] += len(rows)
        notes.given += len(rows)
        if mapper is None:
            if piece.format == "images":
                return [_image(row) for row in rows]
            return [row if type(row) is dict else {"text": row} for row in rows]
        if isinstance(mapper, Tokens):
            return mapper.of_file(piece.number, rows, places)
        before = [] if notes.seeded else mapper.state()
        given = [self._tried(mapper, piece, places[0], rows[0], notes)] if trial else []
        if notes.seeded:
            rest = zip(places[len(given) :], rows[len(given) :], strict=True)
            return given + [self._seeded(mapper, piece, place, row) for place, row in rest]
        given += self._called(mapper, piece, places, rows, len(given))
        if mapper.has_drawn(before):
            raise Draws
        return given

    def _called(
        self, function: Function, piece: Piece, places: list[int], rows: list[Any], first: int
    ) -> list[Any]:
        given = list[Any]()
        try:
            function.many(rows[first:] if first else rows, given)
        except InstepError as error:
            raise self._at(error, piece, places[first + len(given)]) from None
        return given

    def _seeded(self, function: Function, piece: Piece, place: int, row: Any) -> Any:
        function.seed(piece.number, place)
        return self._called(function, piece, [place], [row], 0)[0]

    def _tried(self, function: Function, piece: Piece, place: int, row: Any, notes: Notices) -> Any:
        """What is made of a record that another process will try too."""
        kept = pickle.dumps(row)  # as it was before the function
        if notes.seeded:
            function.seed(piece.number, place)
        (given,) = self._called(function, piece, [place], [row], 0)
        if not isinstance(given, Bad):
            notes.try_again(piece, place, kept, digest_of(given))
        return given

    def _at(self, error: InstepError, piece: Piece, place: int) -> InstepError:
        return type(error)(f"{self.where(piece, place)}: {error}")

    def _keep(
        self,
        piece: Piece,
        rows: list[Any],
        places: list[int],
        given: Sequence[Any],
        held: _Held,
        notes: Notices,
    ) -> None:
        """Sort what was made of records into samples and bad records."""
        samples, of = held.samples, held.of
        watches = isinstance(self._mapper, Function) and not notes.copies
        for row, place, made in zip(rows, places, given, strict=True):
            if type(made) is dict:
                if watches:
                    held.check(made)
                samples.append(made)
                of.append((piece, place, row))
            elif isinstance(made, Bad):
                notes.add_bad(piece, place, made.text, row)
            else:
                for sample in several(made):
                    if watches:
                        held.check(sample)
                    samples.append(sample)
                    of.append((piece, place, row))

    def where(self, piece: Piece, place: int) -> str:
        """A record's file, and where it is in it."""
        return f"{piece.path}, {self.format(piece).where(Path(piece.path), place)}"

    def _encoded(
        self,
        samples: list[Any],
        of: list[Origin],
        columns: list[Column] | None,
        notes: Notices,
    ) -> Encoded:
        """Samples as columns; the records of those that do not fit are bad."""
        found = encode(samples, columns)
        for number, text in found.misfits:
            piece, place, record = of[number]
            notes.add_bad(piece, place, text, record)
        self._stop_at_bad(notes)
        return found

    def _stop_at_bad(self, notes: Notices) -> None:
        if self._asked.unreadable == "stop" and notes.bad:
            bad = min(notes.bad, key=lambda bad: bad["place"])
            piece = Piece(bad["file"], bad["format"], 0, 0)
            raise DataError(
                f"{self.where(piece, bad['place'])}: {bad['error']}. To leave such records out: "
                "--unreadable skip."
            )

    def again(self, file: str) -> str:
        """The first record of a file whose samples differ here, in words; empty without one."""
        assert isinstance(self._mapper, Function), "only a function is tried again"
        self._mapper.copies = True
        for piece, place, kept, digest, seeded in kept_records(Path(file)):
            if seeded:
                self._mapper.seed(piece.number, place)
            (given,) = self._called(self._mapper, piece, [place], [pickle.loads(kept)], 0)
            if isinstance(given, Bad) or digest_of(given) != digest:
                return self.where(piece, place)
        Path(file).unlink()
        return ""


def _image(row: dict[str, Any]) -> dict[str, Any] | Bad:
    """The sample of a record with an image, where no function looks at it."""
    wrong = undecodable(row["image"])
    return Bad(wrong) if wrong else {**row, "image": ImageFile(row["image"])}


def _next_size(batch: Encoded, size: int) -> int:
    """How many samples the next batch has, so that it has about `BATCH_BYTES`."""
    rows = batch.views[0].rows if batch.views else 0
    if not rows:
        return size
    each = bytes_of(batch.views) / rows
    return int(min(max(BATCH_BYTES / max(each, 1.0), 1), _MOST_ROWS, 8 * size))
