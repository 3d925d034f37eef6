"""Write checkpoints to the disk while training continues.

Training is held only while tensors are copied into staging memory (`staging.py`), which the
next save uses again. A thread hashes and writes it into a folder beside the checkpoints,
syncs that to the disk, and publishes it by one rename: whatever is killed when, a checkpoint
is complete or not there. A save that comes while one is being written waits for it, so every
checkpoint that was asked for is written, and the newest on disk is at most one save behind;
the wait counts as held. Where the system gives no thread, training is held until it is written.

It knows no collectives: one process of a run has the writer of a folder. Files that others have
written for a checkpoint become a part of it by a rename as well.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.formats import INSTEP
from instep.state.files import manifest as page
from instep.state.files.room import RESERVE_BYTES, check_room
from instep.state.files.staging import SAVING, StagedFile, sync, sync_path
from instep.state.retention import Best, facts_of, metric_values, to_delete
from instep.state.save_files import (
    _delete_leftovers,
    _folder_beside,
    _never_preempt,
    _plain_facts,
    delete,
    inode,
    publish,
)
from instep.state.snapshot import Snapshot


class Saved(NamedTuple):
    """One checkpoint that is on the disk."""

    step: int
    path: Path
    size_bytes: int
    held_s: float
    """How long training was held."""
    seconds: float
    """From the call of `save` until it was published."""


class CheckpointShard(NamedTuple):
    """One file of a checkpoint, which another process has written."""

    path: Path
    """In the folder of checkpoints, beside them; its name begins with `SAVING`."""
    entry: page.FileEntry


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, in the background.

    Args:
        folder: where they go; created if missing. What a killed run left half
            written or half deleted there is deleted.
        keep_last: how many to keep; older ones are deleted once a newer one is complete.
        keep_every: above 0, those of its multiples are kept for good.
        best: the rule for the best in validation, which are kept as well.
        sync_first: files without which a checkpoint is useless, if they exist: they are
            synced to the disk before it is published, in case the host crashes.
        may_publish: called in the background when one has been written; if it returns
            False, the checkpoint is not published.

    Raises:
        CheckpointError: the folder cannot be made or cleared.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep_last: int = 2,
        keep_every: int = 0,
        best: Best | None = None,
        sync_first: Sequence[Path] = (),
        may_publish: Callable[[], bool] = lambda: True,
    ) -> None:
        self._folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._best, self._sync_first = best, tuple(sync_first)
        self._may_publish = may_publish
        self._staged: dict[str, StagedFile] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._outcomes: SimpleQueue[Saved | Exception] = SimpleQueue()
        self._held_s: dict[int, float] = {}
        self._reserve = RESERVE_BYTES
        try:
            folder.mkdir(exist_ok=True)  # no parents: a missing run folder is an error
            _delete_leftovers(folder)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {folder}: {page.reason(error)}."
            ) from error
        self._values = metric_values(folder, best) if best else {}
        self._known = {inode(path) for _, path in page.published(folder)}

    def is_best(self, step: int, metrics: Mapping[str, float] | None) -> bool:
        """Whether a step with these metrics would be one of the best so far."""
        value = self._best.value(facts_of(metrics)) if self._best else None
        if self._best is None or value is None:
            return False
        before = {known: each for known, each in self._values.copy().items() if known < step}
        return step in self._best.choose(before | {step: value})

    def forget_after(self, step: int) -> None:
        """Checkpoints of later steps were discarded: none of them is the best any more.

        Call it after `finish`.
        """
        self._values = {known: value for known, value in self._values.items() if known <= step}

    def save(
        self,
        snapshot: Snapshot,
        *,
        since: float | None = None,
        shards: Mapping[str, CheckpointShard] = MappingProxyType({}),
        reserve: int = RESERVE_BYTES,
    ) -> float:
        """Copy the state now, write it later; waits first for the previous save.

        Args:
            snapshot: the state; it may change as soon as this returns.
            since: the `perf_counter` at which training stopped for it; else now.
            shards: groups of it that other processes have written, synced; the files are moved.
            reserve: bytes that are left free on the disk.

        Returns:
            Seconds for which training was held.

        Raises:
            CheckpointError: the snapshot holds what no checkpoint can. Errors of
                writing are returned by `poll`.
        """
        begin = time.perf_counter() if since is None else since
        self._wait()
        facts = _plain_facts(snapshot.facts)
        self._stage(snapshot.tensors)
        if shards:
            self._delete_others(shards)
        if self._worker is None:  # stays until finish(): starting a thread takes time
            self._worker = ThreadPoolExecutor(1, "checkpoint", initializer=_never_preempt)
        self._record_value(snapshot)
        self._reserve = reserve
        try:
            write = self._worker.submit
            self._writing = write(self._write, snapshot.step, facts, begin, dict(shards))
        except RuntimeError:  # the system has no thread for us now; the next save asks again
            self._worker = None
            self._write(snapshot.step, facts, begin, shards)
        held_s = self._held_s[snapshot.step] = time.perf_counter() - begin
        return held_s

    def poll(self) -> list[Saved | Exception]:
        """The outcomes of the saves since the last call, in their order; never waits.

        Returns:
            What was published, and for each that could not be written, or not in full,
            a `CheckpointError`, whose `__cause__` is the `OSError`. Training may continue:
            earlier checkpoints are untouched, and the next save tries again. Any other
            error is a bug.
        """
        outcomes: list[Saved | Exception] = []
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if isinstance(outcome, Saved):
                # only this thread knows how long it was held: the other may finish first
                outcome = outcome._replace(held_s=self._held_s.pop(outcome.step, 0.0))
            outcomes.append(outcome)
        return outcomes

    def finish(self) -> None:
        """Wait for what is being written; `poll` returns the outcome."""
        self._wait()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _delete_others(self, shards: Mapping[str, CheckpointShard]) -> None:
        """Delete files that were written for a checkpoint which never came to be."""
        kept = {shard.path for shard in shards.values()}
        for path in self._folder.glob(f"{SAVING}*"):
            if path not in kept and path.is_file():
                path.unlink(missing_ok=True)

    def _record_value(self, snapshot: Snapshot) -> None:
        """Remember the metric of this step; later steps are from before the run went back."""
        if self._best is None:
            return
        step = snapshot.step
        self._values = {known: each for known, each in self._values.items() if known < step}
        if (value := self._best.value(snapshot.facts)) is not None:
            self._values[step] = value

    def _stage(self, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
        before, self._staged = self._staged, {}
        for group, tensors in groups.items():
            name = page.file_name(group)
            staged = before.pop(name, None)
            if staged is None or not staged.fits(tensors):
                staged = None  # releases its memory before the new is taken
                staged = StagedFile(tensors, {})
            staged.copy(tensors)
            self._staged[name] = staged

    def _write(
        self, step: int, facts: dict[str, Any], begin: float, shards: Mapping[str, CheckpointShard]
    ) -> None:
        """Runs in the background thread: one checkpoint, one outcome."""
        final = self._folder / page.folder_name(step)
        try:
            with _folder_beside(final) as beside:
                size = self._write_files(beside, step, facts, shards)
                if not self._may_publish():  # the next writer deletes what was written
                    text = (
                        f"the checkpoint of step {step} was not saved: another worker saves by now."
                    )
                    self._outcomes.put(CheckpointError(text))
                    return
                publish(beside, final)
                self._known.add(inode(final))
        except OSError as error:
            for shard in shards.values():
                shard.path.unlink(missing_ok=True)
            self._values.pop(step, None)
            unsaved = CheckpointError(
                f"the checkpoint of step {step} was not saved in {self._folder}: "
                f"{page.reason(error)}. Earlier ones are untouched."
            )
            unsaved.__cause__ = error
            self._outcomes.put(unsaved)
            return
        except Exception as error:  # our bug: it must not be lost with the thread
            self._outcomes.put(error)
            return
        seconds = time.perf_counter() - begin
        self._outcomes.put(Saved(step, final, size, 0.0, seconds))
        try:
            self._delete_old(step)
        except (OSError, CheckpointError) as error:
            why = page.reason(error) if isinstance(error, OSError) else str(error).rstrip(".")
            self._outcomes.put(
                CheckpointError(
                    f"the checkpoint of step {step} is saved, but older ones could not be "
                    f"deleted from {self._folder}: {why}."
                )
            )

    def _delete_old(self, current: int) -> None:
        """Delete what need not be kept, now that the checkpoint of `current` is complete."""
        found = [
            (step, path)  # another writer may have published later ones: they are not ours
            for step, path in page.published(self._folder)
            if step <= current or inode(path) in self._known
        ]
        steps = {step for step, _ in found}
        values = {step: value for step, value in self._values.items() if step in steps}
        obsolete = to_delete(
            steps,
            current=current,
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            keep_best=self._best.choose(values) if self._best else (),
        )
        plain = {path.name for _, path in found}
        for step, path in found:
            replaced = path.name.endswith(page.REPLACED) and page.folder_name(step) in plain
            if step in obsolete or replaced:
                delete(path)

    def _write_files(
        self, beside: Path, step: int, facts: dict[str, Any], shards: Mapping[str, CheckpointShard]
    ) -> int:
        """Fill the folder `beside` and sync it; returns its size in bytes."""
        try:
            size = self._fill(beside, step, facts, shards)
            for file in filter(Path.exists, self._sync_first):
                sync_path(file)
                sync_path(file.parent)
        except OSError:
            if self._may_publish():
                shutil.rmtree(beside, ignore_errors=True)
            raise
        return size

    def _fill(
        self, beside: Path, step: int, facts: dict[str, Any], shards: Mapping[str, CheckpointShard]
    ) -> int:
        size = sum(staged.size_bytes for staged in self._staged.values())
        check_room(beside, size, self._reserve)
        files = {}
        for name, staged in self._staged.items():
            with (beside / name).open("wb") as file:
                files[name] = staged.write(file)
        for group, shard in shards.items():
            name = page.file_name(group)
            shard.path.rename(beside / name)
            files[name] = shard.entry
        text = page.encode(
            page.CheckpointManifest(
                step=step,
                instep=INSTEP,
                torch=str(torch.__version__),
                files=files,
                facts=facts,
            )
        )
        with (beside / page.MANIFEST).open("wb") as file:
            file.write(text)
            sync(file)
        sync_path(beside)
        return len(text) + sum(entry.size_bytes for entry in files.values())
