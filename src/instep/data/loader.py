"""Batches, ready when the step wants them: the way in to reading data.

A worker says which slices of which epoch it wants; the loader reads a few slices ahead. What
a batch holds depends on the seed and the slice alone (`reading/fetch.py`), and where it is
read is chosen by measuring (`reading/choose.py`). The loader knows nothing of workers and
steps.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from typing import Any, Literal
from weakref import WeakSet

from instep.comm.protocol.messages import Mark
from instep.data.order import AnyOrder, Indices
from instep.data.parts.cut import parts_order
from instep.data.reading.choose import COUNTED, FINGERPRINT, OF_CONTENTS, Handler, choose
from instep.data.reading.fetch import Augment, Collate, Fetch, Slice, length_of
from instep.data.reading.readers import Ahead, Inline, Reader
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.shares import turns_of
from instep.data.reading.template import Say
from instep.data.samples.contents import Record, Selection
from instep.data.samples.fingerprint import Fingerprint
from instep.data.samples.unreadable import Read, Skipped
from instep.data.shard_sizes import shards_or_blocks
from instep.data.torch_loader import LoaderParts
from instep.data.weighted import HowSampled
from instep.data.windowed import Windowed
from instep.job.spec import JobSpec

__all__ = ["Loader", "Read", "Skipped", "Slice"]

_FIRST, _MOST = 16, 4096
"""Samples whose contents are asked for at once: few at first, as they may be slow."""


class Loader:
    """Reads a dataset slice by slice, ahead of training.

    Construct it in the main thread, before process groups, threads and CUDA: it may fork
    loader processes. Construct all loaders before anything is read in this process (`begin`):
    loader processes get the datasets as they are at that moment.

    Args:
        dataset: map-style; see `Fetch` for its batched forms.
        seed: of the job.
        shuffle: the keyed order of each epoch, or the natural order.
        order: instead of either.
        collate: list of samples to batch; torch's `default_collate` if None.
        augment: (sample, generator) to sample, with a generator keyed by
            (seed, epoch, index).
        processes: loader processes; 0 reads in this process, `"auto"` measures.
        unreadable: `"skip"` skips samples that cannot be read, `"stop"` raises.
        name: `training` or `validation`; names what a process was reading when it died.
        marks: samples at which processes have died before.
        worker_init: called in each loader process with its number, before it reads.
        info_dataset: `get_worker_info().dataset` there; the dataset itself if None.
        contents: which samples' contents `read` records in its `record`.
        say: called with a sentence at each fork that failed and is retried.
        tells: whether to call `set_epoch` of the dataset with the epoch of what is read, where no
            loop of the user's does.

    Raises:
        DataError: the dataset is empty or not map-style, or its first sample
            cannot be read and is not to be skipped; without loader processes
            `begin` raises that.
        SpecError: processes are asked for where the system cannot fork.
    """

    mode: Literal["inline", "ahead", "processes"]
    """`inline` reads when asked, `ahead` in one thread, `processes` in forked ones. The user's code
    never runs in a thread beside the one that takes the batches."""
    why: str
    """The measurement or the setting behind `mode`."""

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        shuffle: bool,
        order: AnyOrder | HowSampled | None = None,
        collate: Collate | None = None,
        augment: Augment | None = None,
        processes: int | Literal["auto"] = "auto",
        unreadable: Literal["stop", "skip"] = "stop",
        name: str = "training",
        marks: Iterable[Mark] = (),
        worker_init: Callable[[int], Any] | None = None,
        info_dataset: Any = None,
        contents: Literal["off", "sample", "all"] = "off",
        say: Say = lambda text: None,
        tells: bool = False,
    ) -> None:
        self._fetch = Fetch(
            dataset,
            seed=seed,
            shuffle=shuffle,
            order=order,
            collate=collate,
            augment=augment,
            skip=unreadable == "skip",
            name=name,
            tells=tells,
        )
        self._fetch.mark(marks)
        if contents != "off":
            positions = getattr(self._fetch.order, "samples", self._fetch.samples)
            self._fetch.selection = Selection(positions, seed, contents)
        self.mode, self.why, self._pool = choose(
            self._fetch,
            processes,
            worker_init,
            say,
            dataset if info_dataset is None else info_dataset,
        )
        self._fetch.told.elsewhere = self._pool is not None
        self.skips = unreadable == "skip"
        """Whether samples that cannot be read are skipped."""
        self.agree: Callable[[Slice, Read], Read] = lambda part, read: read
        """Called with each slice that was read; what it returns is handed out."""
        self._asked: Callable[[Slice], Slice] = lambda part: part
        self._open: WeakSet[Generator[Any]] = WeakSet()
        self._ahead: Ahead | None = None  # the newest
        self._closed = False

    @classmethod
    def of_job(
        cls,
        job: JobSpec,
        parts: LoaderParts,
        name: Literal["training", "validation"],
        *,
        order: AnyOrder | HowSampled | None = None,
        processes: int | Literal["auto"] | None = None,
        collate: Collate | None = None,
        augment: Augment | None = None,
        marks: Iterable[Mark] = (),
        contents: Literal["off", "sample", "all"] = "off",
        say: Say,
        tells: bool = False,
    ) -> Loader:
        """The loader of a dataset of a job, by what job and `DataLoader` say.

        Args:
            job: decides the seed, and where the `DataLoader` does not, the processes.
            parts: the dataset, as the user gave it.
            name: only what is trained on is shuffled (`data.order`), augmented and recorded.
            order: of its samples, if it is another than the job's.
            processes: instead of the job's.
            collate: instead of the `DataLoader`'s.
            augment, marks, contents, say, tells: as above; only what is trained on is told.
        """
        train = name == "training"
        how = HowSampled.of(order)
        if isinstance(parts.dataset, AnyStream):
            how = how._replace(order=turns_of(job, parts.dataset.plan))
        elif train and how.order is None and job.data.order == "windowed":
            samples, lanes = length_of(parts.dataset), job.per_commit.micro_batches
            if job.data.parts:
                how = how._replace(order=parts_order(job, parts.dataset))
            else:
                sizes = shards_or_blocks(parts.dataset, samples, job.data.window, lanes)
                how = how._replace(order=Windowed.of_job(job, sizes))
        processes = job.data.loaders if processes is None else processes
        if processes == "auto" and parts.loaders is not None:
            processes = parts.loaders
        return cls(
            parts.dataset,
            seed=job.seed,
            shuffle=train and job.data.shuffled,
            order=how,
            collate=collate or parts.collate,
            augment=augment if train else None,
            processes=processes,
            unreadable=job.data.unreadable,
            name=name,
            marks=marks,
            worker_init=parts.worker_init,
            info_dataset=parts.info_dataset,
            contents=contents if train else "off",
            say=say,
            tells=tells and train,
        )

    def begin(self) -> None:
        """Read the first sample, where samples will be read; all loaders have been made.

        Raises:
            DataError: it cannot be read, and is not to be skipped.
        """
        if self._pool is None:
            self._fetch.first()

    def fingerprint(self) -> Fingerprint:
        """What the dataset is recognised by; read where samples are read."""
        return Fingerprint.from_plain(self.ask(FINGERPRINT))

    def counted(self) -> str:
        """Find what each reading of the same sample changes in Python: its name, or empty."""
        return str(self.ask(COUNTED))

    def contents(
        self, most_s: float, clock: Callable[[], float] = time.perf_counter
    ) -> list[tuple[int, int]]:
        """(index, content) of the samples that can be read in a time: all, or a keyed choice."""
        began, done, found = clock(), 0, list[tuple[int, int]]()
        while done < self.samples and (not done or clock() - began < most_s):
            stop = min(2 * done + _FIRST, done + _MOST, self.samples)
            found += [(each[0], each[1]) for each in self.ask(Slice(OF_CONTENTS, done, stop))]
            done = stop
        return found

    def ask(self, part: Slice) -> Any:
        """Answer what is asked in place of a slice, where samples are read."""
        pool = self._pool
        return pool.take(pool.submit(part)) if pool else Handler(self._fetch)(part)

    @property
    def order(self) -> AnyOrder | None:
        """Of the samples in each epoch; None for the natural one."""
        return self._fetch.order

    @property
    def samples(self) -> int:
        """Length of the dataset."""
        return self._fetch.samples

    @property
    def cpu_s(self) -> float:
        """CPU seconds that the thread which reads ahead has used; any thread may call it."""
        ahead = self._ahead
        return ahead.cpu_s if ahead is not None else 0.0

    @property
    def pids(self) -> list[int]:
        """Process numbers of the loader processes; none in the other modes."""
        return self._pool.pids if self._pool else []

    def put_in_place(self, asked: Callable[[Slice], Slice] = lambda part: part) -> None:
        """Let a function say what `read` reads in the place of a slice."""
        self._asked = asked

    def mark(self, marks: Iterable[Mark]) -> None:
        """Skip samples, or read them alone, from the next `read` on (`Fetch.mark`)."""
        self._fetch.mark(marks)

    def tell(self, epoch: int) -> None:
        """Tell the dataset of this process the epoch of what it trains on, wherever that is read.

        `read` does so too before it hands out a slice.
        """
        if self._fetch.told.tells:
            self._fetch.told.tell(epoch)

    def read(self, slices: Iterable[Slice], record: Record | None = None) -> Generator[Read]:
        """The batch of each slice, in order, and which of its samples were skipped.

        Closing the generator ends the reading ahead; so does `close`.

        Args:
            slices: iterated in the caller's thread, a few ahead.
            record: takes the contents of samples as they are handed out.

        Raises:
            DataError: at the batch that could not be made, naming the sample,
                the cause and the user's line.
        """
        assert not self._closed, "the loader is closed"
        reads = self._reads(slices, record)
        self._open.add(reads)
        return reads

    def read_without(self, part: Slice, skipped: Iterable[Skipped]) -> Read:
        """Read a slice without some samples, whether they can be read or not; `agree` is not asked.

        Raises:
            DataError: as `read`.
        """
        reader = self._pool or Inline(self._fetch)
        with self._fetch.without(skipped):
            read, _ = self._taken(reader, part, reader.submit(part))
        return read

    def indices(self, part: Slice) -> Indices:
        """The samples of a slice, [stop - first] int64, in their order."""
        return self._fetch.indices(part)

    def close(self) -> None:
        """End all reading ahead, and wait for it; a second call does nothing."""
        self._closed = True
        for reads in list(self._open):
            reads.close()
        if self._pool:
            self._pool.close()

    def _reads(self, slices: Iterable[Slice], record: Record | None) -> Generator[Read]:
        reader = self._reader()
        waiting: deque[tuple[Slice, Any]] = deque()
        try:
            for part in map(self._asked, slices):
                waiting.append((part, None if part.first == part.stop else reader.submit(part)))
                if len(waiting) > reader.ahead:
                    self._listen(reader, waiting)
                    yield self._agreed(reader, *waiting.popleft(), record)
            while waiting:
                self._listen(reader, waiting)
                yield self._agreed(reader, *waiting.popleft(), record)
        finally:
            reader.drop(ticket for _, ticket in waiting if ticket is not None)
            if reader is not self._pool:
                reader.close()

    def _listen(self, reader: Reader, waiting: deque[tuple[Slice, Any]]) -> None:
        """Read again what was read ahead, if the dataset has been told something since."""
        if reader is not self._pool or not self._fetch.told.look():
            return
        reader.drop(ticket for _, ticket in waiting if ticket is not None)
        again = [
            (part, None if ticket is None else reader.submit(part)) for part, ticket in waiting
        ]
        waiting.clear()
        waiting.extend(again)

    def _reader(self) -> Reader:
        if self._pool:
            return self._pool
        if self.mode == "ahead":
            self._ahead = Ahead(self._fetch)
            return self._ahead
        return Inline(self._fetch)

    def _agreed(self, reader: Reader, part: Slice, ticket: Any, record: Record | None) -> Read:
        if ticket is None:
            return Read(None, 0)
        read, contents = self._taken(reader, part, ticket)
        self.tell(part.epoch)
        if contents and record is not None:
            record.add(part.epoch, contents)
        return self.agree(part, read)

    def _taken(self, reader: Reader, part: Slice, ticket: Any) -> tuple[Read, list[Any]]:
        """What was read, and contents of some samples."""
        batch, missed, contents = reader.take(ticket)
        skipped = tuple(Skipped(*each) for each in missed)
        return Read(batch, self._fetch.size(part) - len(skipped), skipped), contents
