"""Streams that give each sample once, as a socket does: what is read is kept until it is committed.

All processes of a host share a memory file that outlives them. In it each part has its windows, a
sample as soon as the iterator has given it. One process at a time holds a part: it has the
iterator, and the system takes the part from it when it ends. Whoever reads a window finds there
what was kept of it, and has the holder, or itself, read the rest. Windows of which all samples are
in committed steps are dropped.

It knows no steps, only positions. Ways in: `KeptSamples`, `OncePart`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.kept import KeptWindows
from instep.data.reading.streams.part import StreamPart
from instep.data.reading.streams.state import packed, unpacked
from instep.data.reading.streams.turns import StreamPlan
from instep.data.samples import last_read
from instep.errors import DataError

_PART, _SLOT, _SLOTS = 1 << 42, 1 << 36, 60
"""Bytes of address space for each part and each window; windows of a part that lie there at most.
Memory is taken only for what is written."""

_LOCKS = 1 << 62
"""Where in the file the parts are locked: nothing is written there."""

_NUMBER, _HEAD = struct.Struct("<Q"), struct.Struct("<II")

_PUNCH_HOLE = 0x01 | 0x02
"""Linux: FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE."""

TRIED = 1
"""In the place of an epoch: what a trial takes for the first samples are those that come next."""

_LOOK_S = 0.01
"""Seconds between two looks whether the holder of a part has read what is wanted."""


class KeptSamples:
    """Windows of parts in a memory file, and how far the run has come.

    Args:
        file: its descriptor, which forks of this process share.
    """

    def __init__(self, file: int) -> None:
        self._file = file

    @property
    def committed(self) -> int:
        """Positions that committed steps have taken; it may lag behind."""
        return self._number(0)

    def commit(self, position: int) -> None:
        """Tell that all positions before this one are committed."""
        self._set(0, position)

    def hold(self, part: int) -> bool:
        """Try to be the process that reads a part."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _LOCKS + part)
        except OSError:
            return False
        return True

    def let_go(self, part: int) -> None:
        """Let another process read a part."""
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, _LOCKS + part)

    def due(self, part: int) -> int:
        """The window of a part that is to be read next; those before were read."""
        return self._number(_PART * (1 + part))

    def read(self, part: int, window: int) -> None:
        """Tell that all up to this window were read; by who holds the part."""
        self._set(_PART * (1 + part), window + 1)

    def samples(self, part: int, window: int) -> list[bytes]:
        """Samples that are there of a window, in the order in which they came."""
        return [body for body, _ in self._records(part, window)]

    def add(self, part: int, window: int, sample: bytes, after: int = 0) -> int:
        """Keep the next sample of a window; by who holds the part.

        Args:
            part, window, sample: what it is.
            after: what the call for the sample before it has returned; 0 to look.

        Raises:
            DataError: there is no memory for it, or for another window.
        """
        begin = self._slot(part, window)
        if not after and (held := self._number(begin)) not in (0, window + 1):
            raise DataError(
                f"part {part} of the stream has {_SLOTS} windows that are not committed yet (from "
                f"window {held - 1} on): data.once = true keeps no more. Set a larger data.window."
            )
        try:
            if not after:
                self._set(begin, window + 1)
                after = max((end for _, end in self._records(part, window)), default=0)
            at = after or begin + _NUMBER.size
            self._write(sample, at + _HEAD.size)
            self._write(
                _HEAD.pack(len(sample) + 1, zlib.crc32(sample, window)), at
            )  # last: now it counts
        except OSError as error:
            raise DataError(
                f"a sample of the stream cannot be kept in memory ({error.strerror}), as data.once "
                "= true wants it until its step is committed. Set a smaller data.window."
            ) from error
        return at + _HEAD.size + len(sample)

    def drop(self, part: int, before: int) -> None:
        """Give back the memory of windows before one; by who holds the part."""
        for number in range(_SLOTS):
            begin = self._slot(part, number)
            if 0 < self._number(begin) <= before:
                self._set(begin, 0)
                end = os.lseek(self._file, begin, os.SEEK_HOLE)
                _give_back(self._file, begin, end - begin)

    def _slot(self, part: int, window: int) -> int:
        return _PART * (1 + part) + _SLOT * (1 + window % _SLOTS)

    def _records(self, part: int, window: int) -> Iterator[tuple[bytes, int]]:
        """Each sample of a window, and where it ends. What a process was killed at does not count,
        nor does what is left of another window."""
        at = self._slot(part, window)
        if self._number(at) != window + 1:
            return
        at += _NUMBER.size
        while len(head := os.pread(self._file, _HEAD.size, at)) == _HEAD.size:
            size, checksum = _HEAD.unpack(head)
            body = os.pread(self._file, max(0, size - 1), at + _HEAD.size)
            if not size or len(body) != size - 1 or zlib.crc32(body, window) != checksum:
                return
            at += _HEAD.size + len(body)
            yield body, at

    def _number(self, at: int) -> int:
        found = os.pread(self._file, _NUMBER.size, at)
        return int(_NUMBER.unpack(found.ljust(_NUMBER.size, b"\0"))[0])

    def _set(self, at: int, number: int) -> None:
        self._write(_NUMBER.pack(number), at)

    def _write(self, body: bytes, at: int) -> None:
        while body:
            done = os.pwrite(self._file, body, at)
            body, at = body[done:], at + done


def _give_back(file: int, begin: int, size: int) -> None:
    """Give back memory of a file. A mapping has a descriptor of its own, and the process would lose
    all that it has locked when that is closed."""
    fallocate = ctypes.CDLL(None, use_errno=True).fallocate
    if fallocate(file, _PUNCH_HOLE, ctypes.c_int64(begin), ctypes.c_int64(size)):
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


class OncePart:
    """One part of a stream that cannot be read again.

    Args:
        given: the stream.
        plan: how it is divided.
        number: of the part.
        seed: of the job.
        kept: what was read of it.
    """

    def __init__(
        self, given: GivenStream, plan: StreamPlan, number: int, seed: int, kept: KeptSamples
    ) -> None:
        self._plan, self._number, self._kept = plan, number, kept
        self._given, self._seed = given, seed
        self._source: StreamPart | None = None
        self._held: dict[int, list[Any]] = {}
        self._reads = last_read.current_read(last_read.DATASETS[0])

    def sample(self, epoch: int, count: int) -> Any:
        """A sample; waits until it has come.

        Args:
            epoch: 0; or `TRIED`.
            count: samples of the part before it; or, with `TRIED`, those after committed steps.

        Raises:
            DataError: it was used in a step that was lost; or the stream has ended.
        """
        number, place = divmod(count, self._plan.window)
        number += self._committed_window() if epoch == TRIED else 0
        if number not in self._held:
            self._held = dict([*self._held.items()][-1:])
            self._held[number] = self._window(number)
        return self._held[number][place]

    def close(self) -> None:
        """Let another process read it, from what comes next on."""
        self._source = None
        self._kept.let_go(self._number)

    def _window(self, number: int) -> list[Any]:
        kept, part = self._kept, self._number
        self._reads.clear()  # to wait for what has not come yet is no read that hangs
        while True:
            over = max(kept.due(part), self._committed_window())  # first: it may be read meanwhile
            if len(rows := kept.samples(part, number)) == self._plan.window:
                return [unpacked(each) for each in rows]
            if number < over:
                raise DataError(
                    f"window {number} of part {part} of the stream is wanted again, and data.once "
                    "= true keeps it until its steps are committed: the run has lost steps that it "
                    "had committed. Start a new run from the model of its last checkpoint."
                )
            if self._source is None and not kept.hold(part):
                time.sleep(_LOOK_S)
                continue
            try:
                self._read_to(number)
            except BaseException:
                self.close()
                raise

    def _committed_window(self) -> int:
        """Windows of which all samples are in committed steps."""
        position, parts = self._kept.committed, self._plan.parts
        taken = position // parts + (self._number < position % parts)
        return taken // self._plan.window

    def _read_to(self, number: int) -> None:
        """Read all windows up to one; this process holds the part."""
        if self._source is None:
            windows = KeptWindows(None, self._number, 0)
            self._source = StreamPart(self._given, self._plan, self._number, self._seed, windows)
            self._source.begin()
        kept, part, committed = self._kept, self._number, self._committed_window()
        kept.drop(part, committed)
        for each in range(max(kept.due(part), committed), number + 1):
            after = 0
            for done in range(len(kept.samples(part, each)), self._plan.window):
                self._reads.clear()
                after = kept.add(part, each, _as_bytes(self._source.next(each, done)), after)
            kept.read(part, each)


def _as_bytes(sample: Any) -> bytes:
    with suppress(TypeError):
        return packed(sample)
    raise DataError(
        f"a sample of the stream is a {type(sample).__name__}, which data.once = true cannot keep: "
        "numbers, text, bytes, arrays and tensors can be kept, in tuples, lists and dicts."
    )
