"""Files with a record on each line: JSON lines, and plain text.

A line ends with '\\n'; a '\\r' before it, and a BOM at the start of the file, belong to no record.
A piece has the lines whose '\\n' *before* them it has, so that it can be read without the bytes
before it; the first piece has the first line too. Ways in: `JsonLines`, `TextLines`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from instep.data.raw import blocks
from instep.data.raw.base import Chunk, Piece, SingleFiles
from instep.data.raw.json_errors import beyond_64_bits, long_numbers, sentence
from instep.data.raw.line_numbers import line_of
from instep.errors import DataError

LONGEST = 256 << 20
"""Bytes of a line at most."""

BOM = b"\xef\xbb\xbf"


def whole_lines(piece: Piece) -> Iterator[tuple[int, bytes]]:
    """Some lines of a piece at a time, with the place of the first; the last of a file may lack
    its '\\n'.

    Raises:
        DataError: a line is longer than `LONGEST`; or the file is damaged.
    """
    place, rest, held = blocks.place_of(piece), list[bytes](), 0
    skipping = piece.start > 0
    for data, inside in blocks.bytes_of(piece):
        first = data.find(b"\n") + 1
        if skipping:
            if not inside:
                return
            place += first or len(data)
            if not first:
                continue
            data, skipping = data[first:], False
            first = data.find(b"\n") + 1
        if held + (first or len(data)) > LONGEST:
            raise _too_long(piece, place)
        last = data.rfind(b"\n") + 1 if inside else first
        if last:
            lines = b"".join([*rest, data[:last]])
            yield place, lines
            place, rest, held = place + len(lines), [], 0
            if not inside:
                return
        rest.append(data[last:])
        before, held = held, held + len(data) - last
        if before <= LONGEST // 8 < held and not _ends(piece, place):
            raise _too_long(piece, place)
    if held:
        yield place, b"".join(rest)


def _ends(piece: Piece, place: int) -> bool:
    """Whether the line that begins at a place is not too long; none of it is kept in memory."""
    if not blocks.compression_of(piece.path):
        piece = replace(piece, start=place)
    at = blocks.place_of(piece)
    for data, _ in blocks.bytes_of(piece):
        found = data.find(b"\n", max(place - at, 0)) + 1
        at += found or len(data)
        if found or at - place > LONGEST:
            break
    return at - place <= LONGEST


def _too_long(piece: Piece, place: int) -> DataError:
    line = line_of(piece.path, place)
    return DataError(
        f"{piece.path}, line {line}: it is longer than {LONGEST >> 20:,} MB, and no record may be. "
        "Cut it up, or remove it."
    )


class _Lines(SingleFiles):
    """What all formats with a record on each line have in common."""

    name = ""
    compressed = True

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """Cut at bytes, or where frames begin."""
        return blocks.cut_bytes(path, target, self.name)

    def scan(self, piece: Piece) -> int:
        """How many bytes the frames of a piece hold."""
        size = 0
        for data, inside in blocks.bytes_of(piece):
            if not inside:
                break
            size += len(data)
        return size

    def settle(self, pieces: list[Piece], scans: list[int]) -> list[Piece]:
        """Add up the bytes before each."""
        places = accumulate(scans, initial=0)
        settled = zip(pieces, places, strict=False)
        return [replace(each, state=place << blocks.STATE_BITS) for each, place in settled]

    def read(self, piece: Piece) -> Iterator[Chunk]:
        """Decode lines."""
        for place, lines in whole_lines(piece):
            start = len(BOM) if place == 0 and lines.startswith(BOM) else 0
            if len(lines) > start:
                yield self.decoded(place + start, lines[start:] if start else lines)

    def decoded(self, place: int, lines: bytes) -> Chunk:
        """The records of some lines."""
        raise NotImplementedError

    def where(self, path: Path, place: int) -> str:
        """The line, from 1."""
        return f"line {line_of(path, place)}"


class JsonLines(_Lines):
    """An object on each line, which gives a dict; blank lines are no records."""

    suffixes = (".jsonl", ".ndjson", ".jsonlines", ".json")
    name = "json_lines"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder()

    def cut(self, path: Path, target: int, learned: str = "") -> list[Piece]:
        """As above.

        Raises:
            DataError: the file holds one array.
        """
        pieces = super().cut(path, target)
        for data, _ in blocks.bytes_of(pieces[0]) if pieces else ():
            if data.removeprefix(BOM).lstrip()[:1] == b"[":
                raise DataError(
                    f"{path} begins with a list, and JSON lines have an object on each line. "
                    "To write them: jq -c '.[]' FILE > FILE.jsonl."
                )
            break
        return pieces

    def decoded(self, place: int, lines: bytes) -> Chunk:
        """All at once, if each line is seen to hold one object."""
        starts, stops = _bounds(lines)
        given = self._all(lines, starts, stops)
        if given is not None:
            return Chunk(given, (starts + place).tolist(), [])
        chunk = Chunk([], list[int](), [], list[bytes]())
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self._add(lines[start:stop], place + start, chunk)
        return chunk

    def _all(self, lines: bytes, starts: Any, stops: Any) -> list[Any] | None:
        """The objects of lines, or None where there may be something else.

        Where each line begins with '{' and ends with '}', no '\\n' lies within an object.
        """
        codes = np.frombuffer(lines, np.uint8)
        if not ((stops > starts).all() and (codes[starts] == 123).all()):
            return None
        if not (codes[stops - 1] == 125).all():
            return None
        try:
            given = self._decoder.decode_lines(lines)
        except (ValueError, RecursionError):
            return None
        if len(given) != len(starts):
            return None
        long = np.unique(np.searchsorted(starts, long_numbers(lines), "right") - 1)
        return None if any(beyond_64_bits(given[number]) for number in long) else given

    def _add(self, line: bytes, place: int, chunk: Chunk) -> None:
        if not line.strip():
            return
        assert isinstance(chunk.rows, list)
        assert isinstance(chunk.places, list)
        assert isinstance(chunk.texts, list)
        record, wrong = None, ""
        try:
            record = self._decoder.decode(line)
        except (ValueError, RecursionError) as error:
            wrong = sentence(line, error)
        if not wrong and type(record) is not dict:
            wrong = f"the line holds a {type(record).__name__}, not an object"
        if wrong := wrong or beyond_64_bits(record):
            chunk.bad.append((place, wrong))
            chunk.texts.append(line)
        else:
            chunk.rows.append(record)
            chunk.places.append(place)


class TextLines(_Lines):
    """The text of each line, in UTF-8; blank lines are records too."""

    suffixes = (".txt", ".text")
    name = "text"

    def decoded(self, place: int, lines: bytes) -> Chunk:
        """All at once, if all of it is UTF-8."""
        starts, stops = _bounds(lines)
        places = (starts + place).tolist()
        if b"\r" not in lines:
            try:
                return Chunk(lines.decode().removesuffix("\n").split("\n"), places, [])
            except UnicodeDecodeError:
                pass
        rows, good, bad, texts = list[Any](), list[int](), list[tuple[int, str]](), list[bytes]()
        for start, stop, at in zip(starts.tolist(), stops.tolist(), places, strict=True):
            try:
                rows.append(lines[start:stop].decode())
                good.append(at)
            except UnicodeDecodeError as error:
                bad.append((at, f"the line is no UTF-8: {error.reason} at its byte {error.start}"))
                texts.append(lines[start:stop])
        return Chunk(rows, good, bad, texts)


def _bounds(lines: bytes) -> tuple[Any, Any]:
    """Where each line begins and ends, without '\\n' or '\\r\\n'."""
    codes = np.frombuffer(lines, np.uint8)
    stops = np.flatnonzero(codes == 10)
    starts = np.concatenate([np.zeros(1, np.int64), stops + 1])
    if lines.endswith(b"\n"):
        starts = starts[:-1]
    else:
        stops = np.append(stops, len(lines))
    if b"\r" not in lines:
        return starts, stops
    before = codes[np.maximum(stops - 1, 0)]
    return starts, stops - ((stops > starts) & (before == 13))
