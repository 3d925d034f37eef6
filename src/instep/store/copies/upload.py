"""Copies checkpoints of a run to a file system, one at a time, and removes old copies.

A checkpoint is read through files that are opened first, so it may be deleted meanwhile. What was
written for one that is tried again is not written again. Errors of the file system are raised as
they come: when to try again is for `follow.py`. Way in: `Copies`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from instep.data.shards import download
from instep.data.shards.download import WrongBytes, file_system, moving
from instep.errors import CheckpointError, one_line
from instep.job.checkpoint import CheckpointSpec
from instep.plain_file import crc32_of, plain
from instep.state.files import manifest as page
from instep.state.retention import Best, to_delete
from instep.store.copies.layout import (
    BLOCK,
    COPIED,
    COPY,
    RECORDS,
    Copy,
    RecordBlock,
    decode,
    encode,
    name_of,
    step_of,
)

SLOW = 1e6
"""Bytes a second that a file system takes at least, also at the end of a file, all at once."""

PAUSES_S = (0.1, 0.4)
"""Before an object is sent again that failed; then all of it waits, longer each time."""

_CHUNK = 1 << 20


class _Known(NamedTuple):
    """A copy that is whole."""

    step: int
    value: float | None
    """Its metric, where the best are kept."""
    blocks: frozenset[str]


class Copies:
    """The copies of a run.

    Args:
        run: its folder.
        url: of its copies.
        spec: which of them are kept.
    """

    moved_at: float
    """When something was last written there, or an answer came; of `time.monotonic`."""

    def __init__(self, run: Path, url: str, spec: CheckpointSpec) -> None:
        self._run, self._url, self._spec = run, url, spec
        self._best = Best.by(spec) if spec.keep_best else None
        self._files: Any = None
        self._known: dict[str, _Known] = {}
        self._blocks: dict[str, int] = {}  # bytes of each that is there
        self._written = set[str]()  # URLs, of a copy that is not whole yet
        self._newest = ""  # the copy since which old ones have not been removed
        self._refused = set[str]()  # names of checkpoints that are damaged here
        self.moved_at = time.monotonic()

    def look(self) -> None:
        """Find out what is there, unless that is known.

        Raises:
            Exception: of the file system.
        """
        if self._files is not None:
            return
        files = file_system(self._url)
        known = {}
        for name in self._names(files, self._url):
            if step_of(name) is not None:
                with suppress(FileNotFoundError, CheckpointError):
                    known[name] = self._read(files, name)
        self._blocks = self._names(files, f"{self._url}/{RECORDS}")
        self._known, self._files = known, files

    def _names(self, files: Any, url: str) -> dict[str, int]:
        """The names in a folder, with sizes; empty if there is none."""
        try:
            found = self._asked(lambda: files.ls(url, detail=True))
        except FileNotFoundError:
            return {}
        return {Path(each["name"]).name: int(each.get("size") or 0) for each in found}

    def _read(self, files: Any, name: str) -> _Known:
        place = f"{self._url}/{name}"
        copy = decode(self._asked(lambda: files.cat_file(f"{place}/{COPY}")), place)
        value = None
        if self._best is not None:
            data = self._asked(lambda: files.cat_file(f"{place}/{page.MANIFEST}"))
            value = self._best.value(page.decode(data, Path(page.MANIFEST)).facts)
        return _known(copy, value)

    def missing(self) -> Path | None:
        """The checkpoint that is to be copied next: the newest; else one that is kept for good.

        Those of later steps than the newest are removed first: the run has gone back.

        Raises:
            Exception: of the file system.
        """
        here = list(self._here())
        if not here:
            return None
        newest = here[0][1]
        for name in [name for name, each in self._known.items() if each.step > newest.step]:
            self._remove(name)
        values = {each.step: each.value for each in self._known.values() if each.value is not None}
        if self._best is not None:
            found = ((each.step, self._best.value(each.facts)) for _, each, _ in here)
            values |= {step: value for step, value in found if value is not None}
        good = set(self._best.choose(values) if self._best else ())
        for path, each, name in here:
            every = self._spec.keep_every
            kept = each.step in good or (every > 0 and each.step % every == 0)
            if (each is newest or kept) and name not in self._known | dict.fromkeys(self._refused):
                return path
        return None

    def _here(self) -> Iterator[tuple[Path, page.Manifest, str]]:
        """The checkpoints of the run, newest first: manifest, and name of the copy."""
        for _, path in page.published(self._run / "checkpoints"):
            with suppress(CheckpointError, OSError):  # deleted, or damaged
                data = (path / page.MANIFEST).read_bytes()
                manifest = page.decode(data, path)
                yield path, manifest, name_of(manifest.step, data)

    def copy(self, checkpoint: Path) -> tuple[int, int] | None:
        """Copy a checkpoint.

        Returns:
            Its step, and its size in bytes; None if it is gone, or the run went back before it.

        Raises:
            CheckpointError: it is damaged, and not looked at again.
            Exception: of the file system.
        """
        with ExitStack() as stack:
            try:
                data = (checkpoint / page.MANIFEST).read_bytes()
                manifest = page.decode(data, checkpoint)
                opened = {
                    name: stack.enter_context(open(checkpoint / name, "rb", opener=plain))
                    for name in manifest.files
                }
                records = self._records(manifest)
            except FileNotFoundError:
                return None
            if records is None:
                return None
            name = name_of(manifest.step, data)
            place = f"{self._url}/{name}"
            for file, entry in manifest.files.items():
                try:
                    self._send_file(f"{place}/{file}", opened[file], entry)
                except CheckpointError:
                    self._refused.add(name)
                    raise
        copy = Copy(step=manifest.step, manifest=hashlib.sha256(data).hexdigest(), records=records)
        self._send_bytes(f"{place}/{page.MANIFEST}", data)
        self._send_bytes(f"{place}/{COPY}", encode(copy))
        value = self._best.value(manifest.facts) if self._best else None
        self._known[name] = _known(copy, value)
        self._written.clear()
        self._newest = name
        size = sum(entry.size_bytes for entry in manifest.files.values())
        return manifest.step, size + len(data)

    # ---- records

    def _records(self, manifest: page.Manifest) -> dict[str, list[RecordBlock]] | None:
        """Copy the files beside a checkpoint as they are; None if the ledger is another by now."""
        size, crc32 = int(manifest.facts["ledger_bytes"]), manifest.facts.get("ledger_crc32")
        ledger = self._run / "ledger.bin"
        if not ledger.exists() or (crc32 is not None and crc32_of(ledger, 0, size) != crc32):
            return None
        found = {}
        for pattern in COPIED:  # in this order: no checksum is copied before its record
            for path in sorted(self._run.glob(pattern)):
                most = size if path == ledger else None
                blocks = _blocks(path, most, lines=path.suffix == ".jsonl")
                name = str(path.relative_to(self._run))
                found[name] = [self._send_block(data) for data in blocks]
        return found

    def _send_block(self, data: bytes) -> RecordBlock:
        digest = hashlib.sha256(data).hexdigest()
        if self._blocks.get(digest) != len(data):
            self._send_bytes(f"{self._url}/{RECORDS}/{digest}", data)
            self._blocks[digest] = len(data)
        return RecordBlock(digest, len(data))

    # ---- old copies

    def remove_old(self) -> None:
        """Remove what is not kept, now that another copy is whole, and blocks that none needs.

        Raises:
            Exception: of the file system; then call it again.
        """
        if not (newest := self._newest):
            return
        step = max(each.step for each in self._known.values())
        values = {each.step: each.value for each in self._known.values() if each.value is not None}
        obsolete = to_delete(
            (each.step for each in self._known.values()),
            current=step,
            keep_last=self._spec.keep_last,
            keep_every=self._spec.keep_every,
            keep_best=self._best.choose(values) if self._best else (),
        )
        for name, each in list(self._known.items()):
            replaced = name != newest and each.step == step_of(newest)
            if each.step in obsolete or replaced:
                self._remove(name)
        needed = {sha256 for each in self._known.values() for sha256 in each.blocks}
        for sha256 in self._blocks.keys() - needed:
            self._remove_file(f"{self._url}/{RECORDS}/{sha256}")
            del self._blocks[sha256]
        self._newest = ""

    def _remove(self, name: str) -> None:
        """Remove a copy so that no half of it ever counts as one."""
        place = f"{self._url}/{name}"
        self._remove_file(f"{place}/{COPY}")
        del self._known[name]
        for file in self._names(self._files, place):
            self._remove_file(f"{place}/{file}")
        with suppress(Exception):  # only some file systems have folders
            self._files.rmdir(place)

    def _remove_file(self, url: str) -> None:
        with suppress(FileNotFoundError):
            self._asked(lambda: self._files.rm_file(url))

    # ---- bytes

    def _asked(self, ask: Callable[[], Any]) -> Any:
        answer = moving(lambda _: ask())
        self.moved_at = time.monotonic()
        return answer

    def _send_file(self, url: str, file: IO[bytes], entry: page.FileEntry) -> None:
        if url in self._written:
            return
        digest = self._send(url, partial(_chunks, file.fileno()), entry.size_bytes)
        if digest != entry.sha256:
            raise CheckpointError(
                f"{file.name} is damaged: it does not fit its manifest, and is not copied."
            )
        self._written.add(url)

    def _send_bytes(self, url: str, data: bytes) -> None:
        self._send(url, lambda: iter([data]), len(data))

    def _send(self, url: str, chunks: Callable[[], Iterator[bytes]], size: int) -> str:
        """Write an object; returns the SHA-256 of what was sent."""

        def write(moves: Callable[[], None]) -> str:
            digest, target = hashlib.sha256(), self._files.open(url, "wb")
            try:
                for data in chunks():
                    digest.update(data)
                    target.write(data)
                    moves()
                    self.moved_at = time.monotonic()
                target.close()
            except BaseException:
                _discard(target)
                raise
            if (there := self._files.info(url).get("size")) not in (None, size):
                raise WrongBytes(f"it has {there:,} bytes, and {size:,} were written")
            return digest.hexdigest()

        def attempt(moves: Callable[[], None]) -> str:
            try:
                return write(moves)
            except FileNotFoundError:  # a file system with folders; or there is no such bucket
                root = self._files._strip_protocol(url).partition("/")[0] or "/"
                if not self._files.exists(root):
                    raise
                self._files.makedirs(url.rpartition("/")[0], exist_ok=True)
                return write(moves)

        for pause_s in (*PAUSES_S, None):  # a busy store says so of an object now and then
            try:
                sent: str = moving(attempt, download.STALL_S + size / SLOW)
                break
            except FileNotFoundError as error:  # which is no file of the run
                raise OSError(one_line(error)) from None
            except Exception as error:  # of whatever kind the file system has
                if pause_s is None or isinstance(error, WrongBytes):
                    raise
                time.sleep(pause_s)
        self.moved_at = time.monotonic()
        return sent


def _discard(target: Any) -> None:
    """Close what was not written to its end, and leave no object: to close it would make one."""
    with suppress(Exception):
        target.discard()
    with suppress(Exception):
        target.closed = True


def _chunks(descriptor: int) -> Iterator[bytes]:
    """The bytes of an open file, which may be closed meanwhile: one that is given up may go on."""
    with open(os.dup(descriptor), "rb", buffering=0) as file:
        at = 0
        while data := os.pread(file.fileno(), _CHUNK, at):
            at += len(data)
            yield data


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


def _known(copy: Copy, value: float | None) -> _Known:
    blocks = (each.sha256 for every in copy.records.values() for each in every)
    return _Known(copy.step, value, frozenset(blocks))
