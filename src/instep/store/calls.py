"""Which calls to a run's callbacks have begun and ended: `callbacks.jsonl`, beside the ledger.

A line says which call begins, and so that those before it have ended; one without a call, that all
of its step have. What a process has written survives its death, so its successor knows which call a
kill interrupted. Only the process that writes the ledger writes here. What is called, this file
does not know. Way in: `Calls`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple, NotRequired, TypedDict

import msgspec

from instep.errors import RunError
from instep.plain_file import plain, replace_plain

NAME = "callbacks.jsonl"
"""The file in the run's folder."""

_MOST_BYTES = 1 << 20
_ENDED = 1 << 30  # number of a call behind all others of its step


class Due(Enum):
    """What is to become of a call."""

    NEW = auto()
    AGAIN = auto()
    """It was begun before, for this commit or for one that the run went back behind."""
    DONE = auto()


class _At(NamedTuple):
    """A call in the order of all of them."""

    course: int
    step: int
    call: int


class _Line(TypedDict):
    """A line of the file."""

    kind: str
    course: int
    step: int
    call: int | None
    furthest: tuple[int, int]
    logged: NotRequired[dict[str, float]]


class Calls:
    """The calls of one kind, in the order of steps, and of their numbers within a step.

    Args:
        path: the file; lines of other kinds in it stay.
        kind: of these calls.
        writes: runs a function, unless another process writes the ledger by now; whether it ran.

    Raises:
        RunError: the file cannot be read.
    """

    def __init__(self, path: Path, kind: str, writes: Callable[[Callable[[], None]], bool]) -> None:
        self._path, self._kind, self._writes = path, kind, writes
        self._at = _At(0, 0, _ENDED)
        self._furthest = (0, 0)  # the last step and call of what the run has gone back behind
        self.logged: dict[str, float] = {}
        """What calls of the present step had logged when the last one began."""
        self.known = path.exists()
        """Whether the run has called back before."""
        for line in _lines(path):
            if line["kind"] == kind:
                self._take(line)

    def _take(self, line: _Line) -> None:
        call = line["call"]
        self._at = _At(line["course"], line["step"], _ENDED if call is None else call)
        self._furthest = line["furthest"]
        self.logged = dict(line.get("logged", {}))

    def complete(self, course: int, step: int) -> bool:
        """Whether all calls of a step have ended."""
        return self._at >= _At(course, step, _ENDED)

    def continue_after(self, course: int, step: int) -> None:
        """The run begins at the checkpoint of a step: the next call is one of a later step."""
        if self._at != (there := _At(course, step, _ENDED)):
            self._write(there, self._behind)

    def begin(self, course: int, step: int, call: int, logged: Mapping[str, float] = {}) -> Due:
        """Say whether a call is due, and note that it begins.

        Args:
            course: of the commit.
            step: its number.
            call: its number among those of the step.
            logged: what those before it have logged at this step.
        """
        at, furthest = _At(course, step, call), self._furthest
        if at < self._at:
            return Due.DONE
        if course != self._at.course:
            furthest = self._behind
        again = at == self._at or (step, call) <= furthest
        if at != self._at:
            self._write(at, furthest, logged)
        return Due.AGAIN if again else Due.NEW

    def end(self, course: int, step: int) -> None:
        """All calls of a step have ended."""
        if not self.complete(course, step):
            self._write(_At(course, step, _ENDED), self._furthest)

    @property
    def _behind(self) -> tuple[int, int]:
        return max(self._furthest, self._at[1:])

    def _write(self, at: _At, furthest: tuple[int, int], logged: Mapping[str, float] = {}) -> None:
        call = None if at.call == _ENDED else at.call
        line = _Line(kind=self._kind, course=at.course, step=at.step, call=call, furthest=furthest)
        if logged:
            line["logged"] = dict(logged)
        data = json.dumps(line).encode() + b"\n"
        if self._writes(lambda: _append(self._path, self._kind, data)):
            self._take(line)


def _append(path: Path, kind: str, data: bytes) -> None:
    try:
        with open(path, "a+b", buffering=0, opener=plain) as file:
            size = file.tell()
            file.seek(max(0, size - 1))
            torn = file.read(1) not in (b"", b"\n")  # by the kill of a process that was writing
            if size < _MOST_BYTES:
                file.write(b"\n" * torn + data)
                return
        others = {line["kind"]: line for line in _lines(path) if line["kind"] != kind}
        kept = "".join(json.dumps(line) + "\n" for line in others.values())
        replace_plain(path, kept + data.decode())
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {os.strerror(error.errno or 0)}. Make room, or get access: "
            "without it nobody knows which callbacks have been called."
        ) from None


def _lines(path: Path) -> list[_Line]:
    """All whole lines; what a kill has left of the last one is none."""
    if not path.exists():
        return []
    try:
        with open(path, "rb", opener=plain) as file:
            whole = [json.loads(line) for line in file if line.endswith(b"}\n")]
        return msgspec.convert(whole, list[_Line])
    except (OSError, ValueError, msgspec.ValidationError, RecursionError) as error:
        raise RunError(
            f"{path} cannot be read: {error}. It says which callbacks have been called: restore it "
            "from a copy, or remove it, and calls of the last step may be made once more."
        ) from None
