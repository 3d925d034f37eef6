"""From a slice of an epoch to a batch: a function of (seed, epoch, positions) only.

Random values are keyed by sample, so the same slice gives the same batch in any
process, on any attempt. This file knows nothing of threads and processes: the
readers run a `Fetch` wherever they like.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from instep.comm.messages import Mark
from instep.data import breadcrumb, keyed
from instep.data.blame import odd_one_out, told
from instep.data.breadcrumb import files_of
from instep.data.contents import Chosen, Contents, content_of
from instep.data.order import Indices, Order, key
from instep.data.unreadable import TO_SKIP, tried
from instep.errors import DataError

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, torch.Generator], Any]
Missed = list[tuple[int, str]]
"""Samples that were left out, each with its cause, as plain data that travels between processes."""
Got = tuple[Any, Missed, list[list[int]]]
"""What came of a slice: the batch, who is missing, index and content (`contents.py`) of some."""

_OF_AUGMENT, _OF_GLOBALS = 0, 1


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
        collate: list of samples to batch; torch's `default_collate` if None.
        augment: (sample, generator) to sample; the generator is keyed by
            (seed, epoch, index).
        skip: leave out a sample that cannot be read; else it is an error.
        name: `training` or `validation`, under which the process leaves word of what it reads.

    Raises:
        DataError: `dataset` is not map-style, or is empty.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        shuffle: bool,
        collate: Collate | None = None,
        augment: Augment | None = None,
        skip: bool = False,
        name: str = "training",
    ) -> None:
        self.samples = _length(dataset)
        self.name, self._file_of = name, files_of(dataset)
        self._told: list[Mark] = []  # by whoever marks; the others are noted here
        self._noted: dict[int, Mark] = {}
        self._left_out: dict[int, str] = {}
        self._suspected: set[int] = set()
        self.dataset, self.seed = dataset, seed
        self.plain = collate is None and augment is None and is_plain(dataset)
        """Whether torch's and instep's own code alone reads, which keeps and draws nothing."""
        self.draws = False
        """Whether reading was seen to draw from the global generators."""
        self.read_by = 0
        """The process in which the dataset's own code has read; 0 if it has not."""
        self.chosen: Chosen | None = None
        """Of which samples the content is told."""
        self._augment, self.skip = augment, skip
        self._order = Order(self.samples, seed) if shuffle else None
        self._collate: Collate = collate or _collated
        self._whole = whole_reader(dataset) if collate is None and augment is None else None
        self._many = offers(dataset, "__getitems__")
        self._watch = keyed.Watch()

    def __call__(self, part: Slice) -> Got:
        """The batch of a slice, which of its samples are not in it, and contents of some.

        The batch is None where it has no sample. A read that raises is tried
        again before the sample counts as one that cannot be read. The global
        generators are left as they were. Where one of them was drawn from, the
        slice is read again, with all three set from each sample's key.

        Raises:
            DataError: a sample raised and is not to be left out, or the samples
                cannot be collated; the text names sample, cause and the user's line.
        """
        if part.first == part.stop:
            return None, [], []
        if self.plain:
            return self._batch(part)
        self.read_by = os.getpid()
        self._watch.begin()
        try:
            if not self.draws:
                try:
                    got = self._batch(part)
                except DataError:
                    if not self._watch.moved():
                        raise
                else:
                    if not self._watch.moved():
                        return got
                self.draws = True
            return self._batch(part)
        finally:
            if self.draws:
                self._watch.give_back()

    def indices(self, part: Slice) -> Indices:
        """The samples of a slice, [stop - first] int64."""
        if self._order is None:
            return np.arange(part.first, part.stop, dtype=np.int64)
        return self._order.indices(*part)

    def mark(self, marks: Iterable[Mark]) -> None:
        """Leave these samples out, or be careful with them: processes have ended there.

        The marks of other datasets are not looked at; those of before no longer count.
        """
        self._told = [mark for mark in marks if mark.dataset == self.name]
        self._apply_marks()

    def note(self, sample: int, cause: str | None) -> None:
        """Mark one that a process ended at which reads for this one, beside what `mark` tells.

        Args:
            sample: its index.
            cause: why it is to be left out; empty to be careful with it, None for neither.
        """
        self._noted.pop(sample, None)
        if cause is not None:
            self._noted[sample] = Mark(dataset=self.name, sample=sample, cause=cause)
        self._apply_marks()

    @property
    def marks(self) -> list[Mark]:
        """All that count, for another process that reads this dataset."""
        return [*self._told, *self._noted.values()]

    def _apply_marks(self) -> None:
        marks = self.marks
        self._left_out = {mark.sample: mark.cause for mark in marks if mark.cause}
        self._suspected = {mark.sample for mark in marks if not mark.cause}

    def content(self, index: int) -> int:
        """The content of a sample of epoch 0, read with generators set from its key.

        Raises:
            DataError: the sample is to be left out; or what reading it raised.
        """
        if index in self._left_out:
            raise DataError(f"sample {index} is left out: {self._left_out[index]}")
        self.read_by, trail = os.getpid(), breadcrumb.trail(self.name)
        trail.begins_named(index, self._file_of(index))
        try:
            with keyed.kept():
                set_keyed(self.seed, 0, index)
                return content_of(tried(lambda: self._sample(index)))
        finally:
            trail.ends()

    def _batch(self, part: Slice) -> Got:
        indices, missed = self.indices(part), Missed()
        wanted = self.chosen(*part) if self.chosen is not None else []
        contents = Contents(indices[wanted].tolist() if wanted else [])
        trail = breadcrumb.trail(self.name)
        try:
            if self._whole is not None and not self.draws:
                batch = self._together(part.epoch, indices, self._whole, missed)
                contents.note_rows(_without(indices, missed), batch)
                return batch, missed, contents.found
            if self._many and not self.draws:
                samples = self._read_many(part.epoch, indices, missed, contents)
            else:
                samples = self._read_apart(part.epoch, indices, missed, contents)
        finally:
            trail.ends()
        if not samples:
            return None, missed, contents.found
        names = _without(indices, missed).tolist()
        try:
            return self._collate(samples), missed, contents.found
        except Exception as error:
            text = odd_one_out(names, samples) or f"samples {_listed(names)} cannot be collated."
            raise DataError(f"{text} {told(error)}") from error

    def _together(
        self, epoch: int, indices: Indices, read: Callable[[Indices], Any], missed: Missed
    ) -> Any:
        """What `read` gives for many samples at once; None where none of them can be read."""
        first, trail = int(indices[0]), breadcrumb.trail(self.name)
        try:
            if not self._has_marked(indices):
                trail.begins_many(first, len(indices))
                return read(indices)
        except Exception:
            pass
        trail.ends()
        for index in indices.tolist():  # which of them is it?
            self._one(epoch, index, missed)
        readable = _without(indices, missed)
        if not len(readable):
            return None
        try:
            return tried(lambda: read(readable))
        except Exception as error:
            names = _listed(readable.tolist())
            raise DataError(f"samples {names} cannot be read together: {told(error)}") from error

    def _read_many(
        self, epoch: int, indices: Indices, missed: Missed, contents: Contents
    ) -> list[Any]:
        def read(some: Indices) -> list[Any]:
            return list(self.dataset.__getitems__(some.tolist()))

        samples = self._together(epoch, indices, read, missed) or []
        names = _without(indices, missed)
        if len(samples) != len(names):
            raise DataError(
                f"__getitems__ of {type(self.dataset).__name__} was asked for {len(names)} "
                f"samples and gave {len(samples)}: it must return one for each index, in order."
            )
        named = list(zip(names.tolist(), samples, strict=True))
        for index, sample in named:
            contents.note(index, sample)
        return [self._augmented(epoch, index, sample) for index, sample in named]

    def _read_apart(
        self, epoch: int, indices: Indices, missed: Missed, contents: Contents
    ) -> list[Any]:
        samples = []
        for index in indices.tolist():
            for sample in self._one(epoch, index, missed):
                contents.note(index, sample)
                samples.append(self._augmented(epoch, index, sample))
        return samples

    def _has_marked(self, indices: Indices) -> bool:
        marked = [*self._left_out, *self._suspected]
        return bool(marked) and bool(np.isin(indices, marked).any())

    def _one(self, epoch: int, index: int, missed: Missed) -> list[Any]:
        """The sample, alone in a list; an empty one where it is left out."""
        if index in self._left_out:
            missed.append((index, self._left_out[index]))
            return []
        trail = breadcrumb.trail(self.name)
        if index in self._suspected:
            while trail.ahead:
                time.sleep(0.001)  # until it is waited for: then nothing else can be to blame
            trail.begins_named(index, self._file_of(index))
        else:
            trail.begins(index)
        try:
            return [tried(lambda: self._keyed_sample(epoch, index))]
        except Exception as error:
            cause = told(error)
            if not self.skip:
                raise DataError(
                    f"sample {index} cannot be read: {cause.rstrip('.')}.{TO_SKIP}"
                ) from error
            missed.append((index, cause))
            return []

    def _keyed_sample(self, epoch: int, index: int) -> Any:
        if self.draws:
            set_keyed(self.seed, epoch, index)
        return self._sample(index)

    def _sample(self, index: int) -> Any:
        if self._many or not hasattr(self.dataset, "__getitem__"):
            return self.dataset.__getitems__([index])[0]
        return self.dataset[index]

    def _augmented(self, epoch: int, index: int, sample: Any) -> Any:
        if self._augment is None:
            return sample
        generator = torch.Generator()
        generator.manual_seed(key(self.seed, epoch, index, _OF_AUGMENT))
        try:
            return self._augment(sample, generator)
        except Exception as error:
            raise DataError(f"sample {index} cannot be augmented: {told(error)}") from error


def offers(dataset: Any, method: str) -> bool:
    """Whether the dataset's class has a batched method that its `__getitem__` agrees with.

    A subclass that changes `__getitem__` alone has not changed the batched way
    of its parent, which would then give other samples.
    """
    for layer in type(dataset).__mro__:
        if method in vars(layer):
            return True
        if "__getitem__" in vars(layer):
            return False
    return False


def set_keyed(seed: int, epoch: int, index: int) -> None:
    """Set the three global generators as they are when this sample is read."""
    keyed.set_from(key(seed, epoch, index, _OF_GLOBALS))


def is_plain(dataset: Any) -> bool:
    """Whether none of the user's code runs to read it, and nothing is kept from read to read."""
    kind = type(dataset)
    if kind is Subset:
        return is_plain(dataset.dataset)
    if kind is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    return kind.__module__.startswith("instep.data.")


def whole_reader(dataset: Any) -> Callable[[Indices], Any] | None:
    """The way to read many samples as one batch, without Python for each; None if there is none.

    A subset with indices that are not simply the places of samples (below 0, no
    integers, too large) has none: what they mean is left to PyTorch.
    """
    if type(dataset) is TensorDataset:
        takers = [_taker(tensor) for tensor in dataset.tensors]
        return lambda indices: [take(indices) for take in takers]
    if type(dataset) is Subset:
        inner, chosen = whole_reader(dataset.dataset), _places(dataset)
        if inner is None or chosen is None:
            return None
        return lambda indices: inner(chosen[indices])
    return dataset.batch_of if offers(dataset, "batch_of") else None


def _places(subset: Subset[Any]) -> Indices | None:
    try:
        places = np.asarray(subset.indices)
        least, most = int(places.min(initial=0)), int(places.max(initial=0))
        size = len(subset.dataset)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None
    if places.ndim != 1 or places.dtype.kind not in "iu" or least < 0 or most >= size:
        return None
    return places.astype(np.int64)


def _taker(tensor: torch.Tensor) -> Callable[[Indices], torch.Tensor]:
    """Rows of a tensor by index, each call a new tensor."""
    try:
        # numpy, as torch would start a pool of threads for every thread that loads
        rows = tensor.detach().numpy()
    except (TypeError, RuntimeError):  # bfloat16, or on a device
        return lambda indices: tensor.index_select(0, torch.from_numpy(indices).to(tensor.device))

    def take(indices: Indices) -> torch.Tensor:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(rows):
            raise IndexError(f"indices {indices.min()} to {indices.max()} of {len(rows)} rows")
        # allocated by torch: some matrix products round by the alignment of their input
        batch = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype)
        # "clip" writes in place, "raise" copies; that the indices are right was seen above
        np.take(rows, indices, axis=0, out=batch.numpy(), mode="clip")
        return batch

    return take


def _collated(samples: list[Any]) -> Any:
    """torch's `default_collate`, into memory of this process.

    Where it believes itself in a worker of a `DataLoader`, it makes a file in shared
    memory for every tensor, which `wire.py` has no use for.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = info


def _length(dataset: Any) -> int:
    if not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
        raise DataError(
            f"a dataset of type {type(dataset).__name__} has no __getitem__: "
            "samples must be readable by index, in any order."
        )
    try:
        samples = len(dataset)
    except Exception as error:
        raise DataError(
            f"the length of {type(dataset).__name__} cannot be told: {told(error)}. "
            "A dataset needs __len__."
        ) from error
    if samples == 0:
        raise DataError(f"the dataset ({type(dataset).__name__}) has no samples: 1 is the least.")
    return samples


def _without(indices: Indices, missed: Missed) -> Indices:
    """Those that were not missed, in their order."""
    return indices[~np.isin(indices, [index for index, _ in missed])] if missed else indices


def _listed(names: Sequence[int]) -> str:
    shown = ", ".join(str(name) for name in names[:6])
    return shown + (f" and {len(names) - 6} more" if len(names) > 6 else "")
