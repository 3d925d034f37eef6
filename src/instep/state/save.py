"""Put state on disk while training goes on.

Training is held only while tensors are copied into staging memory, which is
laid out as the files will be and used again by the next save. A thread hashes
and writes it into a folder beside the checkpoints, syncs that to the disk,
and publishes it by one rename: whatever is killed when, a checkpoint is whole
or not there. A save that comes while one is being written waits for it, so
that every checkpoint asked for is written, and the newest one on disk is at
most one save behind; the wait counts as held.

It knows no collectives: one process of a run holds the writer of a folder.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import operator
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.formats import INSTEP
from instep.state import manifest as page
from instep.state.model_file import BLANK, KEY
from instep.state.retain import to_delete
from instep.state.retention import Best, facts_of, measured
from instep.state.snapshot import (
    DTYPES,
    RESERVED,
    Skeleton,
    Snapshot,
    check_tensor,
    model_tensors,
    tied_names,
)
from instep.units import readable_bytes

SAVING = ".saving-"
RESERVE_BYTES = 1_000_000
"""What a file of ours leaves free on the disk, for records of steps and for logs."""

_CHUNK_BYTES = 1 << 24
_DTYPE_AND_SHAPE = operator.attrgetter("dtype", "shape")


class Saved(NamedTuple):
    """One checkpoint that is safely on disk."""

    step: int
    path: Path
    size_bytes: int
    held_s: float
    """How long training stood still."""
    seconds: float
    """From the moment it was asked for until it was published."""


class CheckpointWriter:
    """Writes the checkpoints of one run, one at a time, in the background.

    Args:
        folder: where they go; created if missing. What a killed run left half
            written or half deleted there is cleared away.
        keep_last: how many to keep; older ones go once a newer one is whole.
        keep_every: above 0, those of its multiples are kept for good.
        best: which did best in validation; they are kept as well.
        builds_on: files without which a checkpoint is worth nothing, if they are there:
            they are on the disk before it counts, even if the host crashes.
        may_publish: asked, in the background, when one has been written; one that may
            not be published is not saved.

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
        builds_on: Sequence[Path] = (),
        may_publish: Callable[[], bool] = lambda: True,
    ) -> None:
        self._folder, self._keep_last, self._keep_every = folder, keep_last, keep_every
        self._best, self._builds_on = best, tuple(builds_on)
        self._may_publish = may_publish
        self._staged: dict[str, _Staged] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None
        self._outcomes: SimpleQueue[Saved | Exception] = SimpleQueue()
        self._held_s: dict[int, float] = {}
        try:
            folder.mkdir(exist_ok=True)  # the run folder is not made anew
            _clear_left_overs(folder)
        except OSError as error:
            raise CheckpointError(
                f"checkpoints cannot be kept in {folder}: {page.reason(error)}."
            ) from error
        self._values = measured(folder, best) if best else {}
        self._known = {_inode(path) for _, path in page.published(folder)}

    def is_best(self, step: int, metrics: Mapping[str, float] | None) -> bool:
        """Whether a step with these figures would be one of the best there are so far."""
        value = self._best.value(facts_of(metrics)) if self._best else None
        if self._best is None or value is None:
            return False
        before = {known: each for known, each in self._values.copy().items() if known < step}
        return step in self._best.choose(before | {step: value})

    def forget_after(self, step: int) -> None:
        """Checkpoints of later steps have been set aside: none of them is the best any more.

        To be called after `finish`.
        """
        self._values = {known: value for known, value in self._values.items() if known <= step}

    def save(self, snapshot: Snapshot, *, since: float | None = None) -> float:
        """Copy the state now, write it later; waits first for the save before.

        Args:
            snapshot: the state; it may change as soon as this returns.
            since: of `perf_counter`, when training stopped for it; else now.

        Returns:
            Seconds for which training was held.

        Raises:
            CheckpointError: the snapshot holds what no checkpoint can. What
                goes wrong while writing is told by `poll`.
        """
        begin = time.perf_counter() if since is None else since
        self._wait()
        facts = _plain_facts(snapshot.facts)
        self._stage(snapshot.tensors)
        if self._worker is None:  # stays until finish(): starting a thread takes time
            self._worker = ThreadPoolExecutor(1, "checkpoint", initializer=_yield_to_others)
        self._note_value(snapshot)
        self._writing = self._worker.submit(self._write, snapshot.step, facts, begin)
        held_s = self._held_s[snapshot.step] = time.perf_counter() - begin
        return held_s

    def poll(self) -> list[Saved | Exception]:
        """How the saves since the last call went, in their order; never waits.

        Returns:
            What was published, and for each that could not be written, or not in full,
            a `CheckpointError`, whose `__cause__` is the `OSError`. Training may go on after
            one: the checkpoints before are untouched, and the next save tries again. Any
            other error is a bug.
        """
        outcomes: list[Saved | Exception] = []
        while not self._outcomes.empty():
            outcome = self._outcomes.get()
            if isinstance(outcome, Saved):
                # only this thread knows how long it was held: the other may be done before
                outcome = outcome._replace(held_s=self._held_s.pop(outcome.step, 0.0))
            outcomes.append(outcome)
        return outcomes

    def finish(self) -> None:
        """Wait for what is being written; how that went is told by `poll`."""
        self._wait()
        if self._worker is not None:
            self._worker.shutdown()
            self._worker = None

    def _wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _note_value(self, snapshot: Snapshot) -> None:
        """Remember how well this step did; what lies beyond it is no part of this course."""
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
                staged = None  # gives its memory back before the new is taken
                staged = _Staged(tensors, {})
            staged.copy(tensors)
            self._staged[name] = staged

    def _write(self, step: int, facts: dict[str, Any], begin: float) -> None:
        """What the background thread does: one checkpoint, one outcome."""
        final = self._folder / page.folder_name(step)
        try:
            with _folder_beside(final) as beside:
                size = self._write_files(beside, step, facts)
                if not self._may_publish():  # what stands beside is for whoever may
                    text = f"the checkpoint of step {step} was not saved: others may save by now."
                    self._outcomes.put(CheckpointError(text))
                    return
                _publish(beside, final)
                self._known.add(_inode(final))
        except OSError as error:
            self._values.pop(step, None)
            unsaved = CheckpointError(
                f"the checkpoint of step {step} was not saved in {self._folder}: "
                f"{page.reason(error)}. Those before it are untouched."
            )
            unsaved.__cause__ = error
            self._outcomes.put(unsaved)
            return
        except Exception as error:  # our bug: it must not die unseen with the thread
            self._outcomes.put(error)
            return
        seconds = time.perf_counter() - begin
        self._outcomes.put(Saved(step, final, size, 0.0, seconds))
        try:
            self._retain(step)
        except (OSError, CheckpointError) as error:
            why = page.reason(error) if isinstance(error, OSError) else str(error).rstrip(".")
            self._outcomes.put(
                CheckpointError(
                    f"the checkpoint of step {step} is saved, but older ones could not be "
                    f"deleted from {self._folder}: {why}."
                )
            )

    def _retain(self, current: int) -> None:
        """Delete what need not be kept, now that the checkpoint of `current` is whole."""
        found = [
            (step, path)  # what another writer has published since is none of this one's business
            for step, path in page.published(self._folder)
            if step <= current or _inode(path) in self._known
        ]
        steps = {step for step, _ in found}
        values = {step: value for step, value in self._values.items() if step in steps}
        doomed = to_delete(
            steps,
            current=current,
            keep_last=self._keep_last,
            keep_every=self._keep_every,
            keep_best=self._best.choose(values) if self._best else (),
        )
        plain = {path.name for _, path in found}
        for step, path in found:
            replaced = path.name.endswith(page.REPLACED) and page.folder_name(step) in plain
            if step in doomed or replaced:
                _delete(path)

    def _write_files(self, beside: Path, step: int, facts: dict[str, Any]) -> int:
        """Fill the folder `beside` and sync it; returns its size in bytes."""
        try:
            size = self._fill(beside, step, facts)
            for file in filter(Path.exists, self._builds_on):
                _sync_path(file)
                _sync_path(file.parent)
        except OSError:
            if self._may_publish():
                shutil.rmtree(beside, ignore_errors=True)
            raise
        return size

    def _fill(self, beside: Path, step: int, facts: dict[str, Any]) -> int:
        _check_room(beside, sum(staged.size_bytes for staged in self._staged.values()))
        files = {}
        for name, staged in self._staged.items():
            with (beside / name).open("wb") as file:
                files[name] = staged.write(file)
        text = page.encode(
            page.Manifest(
                step=step,
                instep=INSTEP,
                torch=str(torch.__version__),
                files=files,
                facts=facts,
            )
        )
        with (beside / page.MANIFEST).open("wb") as file:
            file.write(text)
            _sync(file)
        _sync_path(beside)
        return len(text) + sum(entry.size_bytes for entry in files.values())


def save_model(path: Path, model: nn.Module, metadata: Mapping[str, str]) -> int:
    """Write parameters and persistent buffers as one safetensors file, whole or not at all.

    Tied weights are kept once; the other names stand in the metadata, each
    with the name that is kept, as `safetensors.torch.load_model` expects it. The
    metadata has the file's own hash as well, for whoever reads it (`recorded.py`).

    Args:
        metadata: plain strings for the file's header; `format` is set to `pt`.

    Returns:
        The file's size in bytes.

    Raises:
        CheckpointError: the model cannot be kept, or the file not be written.
    """
    tensors = model_tensors(model)
    staged = _Staged(tensors, {"format": "pt", **metadata, KEY: BLANK})
    staged.copy(tensors)
    beside = path.with_name(f"{SAVING}{path.name}")
    try:
        _check_room(path.parent, staged.size_bytes)
        with beside.open("wb") as file:
            entry = staged.write(file)
            file.seek(staged.place_of(f'"{KEY}":"') + len(KEY) + 4)
            file.write(entry.sha256.encode("ascii"))
            _sync(file)
        beside.rename(path)
        _sync_path(path.parent)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise CheckpointError(f"{path} was not saved: {page.reason(error)}.") from error
    return entry.size_bytes


class _Staged:
    """One file to be: its safetensors header, and memory laid out as its data.

    The format: header length (8 bytes, little-endian), header (JSON, padded
    with spaces to 8 bytes), then the tensors without gaps. Wider types come
    first, so that every tensor starts at a multiple of its item size.
    """

    def __init__(self, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        for name, tensor in tensors.items():
            check_tensor(tensor, f"the tensor {name!r}")
            if name == RESERVED:
                raise CheckpointError(f"a tensor is called {RESERVED!r}: safetensors forbids it.")
        self._kinds, self._tied = _kinds(tensors), tied_names(tensors)
        self._forms = _forms(tensors)
        kept = {name: tensor for name, tensor in tensors.items() if name not in self._tied}
        spans = _spans(kept)
        self._header = _header(kept, spans, metadata | self._tied)
        self._devices = {tensor.device for tensor in kept.values() if tensor.is_cuda}
        size = max((stop for _, stop in spans.values()), default=0)
        # pinned memory lets a GPU copy by itself, at the full rate of the bus
        self._data = torch.empty(size, dtype=torch.uint8, pin_memory=bool(self._devices))
        self._places = {
            name: self._data[start:stop].view(kept[name].dtype).view(kept[name].shape)
            for name, (start, stop) in spans.items()
        }

    @property
    def size_bytes(self) -> int:
        """How large the file will be."""
        return len(self._header) + len(self._data)

    def place_of(self, text: str) -> int:
        """Where in the file a piece of the header stands."""
        return self._header.index(text.encode("ascii"))

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether names, types, shapes and ties are still those laid out for."""
        try:
            forms = _forms(tensors)
        except (RuntimeError, NotImplementedError):  # no dense tensor any more
            return False
        if forms == self._forms and self._ties_hold(tensors):
            return True  # the very same memory: the common case, and the quick one
        self._forms = forms
        return self._kinds == _kinds(tensors) and self._tied == tied_names(tensors)

    def _ties_hold(self, tensors: Mapping[str, Tensor]) -> bool:
        names = [*self._tied, *self._tied.values()]
        return not names or tied_names({n: tensors[n] for n in tensors if n in names}) == self._tied

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the values; when it returns, `tensors` may change."""
        if self._places and not self._devices:
            values = [tensors[name] for name in self._places]
            torch._foreach_copy_(list(self._places.values()), values)
            return
        for name, place in self._places.items():
            place.copy_(tensors[name], non_blocking=True)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()

    def write(self, file: IO[bytes]) -> page.FileEntry:
        """Write header and data, sync them to the disk, and say what was written."""
        digest = hashlib.sha256()
        data: memoryview[Any] = self._data.numpy().data
        pieces: list[bytes | memoryview[Any]] = [self._header]
        pieces += [data[at : at + _CHUNK_BYTES] for at in range(0, len(data), _CHUNK_BYTES)]
        for piece in pieces:  # both calls let other threads run meanwhile
            digest.update(piece)
            file.write(piece)
        _sync(file)
        return page.FileEntry(self.size_bytes, digest.hexdigest())


def _kinds(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size, Any]]:
    return {name: (t.dtype, t.shape, t.device) for name, t in tensors.items()}


def _forms(tensors: Mapping[str, Tensor]) -> tuple[list[Any], ...]:
    """What tells a layout, gathered at the speed of C: a save in training passes here."""
    values = [*tensors.values()]
    return (
        [*tensors],
        [*map(Tensor.data_ptr, values)],
        [*map(_DTYPE_AND_SHAPE, values)],
    )


def _spans(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Name to [start, stop) in bytes of the data, in the order of the data."""
    spans: dict[str, tuple[int, int]] = {}
    stop = 0
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        start, stop = stop, stop + tensors[name].nbytes
        spans[name] = (start, stop)
    return spans


def _header(
    tensors: Mapping[str, Tensor], spans: Mapping[str, tuple[int, int]], metadata: dict[str, str]
) -> bytes:
    header: dict[str, Any] = {RESERVED: metadata} if metadata else {}
    for name, span in spans.items():
        header[name] = {
            "dtype": DTYPES[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": span,
        }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _plain_facts(facts: dict[str, Any]) -> dict[str, Any]:
    """A copy of `facts` that later changes cannot reach, if it is JSON and nothing else."""
    skeletons = {key: fact for key, fact in facts.items() if type(fact) is Skeleton}
    facts = {key: fact for key, fact in facts.items() if key not in skeletons}
    try:
        copy: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(facts))
        if copy == facts:
            return copy | skeletons
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError):
        pass  # it cannot say what is wrong, and knows no integers beyond 64 bits
    return _plain_facts_or_why(facts) | skeletons


def _plain_facts_or_why(facts: dict[str, Any]) -> dict[str, Any]:
    try:
        copy = json.loads(json.dumps(facts, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"the facts of a snapshot are not plain JSON: {error}.") from error
    if copy != facts:
        wrong = next(key for key in facts if key not in copy or copy[key] != facts[key])
        raise CheckpointError(
            f"facts[{wrong!r}] would not come back from JSON as it is (a tuple, or a number "
            "as a key?): put it through pack_state()."
        )
    return dict(copy)


def _publish(beside: Path, final: Path) -> None:
    """Give the folder its name; an earlier checkpoint of the same step makes way.

    That one stays readable under its other name until the new one has come.
    """
    if final.exists():
        old = final.with_name(final.name + page.REPLACED)
        if old.exists():
            _delete(old)
        final.rename(old)
    beside.rename(final)
    _sync_path(final.parent)


def _delete(checkpoint: Path) -> None:
    """Delete a folder so that no half of it ever carries the name of a checkpoint."""
    doomed = checkpoint.with_name(page.DELETING + checkpoint.name)
    if doomed.exists():
        shutil.rmtree(doomed)
    checkpoint.rename(doomed)
    shutil.rmtree(doomed)


def _inode(path: Path) -> int:
    """What tells one folder from another of its name; 0 where it is gone."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return 0


@contextmanager
def _folder_beside(final: Path) -> Iterator[Path]:
    """An empty folder to write in, whose lock keeps others away as long as this process lives.

    A writer before this one may still be at one of its own, for the same step even.
    """
    for number in count(1):
        more = f"-{number}" if number > 1 else ""
        beside = final.with_name(f"{SAVING}{final.name}{more}")
        with suppress(FileExistsError):  # somebody may have taken all checkpoints away
            final.parent.mkdir()  # but a run folder is not made anew
        beside.mkdir(exist_ok=True)
        try:
            descriptor = os.open(beside, os.O_RDONLY)
        except FileNotFoundError:  # cleared away before it was locked
            continue
        try:
            if _locked(descriptor) and beside.exists():
                for left in os.scandir(beside):
                    os.unlink(left)
                yield beside
                return
        finally:
            with suppress(OSError):  # a process that was forked meanwhile has it open, too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Whether a folder's lock could be taken; True where the file system knows none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _is_in_use(path: Path) -> bool:
    """Whether a living writer is at it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return not _locked(descriptor)
    finally:
        os.close(descriptor)


def _clear_left_overs(folder: Path) -> None:
    for name in os.listdir(folder):
        if name.startswith((SAVING, page.DELETING)):
            path = folder / name
            with suppress(FileNotFoundError):  # whoever was at it is done with it by now
                if not path.is_dir():
                    path.unlink()
                elif not _is_in_use(path):
                    shutil.rmtree(path)
    for step, path in list(page.published(folder)):
        if path.name.endswith(page.REPLACED):
            plain = folder / page.folder_name(step)
            if plain.exists():
                _delete(path)
            else:
                path.rename(plain)


def _check_room(folder: Path, size_bytes: int) -> None:
    """Refuse to fill the disk: the ledger, without which nothing can be committed, is on it too.

    Raises:
        OSError: ENOSPC, as if it had been tried.
    """
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if disk.f_blocks and free < size_bytes + RESERVE_BYTES:  # some file systems do not tell
        raise OSError(
            errno.ENOSPC,
            f"{readable_bytes(size_bytes + RESERVE_BYTES)} are needed, {readable_bytes(free)} are "
            "free",
        )


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_path(path: Path) -> None:
    """Sync a file or a folder, whoever writes it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _yield_to_others() -> None:
    """Have this thread never push training off its core; its share of the cores stays whole.

    A lower priority instead would let it be held up for long, at times with the
    interpreter's lock in its hands.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):  # where a sandbox forbids it, nothing is lost but a little time
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0 is the calling thread
