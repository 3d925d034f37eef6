"""The parts of one preparation in their order: cut, scan, map, join, digest, publish.

Which process does a task is not known here. Way in: `Job.run`.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from instep.data.raw import FORMATS, Piece
from instep.data.shards.columns import Column
from instep.data.shards.digest import blocks_of, digest_of
from instep.data.shards.manifest import Manifest, Shard, Source, lines_of, write_manifest
from instep.errors import DataError, RunError
from instep.prepare import plan
from instep.prepare.asked import Asked
from instep.prepare.assemble import Planned, columns_of, figures_of, layout, moved
from instep.prepare.bad import bad_records, check_files
from instep.prepare.class_order import standing_together
from instep.prepare.exchanged import exchanged
from instep.prepare.folder import Folder, link, sync
from instep.prepare.messages import (
    Again,
    Digest,
    Done,
    Head,
    Join,
    Map,
    Mapped,
    Scan,
    Sum,
    Task,
)
from instep.prepare.plan import Group, RawFile, groups_of, plan_key, with_columns
from instep.prepare.progress import Progress
from instep.prepare.unchanged import check_sources, stamped, with_versions
from instep.prepare.workers.crew import Crew
from instep.units import readable_bytes
from instep.words import listed, plural

SPAN = 64 << 20
"""Bytes of a raw file whose checksum is one task."""

_DIGESTED = 32
"""Tasks that the digest of all samples is made in."""

_TELLING = 4
"""Results that tell how large all will be."""

_SHOWN = 3
"""Files that a message names, and bad records that the command does."""


class Job:
    """The parts of one preparation, in their order."""

    def __init__(
        self,
        asked: Asked,
        folder: Folder,
        files: list[RawFile],
        crew: Crew,
        workers: int,
        say: Callable[[str], None],
    ) -> None:
        self._asked, self._folder, self._files = asked, folder, files
        self._decided = [asked.decides(), asked.exchanges()]
        self._crew, self._workers, self._say = crew, workers, say
        self.tasks, self.done_before = 0, 0
        self.first_bad: list[str] = []
        self.together: list[str] = []
        """Columns whose equal values stand together."""
        self._results: list[Mapped] = []
        self._before: list[Mapped] = []  # of the tasks whose samples were put into another order
        self._kept = set[str]()  # keys of results that lie beside the shards that are there
        self._plan = ""

    def run(self) -> Manifest:
        """Do all of it.

        Raises:
            InstepError: a task cannot be done.
            Interrupted: a signal has come.
        """
        before = self._folder.manifest()
        self._know_files(before.sources if before else [])
        groups = groups_of(self._settled(), self._asked)
        self.tasks, self._plan = len(groups), plan_key(groups, self._asked)
        if before and before.made_by.get("plan") == self._plan and self._folder.whole(before):
            self.done_before, self._kept = self.tasks, self._folder.done()
            if (now := stamped(before, self._files)) != before:
                write_manifest(self._folder.path, now)
            return now
        size = sum(file.bytes for file in self._files)
        of = f"{plural(len(self._files), 'file')}, {readable_bytes(size)}"
        self._say(f"preparing {of}, workers: {self._workers}")
        self._results = self._mapped(groups)
        columns = columns_of(self._results)
        if not columns:
            raise DataError(self._nothing())
        if self._asked.unreadable == "some":
            check_files(groups, self._results, self._folder)
        if self._asked.exchanges() is not None:
            self._before = self._results
            passes = 1 if self._asked.reduce else 2  # who knows how much a function leaves
            self._check_free(self._folder.bytes_to_come(self._before, passes))
            self._results = exchanged(
                self._before, columns, self._asked, self._folder, self._crew, self._say
            )
            columns = columns_of(self._results)
            if not columns:
                raise DataError(self._nothing())
        shards = layout(self._results, columns, self._asked.shard_bytes)
        sums = self._write(shards, columns)
        return self._publish(shards, columns, sums)

    def kept(self) -> set[str]:
        """Keys of results that stay in the folder, for the next command."""
        if not self._asked.keep or self._asked.exchanges() is None:
            return set()
        if not self._before:  # the shards were there already
            return self._kept
        return {result.key for result in self._before}

    def _settled(self) -> Iterator[tuple[RawFile, list[Piece]]]:
        """The pieces of each file, scanned where their format needs it."""
        cut = plan.cut(self._files, self._asked.types)
        pieces = [piece for _, of in cut for piece in of if piece.scan]
        progress = Progress("scanned", len(pieces), self._say)
        tasks = [Scan(number, piece) for number, piece in enumerate(pieces)]
        scans = iter(self._values(tasks, progress.step))
        for file, of in cut:
            if any(piece.scan for piece in of):
                of = FORMATS[file.format]().settle(of, [next(scans) for _ in of])
            yield file, of

    def _mapped(self, groups: Sequence[Group]) -> list[Mapped]:
        """The results of all tasks, in their order."""
        columns = self._head(groups)
        groups = with_columns(groups, columns)
        known = self._folder.results(group.key for group in groups)
        results = {group.key: known[group.key] for group in groups if group.key in known}
        left = [group for group in groups if group.key not in results]
        self.done_before = len(results)
        if self.done_before:
            self._say(f"{self.done_before} of {plural(len(groups), 'task')} are done already")
        size = sum(result.bytes for result in results.values())
        self._check_room(size, len(results), len(left))
        progress = Progress("prepared", len(groups), self._say, len(results))
        tasks = [Map(number, group.key, group.pieces, columns) for number, group in enumerate(left)]
        open_ = enumerate(self._folder.untried(known), len(tasks))
        again = [Again(number, str(file)) for number, file in open_]
        for done in self._crew.do(tasks, _to_repeat, again):
            result = msgspec.convert(done.value, Mapped)
            results[result.key] = result
            progress.step(result.records)
            size += result.bytes
            self._check_room(size, len(results), len(groups) - len(results))
        return [results[group.key] for group in groups]

    def _head(self, groups: Sequence[Group]) -> list[Column]:
        """The columns that the first samples have: all samples depend on them."""
        for group in groups:
            (done,) = self._crew.do([Head(0, group.pieces)])
            if done.value:
                return msgspec.convert(done.value, list[Column])
        return []

    def _check_room(self, size: int, done: int, left: int) -> None:
        """Refuse what cannot fit, as far as the bytes of the results so far tell."""
        if done >= _TELLING:
            self._check_free(size / done * left)

    def _check_free(self, needed: float) -> None:
        free = shutil.disk_usage(self._folder.path).free
        if needed > free:
            raise RunError(
                f"{self._folder.path} has {readable_bytes(free)} left, and the shards need "
                f"about {readable_bytes(needed)} more. Free some, and give the same command "
                "again: what is done is kept."
            )

    def _nothing(self) -> str:
        results = [*self._before, *self._results]
        records, bad = (sum(getattr(r, n) for r in results) for n in ("records", "bad"))
        text = f"no sample was made of {plural(records, 'record')}"
        for line in bad_records(results, self._folder):
            are = "is" if bad == 1 else "are"
            return f"{text}: {bad} {are} bad, the first is {line['where']}: {line['error']}."
        if records:
            return f"{text}: the function gave None for each."
        of = listed([file.name for file in self._files], _SHOWN)
        return f"{of}: no record, but one or more are wanted. Name files that hold some."

    def _write(self, shards: Sequence[Planned], columns: list[Column]) -> list[int]:
        """Put the shards into the folder; returns their CRC-32."""
        there, tasks, sums = self._folder.good_shards, list[Task](), dict[int, int]()
        for number, shard in enumerate(shards):
            to = self._folder.path / shard.name
            if shard.name in there:  # its name says which samples it has
                if (known := there[shard.name].crc32) is not None:
                    sums[number] = known
                else:
                    tasks.append(Sum(number, str(to), 0, there[shard.name].bytes))
                continue
            to.unlink(missing_ok=True)
            if shard.whole:
                link(Path(shard.parts[0].file), to)
                sums[number] = shard.crc32
            else:
                tasks.append(Join(number, shard.parts, columns, str(to)))
        found = self._values(tasks, Progress("joined", len(tasks), self._say).step)
        sums |= dict(zip([task.number for task in tasks], found, strict=True))
        return [sums[number] for number in range(len(shards))]

    def _values(self, tasks: Sequence[Task], did: Callable[[], None] = lambda: None) -> list[Any]:
        """What tasks give, by their numbers; `did` is called for each that is done."""
        found: dict[int, Any] = {}
        for done in self._crew.do(tasks):
            found[done.number] = done.value
            did()
        return [found[number] for number in sorted(found)]

    def _publish(
        self, shards: Sequence[Planned], columns: list[Column], sums: Sequence[int]
    ) -> Manifest:
        """Write the manifest, once all that it names is on the disk."""
        self.check_unchanged()
        path = self._folder.path
        sizes = [(path / shard.name).stat().st_size for shard in shards]
        disk = ThreadPoolExecutor(1)  # which writes what is there while samples are hashed
        try:
            synced = [disk.submit(sync, path / shard.name) for shard in shards]
            blocks, sources = self._blocks(shards), self._sources()
            for each in synced:
                each.result()
        finally:
            disk.shutdown(cancel_futures=True)
        samples = sum(shard.samples for shard in shards)
        kept = [msgspec.to_builtins(result) for result in moved(self._results, shards, columns)]
        bad = list(bad_records([*self._before, *self._results], self._folder))
        self.first_bad = [f"{line['where']}: {line['error']}" for line in bad[:_SHOWN]]
        self.together = standing_together(self._results, columns)
        manifest = Manifest(
            columns=columns,
            samples=samples,
            bytes=sum(sizes),
            sha256=digest_of(columns, samples, [blocks]),
            bad=len(bad),
            shards=[
                Shard(shard.name, shard.samples, size, crc32)
                for shard, size, crc32 in zip(shards, sizes, sums, strict=True)
            ],
            statistics=figures_of(self._results, columns),
            sources=sources,
            made_by=self._asked.made_by(self._plan),
            blocks=self._folder.keep("blocks", ".sha256", blocks),
            tasks=self._folder.keep("tasks", ".json", json.dumps(kept).encode()),
            bad_file=self._folder.keep("bad", ".jsonl", lines_of(bad)) if bad else "",
        )
        self.check_unchanged()  # since the hashes: else they are of others than the samples
        write_manifest(path, manifest)
        return manifest

    def check_unchanged(self) -> None:
        """Refuse what was made of sources, or with functions, that are others by now.

        Raises:
            DataError: names the file.
        """
        check_sources(self._asked, self._files)
        if [self._asked.decides(), self._asked.exchanges()] != self._decided:
            raise DataError(
                "the file of a function has changed while it was used. Give the same command "
                "again, and leave it as it is meanwhile."
            )

    def _blocks(self, shards: Sequence[Planned]) -> bytes:
        """The digests of all blocks of samples."""
        files = [(str(self._folder.path / shard.name), shard.samples) for shard in shards]
        count = blocks_of(sum(shard.samples for shard in shards))
        cuts = [count * at // _DIGESTED for at in range(_DIGESTED + 1)]
        tasks = [
            Digest(number, files, first, stop)
            for number, (first, stop) in enumerate(pairwise(cuts))
            if stop > first
        ]
        return b"".join(self._values(tasks))

    def _know_files(self, before: Sequence[Source]) -> None:
        """Give raw files the versions that they had, if they are what they were."""
        everything = self._asked.checksums
        self._files = with_versions(self._files, before, self._hashes, all_files=everything)

    def _sources(self) -> list[Source]:
        """The raw files, with a hash of their bytes."""
        return [
            Source(
                file.name,
                file.bytes,
                file.modified_ns,
                found,
                file.state * bool(file.url),
                file.state,
                file.stamp,
                file.version,
            )
            for file, found in zip(self._files, self._hashes(self._files), strict=True)
        ]

    def _hashes(self, files: Sequence[RawFile]) -> list[str]:
        """The hash of the bytes of each file."""
        tasks, of = list[Task](), list[int]()
        for at, file in enumerate(files):
            for path in FORMATS[file.format]().files(file.path):
                size = path.stat().st_size
                for first in range(0, size, SPAN):
                    tasks.append(Sum(len(tasks), str(path), first, min(first + SPAN, size)))
                    of.append(at)
        hashes = [hashlib.sha256() for _ in files]
        for at, crc32 in zip(of, self._values(tasks), strict=True):
            hashes[at].update(crc32.to_bytes(4, "little"))
        return [found.hexdigest() for found in hashes]


def _to_repeat(done: Done) -> Task | None:
    return Again(done.number, done.again) if done.again else None
