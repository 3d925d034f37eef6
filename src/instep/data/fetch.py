"""From a slice of an epoch to a batch: a function of (seed, epoch, positions) only.

Random values are keyed by sample, so the same slice gives the same batch in any
process, on any attempt. This file knows nothing of threads and processes: the
readers run a `Fetch` wherever they like.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate

from instep.comm.messages import Mark
from instep.data import breadcrumb, keyed
from instep.data.blame import odd_one_out, told
from instep.data.breadcrumb import files_of
from instep.data.order import Indices, Order, key
from instep.data.unreadable import tried
from instep.errors import DataError

Collate = Callable[[list[Any]], Any]
Augment = Callable[[Any, torch.Generator], Any]
Missed = list[tuple[int, str]]
"""Samples that were left out, each with its cause, as plain data that travels between processes."""

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
        self._left_out: dict[int, str] = {}
        self._suspected: set[int] = set()
        self.draws = False
        """Whether reading a sample draws from the global generators; set by who saw it."""
        self._dataset, self._seed, self._augment, self._skip = dataset, seed, augment, skip
        self._order = Order(self.samples, seed) if shuffle else None
        self._collate: Collate = collate or default_collate
        self._whole = whole_reader(dataset) if collate is None and augment is None else None
        self._many = offers(dataset, "__getitems__")

    def __call__(self, part: Slice) -> tuple[Any, Missed]:
        """The batch of a slice, and which of its samples are not in it.

        The batch is None where it has no sample. A read that raises is tried
        again before the sample counts as one that cannot be read. Where
        `draws` is set, this leaves the global generators where the last sample
        left them; `keeping` does not.

        Raises:
            DataError: a sample raised and is not to be left out, or the samples
                cannot be collated; the text names sample, cause and the user's line.
        """
        return (None, []) if part.first == part.stop else self._batch(part)

    def keeping(self, part: Slice) -> tuple[Any, Missed]:
        """The same, with the caller's global generators as they were."""
        with keyed.kept():
            return self(part)

    def indices(self, part: Slice) -> Indices:
        """The samples of a slice, [stop - first] int64."""
        if self._order is None:
            return np.arange(part.first, part.stop, dtype=np.int64)
        return self._order.indices(*part)

    def mark(self, marks: Iterable[Mark]) -> None:
        """Leave these samples out, or be careful with them: processes have ended there.

        The marks of other datasets are not looked at; those of before no longer count.
        """
        own = [mark for mark in marks if mark.dataset == self.name]
        self._left_out = {mark.sample: mark.cause for mark in own if mark.cause}
        self._suspected = {mark.sample for mark in own if not mark.cause}

    def _batch(self, part: Slice) -> tuple[Any, Missed]:
        indices, missed = self.indices(part), Missed()
        trail = breadcrumb.trail(self.name)
        try:
            if self._whole is not None and not self.draws:
                return self._together(part.epoch, indices, self._whole, missed), missed
            if self._many and not self.draws:
                samples = self._read_many(part.epoch, indices, missed)
            else:
                samples = self._read_apart(part.epoch, indices.tolist(), missed)
        finally:
            trail.ends()
        if not samples:
            return None, missed
        names = _without(indices, missed).tolist()
        try:
            return self._collate(samples), missed
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

    def _read_many(self, epoch: int, indices: Indices, missed: Missed) -> list[Any]:
        def read(some: Indices) -> list[Any]:
            return list(self._dataset.__getitems__(some.tolist()))

        samples = self._together(epoch, indices, read, missed) or []
        names = _without(indices, missed).tolist()
        if len(samples) != len(names):
            raise DataError(
                f"__getitems__ of {type(self._dataset).__name__} was asked for {len(names)} "
                f"samples and gave {len(samples)}: it must return one for each index, in order."
            )
        if self._augment is None:
            return samples
        return [self._augmented(epoch, *pair) for pair in zip(names, samples, strict=True)]

    def _read_apart(self, epoch: int, names: list[int], missed: Missed) -> list[Any]:
        samples = []
        for index in names:
            for sample in self._one(epoch, index, missed):
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
            return [tried(lambda: self._sample(epoch, index))]
        except Exception as error:
            cause = told(error)
            if not self._skip:
                raise DataError(
                    f"sample {index} cannot be read: {cause.rstrip('.')}. To train without such "
                    "samples, set data.unreadable = 'skip'."
                ) from error
            missed.append((index, cause))
            return []

    def _sample(self, epoch: int, index: int) -> Any:
        if self.draws:
            keyed.set_from(key(self._seed, epoch, index, _OF_GLOBALS))
        if hasattr(self._dataset, "__getitem__"):
            return self._dataset[index]
        return self._dataset.__getitems__([index])[0]

    def _augmented(self, epoch: int, index: int, sample: Any) -> Any:
        if self._augment is None:
            return sample
        generator = torch.Generator()
        generator.manual_seed(key(self._seed, epoch, index, _OF_AUGMENT))
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


def whole_reader(dataset: Any) -> Callable[[Indices], Any] | None:
    """The way to read many samples as one batch, without Python for each; None if there is none."""
    if type(dataset) is TensorDataset:
        takers = [_taker(tensor) for tensor in dataset.tensors]
        return lambda indices: [take(indices) for take in takers]
    if type(dataset) is Subset:
        inner = whole_reader(dataset.dataset)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return None if inner is None else lambda indices: inner(chosen[indices])
    return dataset.batch_of if offers(dataset, "batch_of") else None


def _taker(tensor: torch.Tensor) -> Callable[[Indices], torch.Tensor]:
    """Rows of a tensor by index, each call a new tensor."""
    try:
        # numpy, as torch would start a pool of threads for every thread that loads
        rows = tensor.detach().numpy()
    except (TypeError, RuntimeError):  # bfloat16, or on a device
        return lambda indices: tensor.index_select(0, torch.from_numpy(indices).to(tensor.device))

    def take(indices: Indices) -> torch.Tensor:
        # allocated by torch: some matrix products round by the alignment of their input
        batch = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype)
        # "clip" writes in place, "raise" copies; the indices are right by construction
        np.take(rows, indices, axis=0, out=batch.numpy(), mode="clip")
        return batch

    return take


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
