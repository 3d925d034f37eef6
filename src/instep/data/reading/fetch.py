"""From a slice of an epoch to a batch: a function of (seed, epoch, positions) only.

Random values are keyed by sample, so the same slice gives the same batch in any process, at
any attempt. This file knows no threads and no processes: readers run a `Fetch` wherever they
like.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.comm.protocol.messages import Mark
from instep.data.order import AnyOrder, Indices, Order, key
from instep.data.reading import generators
from instep.data.reading.batched import (
    batch_reader,
    collate_by_torch,
    file_names,
    first_mismatch,
    is_plain,
    offers,
    places_in_whole,
)
from instep.data.reading.noticed import objects_of
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.told import Told
from instep.data.samples import last_read
from instep.data.samples.contents import Selection, SliceContents, content_of
from instep.data.samples.unreadable import (
    SKIP_HINT,
    Skipped,
    describe_error,
    read_with_retries,
)
from instep.data.weighted import HowSampled, SampleWeights, with_weights
from instep.errors import DataError, RunError
from instep.usercode.counts import Counts
from instep.words import listed

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, torch.Generator], Any]
Missed = list[tuple[int, str]]
"""Samples that were skipped, each with its cause, as plain data that travels between processes."""
Fetched = tuple[Any, Missed, list[list[int]]]
"""What came of a slice: the batch, what was skipped, index and content (`contents.py`) of some."""

_OF_AUGMENT, _OF_GLOBALS, _OF_CONTENTS = 0, 1, 23
_AGAIN = 40
"""Bits of a number by which draws are keyed: the epoch below, how often before in it above."""


class Slice(NamedTuple):
    """Positions [first, stop) of an epoch's order."""

    epoch: int
    first: int
    stop: int


class Fetch:
    """Reads slices of one dataset.

    Args:
        dataset: map-style: `dataset[index]` and `len(dataset)`. One that has
            `__getitems__(indices) -> list of samples`, or `batch_of(indices
            [count] int64 array) -> batch`, is asked for many samples at once.
        seed: of the job.
        shuffle: keyed order, or else the natural one.
        order: instead of either: the samples at positions of an epoch; or how they are sampled.
        collate: list of samples to batch; torch's `default_collate` if None.
        augment: (sample, generator) to sample; the generator is keyed by
            (seed, epoch, index).
        skip: skip a sample that cannot be read; else it is an error.
        name: `training` or `validation`; the process records its reads under it.
        tells: whether to tell the dataset each epoch (`Told.tell`).

    Raises:
        DataError: `dataset` is not map-style, or is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        shuffle: bool,
        order: AnyOrder | HowSampled | None = None,
        collate: Collate | None = None,
        augment: Augment | None = None,
        skip: bool = False,
        name: str = "training",
        tells: bool = False,
    ) -> None:
        self._as_made = partial(
            Fetch,
            dataset,
            seed=seed,
            shuffle=shuffle,
            order=order,
            collate=collate,
            augment=augment,
            skip=skip,
            name=name,
            tells=tells,
        )
        self.samples = length_of(dataset)
        self.name, self._file_of = name, file_names(dataset)
        self._in_whole = places_in_whole(dataset)
        self._marked: list[Mark] = []  # by `mark`; those of `note` are in `_noted`
        self._noted: dict[int, Mark] = {}
        self._causes: dict[int, str] = {}  # of both, by sample; empty where it is suspected
        self.dataset, self.seed = dataset, seed
        self.plain = collate is None and augment is None and is_plain(dataset)
        """Whether only torch's and instep's own code reads, which keeps and draws nothing."""
        self.draws = False
        """Whether reading was seen to draw from the global generators."""
        self.read_by = 0
        """The process in which the dataset's own code has read; 0 if it has not."""
        self.selection: Selection | None = None
        """The samples whose content is recorded."""
        self.told = Told(() if self.plain else dataset, tells=tells, seed=seed)
        """What the user's code says to the dataset while the run goes on."""
        self._augment, self.skip = augment, skip
        order, self._weights, self._repeats_alone = HowSampled.of(order)
        self.order = order or (Order(self.samples, seed) if shuffle else None)
        """Of the samples in each epoch; None for the natural one."""
        self._gaps = bool(getattr(order, "gaps", False))
        self._times = getattr(order, "times", None)
        self._collate: Collate = collate or collate_by_torch
        self._read_batch = batch_reader(dataset) if collate is None and augment is None else None
        self._many = offers(dataset, "__getitems__")
        self._generators = generators.DrawDetector()
        self.stream = dataset if isinstance(dataset, AnyStream) else None
        """The dataset, if it is one."""
        self._before = None if self.plain or self.stream else self.counts()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle what it was made of, and which contents it records: for a process like this."""
        return self._as_made, (), {"selection": self.selection}

    def __call__(self, part: Slice) -> Fetched:
        """The batch of a slice, which of its samples are not in it, and contents of some.

        The batch is None where it has no sample. A read that raises is tried
        again before the sample counts as unreadable. The global generators are
        left as they were. Where one of them was drawn from, the slice is read
        again, with all three seeded from each sample's key.

        Raises:
            DataError: a sample raised and is not to be skipped, or the samples
                cannot be collated; names sample, cause and the user's line.
        """
        if part.first == part.stop or not self.size(part):
            return None, [], []
        if self.plain:
            return self.batch(part)
        self.read_by = os.getpid()
        if part.epoch:
            self._before = None  # it has what the dataset may let go of
        self.told.tell(part.epoch)
        self._generators.remember()
        try:
            if not self.draws:
                try:
                    fetched = self.batch(part)
                except DataError:
                    if not self._generators.drawn():
                        raise
                else:
                    if not self._generators.drawn():
                        return fetched
                self.draws = True
            return self.batch(part)
        finally:
            if self.draws:
                self._generators.restore()

    def first(self) -> None:
        """Read the first sample. The user's `collate` may want more than one.

        Raises:
            DataError: as a call.
        """
        if self.waits:
            return
        collate = self._collate
        if collate is not collate_by_torch:
            self._collate = lambda samples: None
        try:
            self(Slice(0, 0, 1))
        finally:
            self._collate = collate

    @property
    def waits(self) -> bool:
        """Whether a read takes as long as its source wants: what is read once may come late."""
        return self.stream is not None and self.stream.once is not None

    def indices(self, part: Slice) -> Indices:
        """The samples of a slice, [stop - first] int64."""
        if self.order is None:
            return np.arange(part.first, part.stop, dtype=np.int64)
        found = self.order.indices(*part)
        return found[found >= 0] if self._gaps else found

    def size(self, part: Slice) -> int:
        """How many samples a slice has: as many as places, unless its order has empty ones."""
        return len(self.indices(part)) if self._gaps else part.stop - part.first

    def mark(self, marks: Iterable[Mark]) -> None:
        """Skip these samples, or read them alone: processes have died there.

        Marks of other datasets are ignored; those of an earlier call no longer count.
        """
        self._marked = [mark for mark in marks if mark.dataset == self.name]
        self._apply_marks()

    def note(self, sample: int, cause: str | None) -> None:
        """Mark a sample at which a loader process died, in addition to `mark`.

        Args:
            sample: its index.
            cause: why it is skipped; empty to read it alone, None for neither.
        """
        self._noted.pop(sample, None)
        if cause is not None:
            self._noted[sample] = Mark(dataset=self.name, sample=sample, cause=cause)
        self._apply_marks()

    @contextmanager
    def without(self, skipped: Iterable[Skipped]) -> Iterator[None]:
        """In this context these samples are skipped, whether they can be read or not."""
        marked = self._marked
        more = [Mark(dataset=self.name, sample=each, cause=cause) for each, cause in skipped]
        self.mark([*marked, *more])
        try:
            yield
        finally:
            self.mark(marked)

    @property
    def marks(self) -> list[Mark]:
        """All that count, for another process that reads this dataset."""
        return [*self._marked, *self._noted.values()]

    def _apply_marks(self) -> None:
        skipped_last = sorted(self.marks, key=lambda mark: bool(mark.cause))
        self._causes = {mark.sample: mark.cause for mark in skipped_last}

    def content(self, index: int) -> int:
        """The content of a sample of epoch 0, read with generators seeded from its key.

        Raises:
            DataError: the sample is to be skipped; or what reading it raised.
        """
        if cause := self._causes.get(index):
            raise DataError(f"sample {index} is left out: {cause}")
        self.read_by = os.getpid()
        self.told.tell(0)
        self._current.start_named(index, self._file_of(index))
        try:
            with generators.preserved():
                seed_for_sample(self.seed, 0, index)
                return content_of(read_with_retries(lambda: self.sample(index)))
        finally:
            self._current.clear()

    def contents(self, first: int, stop: int) -> list[list[int]]:
        """[index, content] of samples that can be read: those at positions [first, stop) of an
        order of their own, which is no epoch's."""
        order = Order(self.samples, key(self.seed, _OF_CONTENTS))
        indices = order.indices(0, first, stop)
        contents = SliceContents(indices.tolist())
        if self.plain and self._read_batch is not None:
            contents.add_rows(indices, self._read_batch(indices))
            return contents.found
        self.read_by = os.getpid()
        self.told.tell(0)
        with generators.preserved():
            for index in indices.tolist():
                self._current.start(index)
                with suppress(Exception):  # an unreadable one is reported when its step comes
                    if self.draws:
                        seed_for_sample(self.seed, 0, index)
                    contents.add(index, self.sample(index))
        self._current.clear()
        return contents.found

    def taken_counts(self) -> Counts | None:
        """Give what was counted before anything was read; None if given, or nobody counts."""
        before, self._before = self._before, None
        return before

    def counts(self) -> Counts:
        """Count what its objects and functions keep now."""
        return Counts((*objects_of(self.dataset), self._augment, self._collate))

    @property
    def _current(self) -> last_read.CurrentRead:
        return last_read.current_read(self.name)

    def batch(self, part: Slice) -> Fetched:
        """Read a slice as it comes: the dataset is told nothing, and draws are not looked at."""
        indices, missed = self.indices(part), Missed()
        recorded = self.selection(*part) if self.selection is not None else []
        contents = SliceContents(indices[recorded].tolist() if recorded else [])
        try:
            if self._read_batch is not None and not self.draws:
                batch = self._together(part.epoch, indices, self._read_batch, missed)
                contents.add_rows(_without(indices, missed), batch)
                return _weighed(self._weights, batch, indices, missed), missed, contents.found
            drawn = _drawn_as(self._times, part, len(indices))
            if self._many and not self.draws:
                samples = self._read_many(drawn, indices, missed, contents)
            else:
                samples = self._read_apart(drawn, indices, missed, contents)
        finally:
            self._current.clear()
        if not samples:
            return None, missed, contents.found
        names = _without(indices, missed).tolist()
        try:
            batch = self._collate(samples)
            return _weighed(self._weights, batch, indices, missed), missed, contents.found
        except Exception as error:
            text = (
                first_mismatch(names, samples) or f"samples {listed(names, 6)} cannot be collated."
            )
            raise DataError(f"{text} {describe_error(error)}") from error

    def _together(
        self, epoch: int, indices: Indices, read: Callable[[Indices], Any], missed: Missed
    ) -> Any:
        """What `read` gives for many samples at once; None where none of them can be read."""
        try:
            if not self._causes or not np.isin(indices, [*self._causes]).any():
                self._current.start_many(int(indices[0]), len(indices))
                return read(indices)
        except Exception:
            pass
        self._current.clear()
        for index in indices.tolist():  # which of them is it?
            self._one(epoch, index, missed)
        readable = _without(indices, missed)
        if not len(readable):
            return None
        try:
            return read_with_retries(lambda: read(readable))
        except Exception as error:
            names, cause = listed(readable.tolist(), 6), describe_error(error)
            raise DataError(f"samples {names} cannot be read together: {cause}") from error

    def _read_many(
        self, drawn: list[int], indices: Indices, missed: Missed, contents: SliceContents
    ) -> list[Any]:
        def read(some: Indices) -> list[Any]:
            return list(self.dataset.__getitems__(some.tolist()))

        samples = self._together(drawn[0], indices, read, missed) or []
        names = _without(indices, missed).tolist()
        if len(samples) != len(names):
            raise DataError(
                f"__getitems__ of {type(self.dataset).__name__} was asked for {len(names)} "
                f"samples and gave {len(samples)}: it must return one for each index, in order."
            )
        lost = {index for index, _ in missed}
        pairs = zip(drawn, indices.tolist(), strict=True)
        drawn = [epoch for epoch, index in pairs if index not in lost]
        for epoch, index, sample in zip(drawn, names, samples, strict=True):
            if not epoch >> _AGAIN:
                contents.add(index, sample)
        every = zip(drawn, names, samples, strict=True)
        return [self._augmented(*each) for each in every]

    def _read_apart(
        self, drawn: list[int], indices: Indices, missed: Missed, contents: SliceContents
    ) -> list[Any]:
        samples = []
        for epoch, index in zip(drawn, indices.tolist(), strict=True):
            for sample in self._one(epoch, index, missed):
                if not epoch >> _AGAIN:
                    contents.add(index, sample)
                samples.append(self._augmented(epoch, index, sample))
        return samples

    def _one(self, epoch: int, index: int, missed: Missed) -> list[Any]:
        """The sample, alone in a list; an empty list where it is skipped."""
        cause, current = self._causes.get(index), self._current
        if cause:
            missed.append((index, cause))
            return []
        if cause is None:
            current.start(index)
        else:  # suspected
            while current.ahead:
                time.sleep(0.001)  # until it is waited for: then nothing else can be the cause
            current.start_named(index, self._file_of(index))
        try:
            return [read_with_retries(lambda: self._keyed_sample(epoch, index))]
        except RunError:  # a fault of this machine, as a full disk, is none of the sample
            raise
        except Exception as error:
            cause = describe_error(error)
            if not self.skip:
                if self.stream is not None:
                    if isinstance(error, DataError):  # it names the part
                        raise
                    raise DataError(
                        f"{self.stream.named(index)} cannot be read: {cause}"
                    ) from error
                raise DataError(
                    f"sample {index}{self._in_whole(index)} cannot be read: "
                    f"{cause.rstrip('.')}.{SKIP_HINT}"
                ) from error
            missed.append((index, f"{cause}{self._in_whole(index)}"))
            return []

    def _keyed_sample(self, epoch: int, index: int) -> Any:
        if self.draws:
            seed_for_sample(self.seed, epoch, index)
        return self.sample(index)

    def sample(self, index: int) -> Any:
        """Read one sample, by index."""
        if self._many or not hasattr(self.dataset, "__getitem__"):
            return self.dataset.__getitems__([index])[0]
        return self.dataset[index]

    def _augmented(self, epoch: int, index: int, sample: Any) -> Any:
        if self._augment is None or (self._repeats_alone and not epoch >> _AGAIN):
            return sample
        generator = torch.Generator()
        generator.manual_seed(key(self.seed, epoch, index, _OF_AUGMENT))
        try:
            return self._augment(sample, generator)
        except Exception as error:
            cause = describe_error(error)
            raise DataError(
                f"sample {index}{self._in_whole(index)} cannot be augmented: {cause}"
            ) from error


def seed_for_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the three global generators as they are when this sample is read."""
    generators.seed_all(key(seed, epoch, index, _OF_GLOBALS))


def length_of(dataset: Any) -> int:
    """How many samples a dataset has.

    Raises:
        DataError: it has none, or they cannot be read by index.
    """
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise DataError(
            f"a dataset of type {type(dataset).__name__} has no __getitem__: "
            "samples must be readable by index, in any order."
        )
    try:
        samples = len(dataset)
    except Exception as error:
        raise DataError(
            f"len() of the dataset ({type(dataset).__name__}) failed: {describe_error(error)}. "
            "A dataset needs __len__."
        ) from error
    if samples == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) has no samples: 1 is the least.")
    return samples


def _without(indices: Indices, missed: Missed) -> Indices:
    """Those that were not skipped, in their order."""
    return indices[~np.isin(indices, [index for index, _ in missed])] if missed else indices


def _drawn_as(times: Any, part: Slice, count: int) -> list[int]:
    """The epochs by which the random draws of each sample are keyed: a sample that comes again in
    an epoch has one of its own."""
    if times is None:
        return [part.epoch] * count
    drawn: list[int] = (part.epoch + (times(*part) << _AGAIN)).tolist()
    return drawn


def _weighed(weights: SampleWeights | None, batch: Any, indices: Indices, missed: Missed) -> Any:
    if weights is None or batch is None:
        return batch
    return with_weights(batch, weights.of(_without(indices, missed)))
