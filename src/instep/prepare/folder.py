"""The folder of a preparation: results of tasks while it runs, shards when it has ended.

Results lie in `.preparing` within the folder that is asked for. A task's samples are `KEY.arrow`,
and count once `KEY.done` is there, which is written last. Way in: `Folder`.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import msgspec

from instep.data.shards.manifest import (
    NAME,
    Manifest,
    Shard,
    is_kept,
    kept_name,
    read_manifest,
)
from instep.errors import DataError, RunError, SpecError, WorkerError
from instep.plain_file import beside_of, crc32_of, plain, read_plain, replace_plain
from instep.prepare.messages import Mapped, Segment
from instep.store.own_files import lock, open_own, unlock

_LOCK = "lock"

_RESULT = (".done", ".arrow", ".bad")
"""Files of the result of a task."""

MARK = "mark"
"""A file by which a host knows whether it sees this folder."""


class Folder:
    """The folder that `--to` names."""

    def __init__(self, to: Path) -> None:
        self.path, self.work = to, to / ".preparing"

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make it if it is missing, and lock it.

        Raises:
            RunError: another command prepares it, or it cannot be written.
            SpecError: it is a file, or has others than ours.
        """
        self._check()
        new = not self.path.exists()
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            (self.work / "logs").mkdir(exist_ok=True)
            file = open_own(self.work / _LOCK)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror}. Choose another --to."
            ) from None
        with file:
            if not lock(file):
                raise RunError(
                    f"another command prepares {self.path} at the moment. Wait for its end, or "
                    "stop it there with Ctrl-C."
                )
            told = False  # whether the error says what lies there
            try:
                yield
            except WorkerError:
                told = True
                raise
            finally:
                if not told and self._is_ours(file) and not any(self.work.glob("*.done")):
                    self._remove_work()
                    if new:
                        with suppress(OSError):
                            self.path.rmdir()
                unlock(file)

    def _is_ours(self, file: IO[Any]) -> bool:
        """Whether the lock is still ours, and not that of a command that came after the end."""
        with suppress(OSError):
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.work / _LOCK))
        return False

    def _remove_work(self, but: Collection[str] = ()) -> None:
        """Remove results of tasks, but those with certain keys; the lock last, for until then no
        other command can begin."""
        for path in self.work.glob("*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != _LOCK and not (path.stem in but and path.suffix in _RESULT):
                path.unlink(missing_ok=True)
        if any(self.work.glob("*.done")):
            return
        (self.work / _LOCK).unlink(missing_ok=True)
        with suppress(OSError):  # another command has begun
            self.work.rmdir()

    def _check(self) -> None:
        if self.path.is_file():
            raise SpecError(f"--to {self.path} is a file. Name a folder for the shards.")
        ours = self.work.exists() or (self.path / "manifest.json").exists()
        if self.path.is_dir() and not ours and any(self.path.iterdir()):
            raise SpecError(
                f"--to {self.path} has files that instep did not make. Name a new folder."
            )

    def results(self, wanted: Iterable[str]) -> dict[str, Mapped]:
        """Those that are done of tasks with these keys: by commands before, or in the shards."""
        found = dict[str, Mapped]()
        for key in wanted:
            with suppress(OSError, msgspec.MsgspecError, RecursionError):
                result = msgspec.json.decode(read_plain(self.work / f"{key}.done"), type=Mapped)
                if result.key == key and self._is_good(result):
                    file = str(self.work / f"{key}.arrow")
                    result.parts = [Segment(file, 0, result.samples)]
                    found[key] = result
            if key not in found and key in self._published:
                found[key] = self._published[key]
        return found

    def untried(self, keys: Iterable[str]) -> list[Path]:
        """Records of results that lie here which another process has yet to try."""
        files = (self.work / f"{key}.again" for key in keys)
        return [file for file in files if file.exists()]

    def done(self) -> set[str]:
        """Keys of tasks whose results lie here since the manifest was written; later ones are of a
        command that was interrupted, with other tasks."""
        written = (self.path / NAME).stat().st_mtime_ns
        found = self.work.glob("*.done")
        return {path.stem for path in found if path.stat().st_mtime_ns <= written}

    def bytes_beside(self) -> int:
        """The size of the results that lie here."""
        return sum(path.stat().st_size for path in self.work.glob("*.arrow"))

    def bytes_to_come(self, results: Sequence[Mapped], passes: int) -> int:
        """Bytes that passes over all samples will write here, without what they have written."""
        size = sum(result.bytes for result in results)
        there = [*self.work.glob("*.sorted"), *self.work.glob("*.arrow")]
        own = {f"{result.key}.arrow" for result in results}
        written = sum(path.stat().st_size for path in there if path.name not in own)
        return max(passes * size - written, 0)

    def _is_good(self, result: Mapped) -> bool:
        """Whether the files of a result are as they were written."""
        path, bad = (self.work / f"{result.key}.{end}" for end in ("arrow", "bad"))
        return (
            path.stat().st_size == result.bytes
            and crc32_of(path) == result.crc32
            and (not result.bad or crc32_of(bad) == result.crc32_bad)
        )

    @cached_property
    def _published(self) -> dict[str, Mapped]:
        """Tasks whose samples are in the shards of the manifest that is there."""
        with suppress(DataError, OSError, msgspec.MsgspecError, RecursionError):
            manifest = read_manifest(self.path)
            whole = set(self.good_shards)
            if not self._has(manifest.tasks):
                return {}
            kept = msgspec.json.decode(read_plain(self.path / manifest.tasks), type=list[Mapped])
            knows_bad = not manifest.bad_file or self._has(manifest.bad_file)
            there = {
                result.key: result
                for result in kept
                if {part.file for part in result.parts} <= whole and (knows_bad or not result.bad)
            }
            for result in there.values():
                result.parts = [
                    Segment(str(self.path / part.file), part.first, part.samples)
                    for part in result.parts
                ]
            return there
        return {}

    @cached_property
    def good_shards(self) -> dict[str, Shard]:
        """The shards of the manifest that was there, by name, that are as it says."""
        before = self.manifest()
        return {
            shard.file: shard
            for shard in (before.shards if before else [])
            if self._is_whole(shard) and shard.crc32 in (None, crc32_of(self.path / shard.file))
        }

    def whole(self, manifest: Manifest) -> bool:
        """Whether all files of a manifest are there."""
        found = [self._is_whole(shard) for shard in manifest.shards]  # each, not up to the first
        kept = filter(None, (manifest.blocks, manifest.tasks, manifest.bad_file))
        return all(found) and all(map(self._has, kept))

    def _is_whole(self, shard: Shard) -> bool:
        """Whether a shard has its size; one that has another is removed, and made again."""
        path = self.path / shard.file
        with suppress(FileNotFoundError):
            if path.stat().st_size == shard.bytes:
                return True
            path.unlink()
        return False

    def mark(self) -> str:
        """Write the mark by which a host knows the folder of results; returns it."""
        text = secrets.token_hex(16)
        replace_plain(self.work / MARK, text)
        return text

    def clean(self) -> None:
        """Remove what processes left that were killed."""
        kept = self.path.glob(".manifest.json.*")
        for left in [*self.work.glob(".*"), *self.path.glob(".*-*.*.*"), *kept]:
            with suppress(OSError):
                left.unlink()

    def bad_of(self, key: str) -> list[dict[str, Any]]:
        """The bad records of a task: of this command's predecessors, or in the file of them."""
        with suppress(FileNotFoundError):
            return [json.loads(line) for line in read_plain(self.work / f"{key}.bad").splitlines()]
        with suppress(DataError, OSError):
            manifest = read_manifest(self.path)
            lines = read_plain(self.path / manifest.bad_file).splitlines()
            return [bad for bad in map(json.loads, lines) if bad["task"] == key]
        return []

    def keep(self, kind: str, suffix: str, data: bytes) -> str:
        """Write a file of the manifest; returns its name, which its bytes decide."""
        name = kept_name(kind, data, suffix)
        replace_plain(self.path / name, data, durable=True)
        return name

    def _has(self, name: str) -> bool:
        """Whether a file of the manifest has the bytes that it was kept with."""
        return is_kept(self.path / name)

    def manifest(self) -> Manifest | None:
        """The one that is there."""
        with suppress(DataError):
            return read_manifest(self.path)
        return None

    def remove_others(self, manifest: Manifest, kept: Collection[str]) -> None:
        """Remove shards and other files of former manifests, and results of tasks but those with
        the keys `kept`."""
        known = {shard.file for shard in manifest.shards}
        known |= {manifest.blocks, manifest.tasks, manifest.bad_file, "manifest.json"}
        for pattern in ("shard-*.arrow", "blocks-*.sha256", "tasks-*.json", "bad-*.jsonl"):
            for path in self.path.glob(pattern):
                if path.name not in known:
                    path.unlink(missing_ok=True)
        self._remove_work(kept)


def link(file: Path, to: Path) -> None:
    """Give a file a second name, or a copy where the file system has no links."""
    try:
        os.link(file, to)
    except FileExistsError:
        pass
    except OSError:
        beside = beside_of(to)
        shutil.copyfile(file, beside)
        beside.replace(to)


def sync(path: Path) -> None:
    """Flush a file to the disk."""
    with open(path, "rb", opener=plain) as file:
        os.fsync(file.fileno())
