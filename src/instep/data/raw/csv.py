"""CSV files with a header: records as columns, with types that the head of the source decides.

Quoted fields may hold line breaks, so whether a byte is in one depends on all bytes before it. Each
piece is scanned for every state in which it may begin, and `settle` joins these up. `csv_head.py`
decides types, `quotes/` finds records, and pyarrow converts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from instep.data.raw import blocks
from instep.data.raw.base import Chunk, Piece, SingleFiles
from instep.data.raw.csv_columns import BOM, Converter, Records
from instep.data.raw.csv_head import columns_of, delimiter_of, learn
from instep.data.raw.line_numbers import line_of
from instep.data.raw.quotes.splitter import Splitter, passed
from instep.data.raw.quotes.states import QUOTED, RECORD, STATES
from instep.errors import DataError

LONGEST = 256 << 20
"""Bytes of a record at most."""

_HEADER = STATES  # as RECORD, modulo
"""State of the first piece: the header comes before its first record."""

_BITS = blocks.STATE_BITS


class Csv(SingleFiles):
    """Comma-separated values, by tabs in '.tsv' files; the first record is the header."""

    suffixes = (".csv", ".tsv")
    compressed = True

    def learn(self, paths: Sequence[Path], types: Mapping[str, str] | None = None) -> str:
        """Decide names and types of columns: `csv_head.learn`."""
        return learn(paths, types or {})

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut at bytes, or where frames begin; what is between is found by `scan`."""
        learned = columns_of(path, learned or self.learn([path]))
        pieces = blocks.cut_bytes(path, target, "csv", learned)
        several = len(pieces) > 1
        first = replace(pieces[0], state=pieces[0].state + _HEADER)
        return [replace(piece, scan=several) for piece in (first, *pieces[1:])]

    def scan(self, piece: Piece) -> int:
        """The state after the piece for each state before it, and how many bytes it has."""
        states, size = np.arange(STATES), 0
        for place, data, inside in _bytes_of(piece):
            if not inside:
                break
            passed(data, delimiter_of(piece.path), states)
            size = place + len(data) - blocks.place_of(piece)
        packed = sum(int(state) << _BITS * number for number, state in enumerate(states))
        return size << _BITS * STATES | packed

    def settle(self, pieces: list[Piece], scans: list[int]) -> list[Piece]:
        """Go through the states from the first piece to the last."""
        settled, state, place = list[Piece](), RECORD, 0
        for number, (piece, scan) in enumerate(zip(pieces, scans, strict=True)):
            known = state if number else _HEADER
            settled.append(replace(piece, state=place << _BITS | known))
            state = scan >> _BITS * state & (1 << _BITS) - 1
            place += scan >> _BITS * STATES
        if state == QUOTED:
            raise _open_quote(settled)
        return settled

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Decode records; those with fields too many or too few, or of another type, are bad."""
        converter = Converter(piece.learned, delimiter_of(piece.path))
        for records in _records_of(piece):
            yield converter.chunk(records)

    def where(self, path: Path, place: int) -> str:
        """The line on which it begins, from 1."""
        return f"line {line_of(path, place, returns=True)}"


def _bytes_of(piece: Piece) -> Iterator[tuple[int, bytes, bool]]:
    """As `blocks.bytes_of`, with the place of each block, and without a BOM."""
    place, start = blocks.place_of(piece), piece.start == 0
    for data, inside in blocks.bytes_of(piece):
        skipped = len(BOM) if start and data.startswith(BOM) else 0
        yield place + skipped, data[skipped:], inside
        place, start = place + len(data), False


def _records_of(piece: Piece) -> Iterator[Records]:
    """The records that begin in a piece, some at a time, without the header."""
    splitter = Splitter(delimiter_of(piece.path), _state_of(piece) % STATES)
    ours, rest, place = _state_of(piece) == RECORD, list[bytes](), 0
    for place, data, inside in _bytes_of(piece):
        if not inside and (splitter.state == RECORD or not ours):
            return
        starts, stops, fields = splitter.split(data)
        if len(starts) and not ours:
            starts, stops, fields, ours = starts[1:], stops[1:], fields[1:], True
        if not inside:
            starts, stops, fields = starts[:1], stops[:1], fields[:1]
        if len(starts):
            first, end = int(starts[0]), int(stops[-1]) + 1
            body = b"".join([*rest, data[:end]]) if first < 0 else data[first:end]
            if stops[0] - first > LONGEST:
                raise _too_long(piece, place + first, splitter)
            yield Records(place + first, body, starts - first, stops - first, fields)
            rest = []
        if not inside and len(starts):
            return
        place += len(data)  # for what is behind this block
        if splitter.state == RECORD or not ours:
            rest = []
        else:
            rest = [*rest, data] if splitter.begun > len(data) else [data[-splitter.begun :]]
            looks = splitter.begun - len(data) <= LONGEST // 8 < splitter.begun
            if splitter.begun > LONGEST or (looks and not _ends(piece, place, splitter)):
                raise _too_long(piece, place - splitter.begun, splitter)
    if splitter.state == QUOTED:
        raise _open(piece.path, place - splitter.opened)
    if splitter.state != RECORD and ours:
        body = b"".join(rest)
        ends = (np.array([number]) for number in (0, len(body), splitter.fields))
        yield Records(place - len(body), body, *ends)


def _ends(piece: Piece, place: int, splitter: Splitter) -> bool:
    """Whether the record that has begun before a place is not too long; none of it is kept."""
    if blocks.compression_of(piece.path):
        return True  # as far as is known; it is kept until it is too long
    ahead = splitter.copy()
    for data, _ in blocks.bytes_of(replace(piece, start=place)):
        if len(ahead.split(data)[0]):
            break
        if ahead.begun > LONGEST:
            return False
    return True


def _too_long(piece: Piece, place: int, splitter: Splitter) -> DataError:
    hint = "Cut it up, or remove it."
    if splitter.state == QUOTED:
        hint = "Perhaps a quote that opens in it is not closed."
    return DataError(
        f"{piece.path}, line {line_of(piece.path, place, returns=True)}: the record is longer than "
        f"{LONGEST >> 20:,} MB, and none may be. {hint}"
    )


def _open(path: str, place: int) -> DataError:
    return DataError(
        f"{path}, line {line_of(path, place, returns=True)}: the quote that opens here is not "
        "closed before the file ends. Close it, or double it if it is text of a quoted field."
    )


def _open_quote(pieces: list[Piece]) -> DataError:
    """Where the quote is that is open behind the last piece."""
    for piece in reversed(pieces):
        splitter, start = Splitter(delimiter_of(piece.path), _state_of(piece) % STATES), None
        for place, data, inside in _bytes_of(piece):
            if not inside:
                break
            splitter.split(data)
            end, start = place + len(data), place if start is None else start
        if start is not None and end - splitter.opened >= start:
            return _open(piece.path, end - splitter.opened)
    raise AssertionError("no quote opens")


def _state_of(piece: Piece) -> int:
    return piece.state & (1 << _BITS) - 1
