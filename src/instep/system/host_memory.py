"""Memory of the host that outlives a process: two slots of named tensors, each under a commit.

What one process alone remembers (the residual of a lossy codec, a local optimizer, a server's
shard) would be lost by `kill -9`. Here it lies in a memory file (memfd) whose descriptor the fork
server keeps as well (`memory_files.py`); the replacement of a killed process gets the same file.

One slot holds the state of the last commit; the state of the next one is staged in the other.
Nothing is written at the commit itself: which slot counts follows from the commit that the group
agrees on. What the tensors mean, and when a commit happens, is not known here.

A stamp has a checksum of its slot, which a process compares before it takes up what another one
has left. A process whose file belongs to another by now writes nothing that counts.

Way in: `HostMemory`. In the file: two stamps for each part and the file's owner (first page), and
at a multiple of `REGION` for each slot its layout as JSON, then its tensors; behind them
`lasting` memory, which belongs to no slot. The file is sparse. Linux.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch

from instep.errors import WorkerError
from instep.system.memory import room
from instep.system.memory_files import OWNER, given
from instep.system.slots import (
    LENGTH,
    TensorSlot,
    TensorSpec,
    bytes_of,
    check_layout,
    decoded,
    encoded,
    mapped,
)
from instep.units import readable_bytes

REGION = 1 << 42
"""Bytes of address space for each slot; memory is taken only for what is laid out."""

_STAMP, _SUM, _STAMPED = struct.Struct("<QQQq"), struct.Struct("<I"), 64

_LASTING = 5
"""Where in the file, in regions, `lasting` memory begins: behind the slots of both parts."""

_LONGEST = 1 << 30
"""Bytes of a layout, at most."""


_SLICE = 1 << 22
"""Bytes that are taken at a time."""

_SPARE = 1 << 26
"""Bytes that are to be left for the rest of the machine: several may take a slice at once."""


class NoRoom(WorkerError):
    """Memory that outlives a process cannot be had.

    Args:
        needed: bytes.
        left: bytes that this process may take.
        why: what the system says, if it was not the bytes.
    """

    def __init__(self, needed: int, left: int, why: str = "") -> None:
        self.needed, self.left = needed, left
        super().__init__(
            f"{readable_bytes(needed)} of memory for the state that only this process has cannot "
            f"be had: {why or f'{readable_bytes(left)} are free'}. Use fewer workers on this "
            "machine, or one with more memory."
        )


class Stamp(NamedTuple):
    """The commit of which a slot holds the state, and the generation in which it was staged."""

    course: int
    number: int
    generation: int


class HostMemory:
    """Two slots of tensors. One process at a time may write; all calls from one thread.

    Args:
        descriptor: of a memory file, which this object closes; the default is the file that the
            fork server gave this process, or a new one where there is none (under torchrun).
        part: which two slots of the file, 0 or 1: what is kept for two purposes lies apart.
    """

    def __init__(self, descriptor: int | None = None, *, part: int = 0) -> None:
        self._first = 2 * part  # of the file's slots
        # its own descriptor: `give_back` still needs the one that this process was given
        file = os.dup(given()) if descriptor is None and given() >= 0 else descriptor
        self.outlives = file is not None and file >= 0
        """Whether another process keeps the file too, so that it outlives this process."""
        self._file = file if file is not None and file >= 0 else os.memfd_create("instep-alone")
        self._close_file = weakref.finalize(self, os.close, self._file)
        if os.fstat(self._file).st_size < mmap.PAGESIZE:
            os.truncate(self._file, mmap.PAGESIZE)
        self._stamps = mmap.mmap(self._file, mmap.PAGESIZE)
        self._owner = self._stamps[OWNER]
        self._slots: list[TensorSlot | None] = [None, None]
        self._layout: dict[str, TensorSpec] = {}
        self._head = encoded({})
        self._staging: tuple[int, int, int, int] | None = None  # slot, course, number, generation

    def lay_out(self, layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        """Say which tensors `stage` gives from now on, and take the memory for both slots.

        What is stamped stays, under its own layout, until its slot is staged again.

        Raises:
            NoRoom: this process may not take so much memory.
        """
        self._layout = {name: TensorSpec(*spec) for name, spec in layout.items()}
        self._head = encoded(self._layout)
        size, left = bytes_of(self._head, self._layout), room(1, shared=True)
        if 2 * size - self._taken > left or size > REGION:
            raise NoRoom(2 * size, left)
        for slot in (0, 1):
            self._take(self._begin(slot), size, needed=2 * size)

    def lasting(self, size: int) -> torch.Tensor:
        """[size] uint8 that belongs to no commit: what the process before has written there, or
        zeros. It counts as long as a slot does. Ask for the same size each time.

        Raises:
            NoRoom: this process may not take so much memory.
        """
        if not size:
            return torch.empty(0, dtype=torch.uint8)
        left = room(1, shared=True)
        if size - self._taken > left or size > REGION:
            raise NoRoom(size, left)
        self._take(_LASTING * REGION, size, needed=size)
        memory = mmap.mmap(self._file, size, flags=mmap.MAP_SHARED, offset=_LASTING * REGION)
        return torch.frombuffer(memory, dtype=torch.uint8)

    @property
    def _taken(self) -> int:
        """Bytes of memory that the file takes."""
        return 512 * os.fstat(self._file).st_blocks

    def _take(self, begin: int, size: int, *, needed: int) -> None:
        """Have memory for a part of the file, a little at a time: others may be taking it too.

        A page that the system cannot give later would be a SIGBUS at the first write, and a process
        that goes beyond its cgroup's limit is killed.
        """
        taken = self._taken
        try:
            for at in range(begin, begin + size, _SLICE):
                os.posix_fallocate(self._file, at, min(_SLICE, begin + size - at))
                if self._taken > taken and (left := room(1, shared=True)) < _SPARE:
                    raise NoRoom(needed, left)
        except OSError as error:
            why = str(error.strerror)
            if error.errno == errno.EFBIG:  # the file is sparse, and its slots lie far apart
                why = "the system limits how large a file may be (set ulimit -f to unlimited)"
            raise NoRoom(needed, room(1, shared=True), why) from error

    def stage(self, course: int, number: int, generation: int) -> dict[str, torch.Tensor]:
        """The tensors in which to write the state of a commit, by name; they hold anything.

        Their slot counts for no commit from here on. The other one keeps the newest state from
        before (course, number, generation).

        Raises:
            NoRoom: this process may not map so much memory.
            WorkerError: the file has been given to another process.
        """
        self._check_owner()
        attempt = (course, number, generation)
        found = [self._stamp(slot) for slot in (0, 1)]
        kept = [each if each and each < attempt else (-1, -1, -1) for each in found]
        slot = int(kept[1] < kept[0])
        self._set_stamp(slot)
        self._staging = slot, *attempt
        held = self._slots[slot]
        if held is None or held.head != self._head:
            os.pwrite(self._file, self._head, self._begin(slot))
            try:
                held = self._slots[slot] = self._mapped(slot, self._head, self._layout)
            except OSError as error:
                size = bytes_of(self._head, self._layout)
                raise NoRoom(2 * size, room(1, shared=True), str(error.strerror)) from error
        return dict(held.tensors)

    def staged(self, course: int, number: int, generation: int) -> None:
        """All that was to be written for this commit is: stamp its slot.

        Args:
            course: of the commit; as for `stage`.
            number: of the commit; as for `stage`.
            generation: tells apart two attempts at one commit, of which the first was abandoned.

        Raises:
            WorkerError: the file has been given to another process.
        """
        self._check_owner()
        assert self._staging is not None, "nothing is staged"
        slot, *attempt = self._staging
        assert attempt == [course, number, generation], "another commit is staged"
        self._staging = None
        held = self._slots[slot]
        assert held is not None, "it was staged"
        stamp = _STAMP.pack(course, number, generation, held.checksum() if self.outlives else 0)
        self._set_stamp(slot, stamp + _SUM.pack(zlib.crc32(stamp)))  # a kill may leave half of it

    def at(
        self,
        course: int,
        number: int,
        generation: int = 0,
        *,
        layout: Mapping[str, TensorSpec] | None = None,
    ) -> dict[str, torch.Tensor] | None:
        """The state of exactly this commit, by name; None if no slot holds it undamaged.

        The tensors are the memory itself: they change when their slot is staged again, which
        is at the commit after next.

        Args:
            course: of the commit.
            number: of the commit.
            generation: that in which it was staged.
            layout: what the tensors must be; any will do if left out.

        Raises:
            CheckpointError: they are others than `layout` says.
        """
        wanted = Stamp(course, number, generation)
        for slot in (0, 1):
            if self._stamp(slot) == wanted:
                held = self._slots[slot] = self._slots[slot] or self._left(slot)
                if held is None:
                    return None
                if layout is not None:
                    check_layout(decoded(held.head), layout)
                return dict(held.tensors)
        return None

    def stamps(self) -> list[Stamp]:
        """What the slots hold, the newest first."""
        found = [stamp for slot in (0, 1) if (stamp := self._stamp(slot))]
        return sorted(found, reverse=True)

    def forget(self, course: int, number: int, generation: int) -> None:
        """Have no slot hold the state of this commit: it did not happen, or is of no use."""
        for slot in (0, 1):
            if self._stamp(slot) == (course, number, generation):
                self._set_stamp(slot)

    def clear(self) -> None:
        """Have no slot hold anything: what was here has been handed over, or is of no use."""
        for slot in (0, 1):
            self._set_stamp(slot)

    def drop(self) -> None:
        """Have no slot hold anything, and give back the memory; of the last part of a file."""
        self.clear()
        self._slots = [None, None]
        if os.fstat(self._file).st_size > (begin := self._begin(0)):
            os.ftruncate(self._file, begin)

    def close(self) -> None:
        """Let go of the file. Tensors that are still used stay valid."""
        self._slots = [None, None]
        self._stamps.close()
        self._close_file()

    def _stamp(self, slot: int) -> Stamp | None:
        """What a slot holds; None where its stamp is missing, or only half written."""
        found = self._stamped(slot)
        return found[0] if found else None

    def _stamped(self, slot: int) -> tuple[Stamp, int] | None:
        """The same, and the checksum of the slot."""
        place = _STAMPED * (self._first + slot)
        written = self._stamps[place : place + _STAMP.size]
        (total,) = _SUM.unpack_from(self._stamps, place + _STAMP.size)
        if zlib.crc32(written) != total:
            return None
        *stamp, checksum = _STAMP.unpack(written)
        return Stamp._make(stamp), checksum

    def _check_owner(self) -> None:
        if self._stamps[OWNER] != self._owner:
            raise WorkerError(
                "the memory that outlives this process belongs to another process by now. What it "
                "has computed counts for nothing. Resume the run."
            )

    def _set_stamp(self, slot: int, stamp: bytes = bytes(_STAMPED)) -> None:
        place = _STAMPED * (self._first + slot)
        self._stamps[place : place + len(stamp)] = stamp

    def _begin(self, slot: int) -> int:
        """Where a slot lies in the file."""
        return (1 + self._first + slot) * REGION

    def _left(self, slot: int) -> TensorSlot | None:
        """A slot as the process before has left it; None if it has been damaged since."""
        begin = self._begin(slot)
        try:
            (length,) = LENGTH.unpack(os.pread(self._file, LENGTH.size, begin))
            if length > _LONGEST:
                return None
            head = os.pread(self._file, LENGTH.size + length, begin)
            found, stamped = self._mapped(slot, head, decoded(head)), self._stamped(slot)
            return found if stamped and stamped[1] == found.checksum() else None
        except (
            struct.error,
            msgspec.MsgspecError,
            ValueError,
            TypeError,
            AttributeError,
            RecursionError,
            OSError,
        ):
            return None

    def _mapped(self, slot: int, head: bytes, layout: Mapping[str, TensorSpec]) -> TensorSlot:
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        size = bytes_of(head, layout)
        memory = mmap.mmap(self._file, size, flags=flags, offset=self._begin(slot))
        return mapped(memory, head, layout)
