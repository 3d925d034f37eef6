"""What is kept of a `DataLoader` that the user gave, and messages about what is not used.

The job decides which samples make a step and in what order (`order.py`), so a loader's batch
size, sampler and generator are not used. This file knows which of them decide how often a
sample is trained on; whether that is an error is not decided here. Way in: `unpack_loader`.
"""

from __future__ import annotations

from array import array
from collections import UserDict
from collections.abc import Callable, Iterator, Sized
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

from instep.data.order import Indices
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.stream import is_stream
from instep.data.samplers.asked import EpochDraws, Wishes, draws_of, kind_of, sampler_of, wishes_of
from instep.errors import RecipeError
from instep.words import a_or_an, listed


class Unused(NamedTuple):
    """A property of a `DataLoader` that is not used."""

    text: str
    """A sentence without its full stop."""
    remedy: str = ""
    """What to do instead, if the property decides which samples are trained on or which are in
    one batch. Empty if it does not."""


_HOW_OFTEN = (
    "Give a dataset that has each sample as often as it should be used, such as "
    "Subset(dataset, indices), or weight samples in the loss; give the dataset itself if each "
    "should be used once"
)
_TOGETHER = (
    "Give the dataset itself if any samples may be in one batch; if it puts samples of one length "
    "together, give it an attribute `lengths` with that of each sample"
)


class Grouped(NamedTuple):
    """A sampler, or batch sampler, that says how long samples are: it puts like with like."""

    name: str
    """Its class."""
    lengths: Any
    """[samples]."""


class LoaderParts(NamedTuple):
    """A dataset and how to read it, as the user gave them."""

    dataset: Any
    collate: Callable[[list[Any]], Any] | None = None
    """None for torch's own."""
    worker_init: Callable[[int], Any] | None = None
    loaders: int | None = None
    """Loader processes; None where the user gave no `DataLoader`."""
    loader: Any = None
    """The `DataLoader`; None where there was none."""
    whole: LoaderParts | None = None
    """What the user gave, where `dataset` is a side of it (`side`)."""

    @property
    def wishes(self) -> Wishes | None:
        """Wishes of a `WeightedRandomSampler` that draws with replacement; None where there is
        none, or it is of a side of the dataset."""
        return wishes_of(self._sampler, self.dataset) if self.whole is None else None

    @property
    def draws(self) -> EpochDraws | None:
        """Numbers of samples that another sampler of torch draws for each epoch; None where it
        takes each once, or is of a side of the dataset."""
        return draws_of(self._sampler, self.dataset) if self.whole is None else None

    @property
    def _sampler(self) -> Any:
        return sampler_of(self.loader) if self.loader is not None else None

    @property
    def grouped(self) -> Grouped | None:
        """The sampler that puts samples of about one length into a batch: one that is not torch's,
        and has `lengths` of all samples; None where there is none, or it is of a side."""
        if self.loader is None or self.whole is not None:
            return None
        for sampler in (self.loader.batch_sampler, self._sampler):
            lengths = getattr(sampler, "lengths", None)
            if isinstance(lengths, Sized) and len(lengths) == len(self.dataset):
                return Grouped(type(sampler).__name__, lengths)
        return None

    @property
    def streams(self) -> bool:
        """Whether it gives samples one after the other alone."""
        return isinstance(self.dataset, AnyStream) or is_stream(self.dataset)

    @property
    def chosen(self) -> str:
        """Samples that a `SubsetRandomSampler` chooses, in words; empty where there is none."""
        if self.loader is None or type(self._sampler) is not SubsetRandomSampler:
            return ""
        samples, every = len((self.whole or self).dataset), len(self.loader.dataset)
        return f"the {samples:,} of {every:,} samples that its SubsetRandomSampler names, each once"

    @property
    def info_dataset(self) -> Any:
        """What `get_worker_info().dataset` is in a loader process: what the user gave."""
        if self.whole is not None:
            return self.whole.info_dataset
        return self.dataset if self.loader is None else self.loader.dataset

    def side(self, indices: Indices, *, trained: bool) -> LoaderParts:
        """These samples alone, read in the same way.

        Args:
            indices: [count] of `dataset`. What is read has positions in them, as in torch's
                `Subset`, which it is.
            trained: whether they are trained on; what is not used of a `DataLoader` is then said.
        """
        part = Subset(self.dataset, array("q", indices.tobytes()))
        return self._replace(dataset=part, loader=self.loader if trained else None, whole=self)

    def unused(
        self,
        name: str,
        *,
        shuffled: bool | None,
        batch: int,
        planned: bool = False,
        tokens: int | None = None,
    ) -> Iterator[Unused]:
        """The properties of the `DataLoader` that are not used.

        Args:
            name: of the field that holds it, such as `Recipe.train`.
            shuffled: whether each epoch has another order; None where nothing follows from it.
            batch: samples of a step.
            planned: whether samplers of torch that draw, and those by length, are taken for what
                they mean.
            tokens: of a step, where these decide how many samples it has.
        """
        if self.loader is None:
            return
        of = f"{name}'s DataLoader"
        sampler, batches = self._sampler, self.loader.batch_sampler
        stream = isinstance(self.loader.dataset, IterableDataset)
        grouped = planned and self.grouped is not None
        if kind_of(batches) is not BatchSampler and not grouped:
            yield Unused(
                f"{of} has a batch_sampler ({type(batches).__name__}), which is not used: every "
                "sample comes once in an epoch, in batches of train.global_batch",
                _TOGETHER,
            )
        else:
            yield from _unused_size(of, batches, batch, tokens)
        drawn = planned and (self.wishes is not None or self.draws is not None)
        often = stream or grouped or drawn
        if not often and not self._every_sample_once(sampler):
            divides = type(sampler) is DistributedSampler  # only, between processes
            yield Unused(
                f"{of} has a sampler ({type(sampler).__name__}), which is not used: every sample "
                "comes once in an epoch",
                "" if divides else _HOW_OFTEN,
            )
        elif not often and kind_of(batches) is BatchSampler:
            yield from _unused_order(of, sampler, shuffled)
        yield from _unused_drop(of, batches)
        if self.loader.generator is not None:
            yield Unused(
                f"{of} has a generator, which is not used: the order follows from the job's seed"
            )
        if self.loader.timeout:
            yield Unused(
                f"{of} has timeout = {self.loader.timeout:g}, which is not used: the time "
                "limit of a read follows from earlier reads"
            )
        context = self.loader.multiprocessing_context
        if context is not None and context.get_start_method() != "fork":
            yield Unused(
                f"{of} has multiprocessing_context = {context.get_start_method()}, which is not "
                "used: loader processes are forked"
            )

    def _every_sample_once(self, sampler: Any) -> bool:
        """Whether an epoch uses each sample of what is read once."""
        if type(sampler) is SubsetRandomSampler:  # what it leaves out is not read
            return True
        if kind_of(sampler) is RandomSampler:
            once = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        else:
            once = type(sampler) is SequentialSampler
        return once and len(sampler) == len((self.whole or self).dataset)


def _unused_size(of: str, batches: Any, batch: int, tokens: int | None) -> Iterator[Unused]:
    """Those that say how many samples a batch has; `batches` may be of the user's own class."""
    size = getattr(batches, "batch_size", batch)
    if size != batch or tokens is not None:
        key = f"global_batch = {batch}" if tokens is None else f"tokens_per_batch = {tokens}"
        yield Unused(
            f"{of} has batch_size = {size}, which is not used: train.{key} says how many samples "
            "a step takes"
        )


def _unused_drop(of: str, batches: Any) -> Iterator[Unused]:
    if getattr(batches, "drop_last", False):
        yield Unused(
            f"{of} has drop_last = True, which is not used: no sample of an epoch is left "
            "out, and its last batch may be smaller"
        )


def _unused_order(of: str, sampler: Any, shuffled: bool | None) -> Iterator[Unused]:
    if type(sampler) is SequentialSampler and shuffled:
        yield Unused(
            f"{of} has shuffle = False, which is not used: the order of each epoch follows "
            "from the job's seed. Set data.order = 'dataset' for the order of the dataset"
        )
    elif type(sampler) is not SequentialSampler and shuffled is False:
        random = kind_of(sampler) is RandomSampler
        yield Unused(
            f"{of} has {'shuffle = True' if random else 'a SubsetRandomSampler'}, which "
            "is not used to shuffle: data.order = 'dataset' takes the samples in the "
            "order of the dataset. Leave that out for another order in each epoch"
        )


def columns_in(dataset: Any) -> str:
    """What to say of a dict of columns in the place of a dataset; empty if it is none.

    It has a length and takes keys, but has no sample 0.
    """
    if not isinstance(dataset, (dict, UserDict)) or not dataset or 0 in dataset:
        return ""
    return (
        f"with the keys {listed([repr(key) for key in dataset], 3)}: a map-style dataset is "
        "wanted, in which dataset[0] is the first sample. If the values are columns, give rows: "
        "torch.utils.data.TensorDataset(*columns.values()), or [dict(zip(columns, row)) for row in "
        "zip(*columns.values())]. If they are datasets, give one of them. Recipe.train alone "
        "takes a dict, of map-style ones that are no lists, or of streams; none is a DataLoader."
    )


def unpack_loader(given: Any) -> LoaderParts:
    """A dataset unchanged, or the parts of a `DataLoader`.

    The samples that a `SubsetRandomSampler` leaves out are left out here too.

    Raises:
        ValueError: its batches are made by the dataset itself (`batch_size = None`).
    """
    if not isinstance(given, DataLoader):
        return LoaderParts(given)
    stream = isinstance(given.dataset, IterableDataset)
    if given.batch_sampler is None and (stream or hasattr(given.dataset, "__getitem__")):
        raise ValueError(
            "has batch_size = None: its dataset gives whole batches, but the job needs single "
            "samples, from which it makes batches"
        )
    dataset = given.dataset
    sampler = sampler_of(given)
    if type(sampler) is SubsetRandomSampler:
        dataset = Subset(dataset, list(sampler.indices))
    return LoaderParts(
        dataset,
        None if given.collate_fn is default_collate else given.collate_fn,
        given.worker_init_fn,
        given.num_workers,
        given,
    )


def check_dataset(name: str, dataset: Any) -> None:
    """Refuse what is no dataset to train on, or to validate on.

    Args:
        name: of the recipe's field.
        dataset: in it; a `DataLoader` has been taken apart.

    Raises:
        RecipeError: it is none.
    """
    if isinstance(dataset, tuple) and len(dataset) > 1 and _are_columns(dataset):
        raise RecipeError(
            f"Recipe.{name} is a tuple of {len(dataset)} tensors, each with {len(dataset[0])} "
            "rows: make a dataset of samples of it, torch.utils.data.TensorDataset(inputs, target)."
        )
    if hasattr(dataset, "__next__"):
        raise RecipeError(
            f"Recipe.{name} is {a_or_an(dataset)}, which can be read once, by one process: make a "
            "torch.utils.data.IterableDataset whose __iter__ begins anew each time."
        )
    if is_stream(dataset):
        if name == "train":
            return
        raise RecipeError(
            f"Recipe.{name} is {a_or_an(dataset)}, which has no length: a validation needs one. "
            "Give list(dataset), or a map-style dataset."
        )
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise RecipeError(
            f"Recipe.{name} is {a_or_an(dataset)}, but a map-style dataset is wanted: "
            "one with a length and dataset[i]."
        )
    if columns := columns_in(dataset):
        raise RecipeError(f"Recipe.{name} is {a_or_an(dataset)} {columns}")
    if len(dataset) == 0:
        raise RecipeError(f"Recipe.{name} has length zero: there is nothing to learn from.")


def _are_columns(given: tuple[Any, ...]) -> bool:
    """Whether these are arrays with a row for each sample, as Keras and scikit-learn take them."""
    arrays = all(isinstance(each, torch.Tensor | np.ndarray) and each.ndim for each in given)
    return arrays and len({len(each) for each in given}) == 1
