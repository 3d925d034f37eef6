"""Windows of a part of a stream, for who reads on: a state at each, and what it held.

A process writes its own files, and reads those of all. What is missing or damaged costs time: then
the part is read from an earlier window, or from its start. Way in: `KeptWindows`.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from instep.plain_file import replace_plain

PAUSE_S = 0.2
"""Time between two writings of a file."""

_NEWEST = 3
"""Windows that are kept in any case; of those before, ever fewer."""


class StreamWindow(msgspec.Struct, array_like=True, frozen=True):
    """The beginning of a window of a part."""

    epoch: int
    number: int
    """In the epoch, from 0."""
    content: int
    """A hash of some of its samples; 0 if they have none."""
    state: bytes | None = None
    """Returned by the dataset's `state_dict()` before the window; None if it has none."""
    passes: int = 0
    """How often the part had begun again."""

    @property
    def at(self) -> tuple[int, int]:
        """Epoch and number."""
        return self.epoch, self.number


class KeptWindows:
    """Windows of one part, in memory and on disk.

    Args:
        folder: for the files; None to keep them in memory alone.
        part: its number.
        writer: of this process, among those that write there.
        clock: in seconds.
    """

    def __init__(
        self,
        folder: Path | None,
        part: int,
        writer: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._part, self._clock = folder, part, clock
        self._file = None if folder is None else folder / f"part-{part}.{writer}"
        self._windows: dict[tuple[int, int], StreamWindow] = {}
        self._written = clock() - PAUSE_S
        self.look()

    def look(self) -> None:
        """Take in what other processes have written."""
        files = [] if self._folder is None else sorted(self._folder.glob(f"part-{self._part}.*"))
        for file in files:
            with suppress(OSError, ValueError, msgspec.MsgspecError):
                body = file.read_bytes()
                if zlib.crc32(body[4:]) == int.from_bytes(body[:4], "little"):
                    for each in msgspec.msgpack.decode(body[4:], type=list[StreamWindow]):
                        self._windows.setdefault(each.at, each)

    def add(self, window: StreamWindow) -> None:
        """Keep one; those of earlier epochs go, and most of the older ones of this."""
        if window.at in self._windows:
            return
        same = sorted(at for at in self._windows if at[0] == window.epoch)
        kept = thinned([*(number for _, number in same), window.number])
        self._windows = {at: self._windows[at] for at in same if at[1] in kept}
        self._windows[window.at] = window
        if self._file is not None and self._clock() - self._written >= PAUSE_S:
            self._write(self._file)

    def get(self, epoch: int, number: int) -> StreamWindow | None:
        """A window, if it is known."""
        return self._windows.get((epoch, number))

    def nearest(self, epoch: int, number: int) -> StreamWindow | None:
        """The last window up to this one from which the dataset itself can continue."""
        known = [
            each
            for each in self._windows.values()
            if each.state is not None and each.epoch == epoch and each.number <= number
        ]
        return max(known, key=lambda each: each.number, default=None)

    def _write(self, file: Path) -> None:
        body = msgspec.msgpack.encode(list(self._windows.values()))
        with suppress(OSError):  # a full disk, or a folder that is gone: others start further back
            file.parent.mkdir(exist_ok=True)
            replace_plain(file, zlib.crc32(body).to_bytes(4, "little") + body)
        self._written = self._clock()


def thinned(numbers: list[int]) -> set[int]:
    """Those to keep: the newest, and before these one in each distance of 1, 2, 4, ... windows."""
    newest, kept = max(numbers), dict[int, int]()
    for number in sorted(numbers):
        distance = newest - number
        rank = -distance if distance < _NEWEST else distance.bit_length()
        kept.setdefault(rank, number)
    return set(kept.values())
