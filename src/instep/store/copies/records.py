"""The files of a run beside its checkpoints, copied as blocks that are named by their SHA-256.

They only grow, so that most blocks are there already. Way in: `CopiedRecords`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Set
from pathlib import Path

from instep.plain_file import crc32_of, plain
from instep.state.files.manifest import CheckpointManifest
from instep.store.copies.layout import BLOCK, COPIED, RECORDS, Copy, RecordBlock
from instep.store.copies.objects import Objects


class CopiedRecords:
    """The blocks of a run's copies; errors of the file system are raised as they come.

    Args:
        run: its folder.
        objects: of its copies.
    """

    def __init__(self, run: Path, objects: Objects) -> None:
        self._run, self._objects = run, objects
        self._there: dict[str, int] = {}  # bytes of each

    def look(self) -> None:
        """Find out which are there."""
        self._there = self._objects.names(RECORDS)

    def has(self, copy: Copy) -> bool:
        """Whether all blocks of a copy are there."""
        every = (block for blocks in copy.records.values() for block in blocks)
        return all(self._there.get(each.sha256) == each.size for each in every)

    def send(self, manifest: CheckpointManifest) -> dict[str, list[RecordBlock]] | None:
        """Copy the files as they are, the ledger as far as a checkpoint has it.

        Returns:
            The blocks of each file; None if the ledger is another by now.
        """
        size, crc32 = int(manifest.facts["ledger_bytes"]), manifest.facts.get("ledger_crc32")
        ledger = self._run / "ledger.bin"
        try:
            if not ledger.exists() or (crc32 is not None and crc32_of(ledger, 0, size) != crc32):
                return None
            found = {}
            for pattern in COPIED:  # in this order: no checksum is copied before its record
                for path in sorted(self._run.glob(pattern)):
                    most = size if path == ledger else None
                    blocks = _blocks(path, most, lines=path.suffix == ".jsonl")
                    name = str(path.relative_to(self._run))
                    found[name] = [self._send_block(data) for data in blocks]
        except FileNotFoundError:  # what is sent raises none
            return None
        return found

    def _send_block(self, data: bytes) -> RecordBlock:
        digest = hashlib.sha256(data).hexdigest()
        if self._there.get(digest) != len(data):
            self._objects.send(f"{RECORDS}/{digest}", data, len(data))
            self._there[digest] = len(data)
        return RecordBlock(digest, len(data))

    def remove_all_but(self, needed: Set[str]) -> None:
        """Remove the blocks that no copy needs."""
        for sha256 in self._there.keys() - needed:
            self._objects.remove(f"{RECORDS}/{sha256}")
            del self._there[sha256]


def _blocks(path: Path, most: int | None, *, lines: bool) -> Iterator[bytes]:
    """The bytes of a file that grows, as far as they are whole lines, or `most` of them."""
    with open(path, "rb", opener=plain) as file:
        left = os.fstat(file.fileno()).st_size if most is None else most
        while left and (data := file.read(min(BLOCK, left))):
            left -= len(data)
            if lines and not left:
                data = data[: data.rfind(b"\n") + 1]
            if data:
                yield data
