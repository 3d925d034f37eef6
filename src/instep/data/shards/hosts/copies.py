"""Copies of shards on further hosts of a run, which are made while it trains and never waited for.

`to_copy` says which host copies what, from who has what: all members of a group compute the same.
A `Copier` does what is its host's, in a thread of its own: a shard at a time, under another name
until all of it is here, and with pauses, so that training has half of the network at least. A copy
that is whole is a file of the dataset like any other. Ways in: `to_copy`, `Copier`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from instep.data.shards.hosts.board import HeldShards, PeerDoor
from instep.data.shards.manifest import Shard
from instep.plain_file import plain
from instep.units import readable_bytes

PART = 1 << 20
"""Bytes that are asked for at a time."""

LEAST_FREE = 1 << 30
"""Bytes of a disk that copies leave free."""

ENDS_S = 5.0
"""How long `close` waits for the part that is on its way."""

Fetch = Callable[[int, int, int], bytes | None]
"""Asks another host for bytes of a shard: its number, the first, and how many; None if no host
gives them."""


def to_copy(
    doors: Sequence[PeerDoor], dataset: str, lots: Iterable[Sequence[int]], copies: int
) -> dict[int, list[int]]:
    """Say which shards each host copies, so that each shard is on so many hosts, or on all.

    Args:
        doors: of all workers, with what lies on their hosts.
        dataset: the `sha256` of its manifest.
        lots: numbers of the shards of each part: what one host has of it, the next one copies.
        copies: hosts that are to have each shard.

    Returns:
        By the worker that does it, the first of its host: numbers of shards. Those that are on no
        host are in no list.
    """
    disks = dict[tuple[str, str], tuple[int, HeldShards]]()
    for door in sorted(doors, key=lambda each: each.worker):
        for held in door.holdings:
            if held.dataset == dataset:
                disks.setdefault((door.node, held.folder), (door.worker, held))
    hosts = list(disks.values())
    found: dict[int, list[int]] = {worker: [] for worker, _ in hosts}
    chosen = Counter[int]()  # hosts that copy a shard
    for lot in lots:
        counts = [sum(held.has(shard) for shard in lot) for _, held in hosts]
        first = counts.index(max(counts)) + 1 if counts else 0
        for shard in lot:
            have = sum(held.has(shard) for _, held in hosts)
            left = copies - have - chosen[shard] if have else 0
            for worker, held in hosts[first:] + hosts[:first]:
                if left > 0 and not held.has(shard) and shard not in found[worker]:
                    found[worker].append(shard)
                    chosen[shard] += 1
                    left -= 1
    return found


class Copier:
    """Copies shards into the folder of this host.

    Args:
        folder: of the dataset.
        shards: those of its manifest.
        fetch: asks other hosts; called from the thread of the copier alone.
        did: called for each copy that is whole, from the same thread.
        warn: told once what stands in the way.
    """

    def __init__(
        self,
        folder: Path,
        shards: Sequence[Shard],
        fetch: Fetch,
        did: Callable[[], None],
        warn: Callable[[str], None],
    ) -> None:
        self._folder, self._shards, self._fetch = folder, shards, fetch
        self._did, self._warn = did, warn
        self._left, self._lock = deque[int](), threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop, self._warned = threading.Event(), False
        self.shards = self.bytes = 0
        """Copied so far."""

    def want(self, numbers: Iterable[int]) -> None:
        """Copy these shards from now on, instead of those that were wanted before."""
        with self._lock:
            self._left = deque(numbers)
            if self._left and self._thread is None and not self._stop.is_set():
                self._thread = threading.Thread(target=self._run, name="instep copies", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Copy nothing any more; a second call does nothing."""
        self._stop.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(ENDS_S)

    def _run(self) -> None:
        while (number := self._next()) is not None:
            try:
                self._copy(number)
            except OSError as error:
                self._say(f"{self._folder} cannot be written: {error.strerror or error}.")

    def _next(self) -> int | None:
        with self._lock:
            if self._left and not self._stop.is_set():
                return self._left.popleft()
            self._thread = None
            return None

    def _copy(self, number: int) -> None:
        shard = self._shards[number]
        path = self._folder / shard.file
        free = shutil.disk_usage(self._folder).free
        if free < shard.bytes + LEAST_FREE:
            self._say(f"{self._folder} has {readable_bytes(free)} left, of which 1 GB stays free.")
            return
        beside = path.with_name(f".{shard.file}.copy")
        # where another process of this host copies it, the lock is not free
        with suppress(BlockingIOError), open(beside, "ab", opener=plain) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():  # the file that is locked may be it, under its former name
                beside.unlink(missing_ok=True)
                return
            file.truncate(0)
            if self._filled(file, number):
                file.flush()
                os.fsync(file.fileno())
                beside.replace(path)
                self.shards, self.bytes = self.shards + 1, self.bytes + shard.bytes
                self._did()
            else:
                beside.unlink(missing_ok=True)

    def _filled(self, file: BinaryIO, number: int) -> bool:
        """Whether all bytes of a shard were written into a file."""
        shard, crc = self._shards[number], 0
        for first in range(0, shard.bytes, PART):
            began, wanted = time.monotonic(), min(PART, shard.bytes - first)
            data = self._fetch(number, first, wanted)
            if self._stop.is_set():
                return False
            if data is None or len(data) != wanted:
                self._say(f"{shard.file} cannot be had from another host now.")
                return False
            file.write(data)
            crc = zlib.crc32(data, crc)
            self._stop.wait(time.monotonic() - began)  # training needs the network too
        if shard.crc32 not in (None, crc):
            self._say(f"{shard.file} of another host is not what was written.")
            return False
        return True

    def _say(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            self._warn(f"data.copies: {text} The run goes on without this copy.")
