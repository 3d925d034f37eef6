"""What was given to `session.prepare`, sorted by type and checked.

In any order, as Accelerate takes it. A `DataLoader` is taken apart as a recipe's is
(`data/torch_loader.py`); what its batch size can mean is decided here. Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import BatchSampler, IterableDataset

from instep.data.loader import Loader
from instep.data.torch_loader import LoaderParts, Unused, columns_in, unpack_loader
from instep.engine.member import Member
from instep.errors import SpecError
from instep.job.train import TrainSpec
from instep.words import a_or_an

_WANTED = (
    "prepare() takes a model, an optimizer, a DataLoader or a map-style dataset to train on, and "
    "if need be a scheduler, a GradScaler and further data to evaluate on"
)

_SEVERAL = {
    "model": " Make the second a part of the first (model.criterion = criterion): then its "
    "gradients are exchanged, and it is in the checkpoints.",
    "optimizer": " Make one with a group of parameters for each; a group has its own rate.",
}


class Data(NamedTuple):
    """A dataset, or a `DataLoader` taken apart."""

    given: LoaderParts
    batch: int | None
    """Samples of one batch of the `DataLoader`; None where there is none, or it does not say."""


class Prepared(NamedTuple):
    """The parts that a session trains with."""

    model: nn.Module
    optimizer: Optimizer
    data: Sequence[Data]
    """To train on, then to evaluate on."""
    scheduler: Any
    scaler: torch.amp.GradScaler | None
    lost: Sequence[Unused]
    """What of the `DataLoader`s is not kept."""
    order: Sequence[Any]
    """Everything as it was given; for data its number in `data`."""

    @classmethod
    def of(
        cls, parts: Iterable[Any], scheduler: Any, train: TrainSpec, *, shuffled: bool = True
    ) -> Prepared:
        """Sort what was given.

        Args:
            parts: in any order.
            scheduler: given by name, or None.
            train: the job's.
            shuffled: whether the job takes the samples of each epoch in another order.

        Raises:
            SpecError: something is missing, there twice or cannot be used.
        """
        found: dict[str, Any] = {"scheduler": scheduler} if scheduler is not None else {}
        data: list[Data] = []
        order: list[Any] = []
        for part in parts:
            kind = _kind(part)
            if kind == "data":
                order.append(len(data))
                data.append(_data(part))
                continue
            if kind in found:
                raise SpecError(
                    f"prepare() was given {a_or_an(found[kind])} and {a_or_an(part)}: a session "
                    f"has one {kind}.{_SEVERAL.get(kind, '')}"
                )
            found[kind] = part
            order.append(part)
        for kind, name in (("model", "model"), ("optimizer", "optimizer")):
            if kind not in found:
                raise SpecError(f"prepare() was given no {name}. {_WANTED}.")
        if not data:
            raise SpecError(f"prepare() was given no data. {_WANTED}.")
        _check_scheduler(found["optimizer"], found.get("scheduler"))
        return cls(
            found["model"],
            found["optimizer"],
            data,
            found.get("scheduler"),
            found.get("scaler"),
            [*_lost(data[0], train, shuffled), *_lost_in_evaluations(data[1:], train)],
            order,
        )

    def reader(self, number: int, member: Member, collate: Any, augment: Any) -> Loader:
        """The loader of a dataset, by its number in `data`.

        Args:
            number: 0 for what is trained on.
            member: has the job, and passes warnings on.
            collate: as of `Session.prepare`.
            augment: as there.
        """
        parts = self.data[number].given
        return Loader.of_job(
            member.job,
            parts,
            "training" if number == 0 else "validation",
            collate=collate if number == 0 else parts.collate or collate,
            augment=augment,
            say=lambda text: member.emit("warning", text=text),
        )

    def handed_back(self, loaders: Sequence[Any]) -> tuple[Any, ...]:
        """Everything in the order in which it was given, with loaders in place of the data."""
        return tuple(loaders[each] if isinstance(each, int) else each for each in self.order)


def _kind(part: Any) -> str:
    if isinstance(part, nn.Module):
        return "model"
    if isinstance(part, Optimizer):
        return "optimizer"
    if isinstance(part, torch.amp.GradScaler):
        return "scaler"
    if isinstance(part, LRScheduler) or (hasattr(part, "step") and hasattr(part, "optimizer")):
        return "scheduler"
    if isinstance(part, IterableDataset):
        raise SpecError(
            f"prepare() was given {a_or_an(part)}, which is iterable: a map-style dataset is "
            "wanted, with a length and dataset[i], so that each sample comes once."
        )
    if hasattr(part, "dataset") or (hasattr(part, "__getitem__") and isinstance(part, Sized)):
        return "data"
    raise SpecError(f"prepare() was given {a_or_an(part)}. {_WANTED}.")


def _data(part: Any) -> Data:
    try:
        given = unpack_loader(part)
    except ValueError as error:
        raise SpecError(f"prepare() was given a DataLoader that {error}.") from None
    if isinstance(given.dataset, IterableDataset):
        _kind(given.dataset)
    if columns := columns_in(given.dataset):
        raise SpecError(f"prepare() was given {a_or_an(given.dataset)} {columns}")
    batches = getattr(given.loader, "batch_sampler", None)
    return Data(given, batches.batch_size if type(batches) is BatchSampler else None)


def _lost(data: Data, train: TrainSpec, shuffled: bool) -> Sequence[Unused]:
    """What of the loader to train on is not kept; its batch size is not among it.

    Raises:
        SpecError: its batch size is neither that of a step nor that of an iteration.
    """
    whole, parts, batch = train.global_batch, train.micro_batches, data.batch
    if batch not in (None, whole) and batch != whole / parts:
        raise SpecError(
            f"the DataLoader has batch_size = {batch}, but train.global_batch = {whole} samples "
            f"make a step, over all processes together, and {whole / parts:g} an iteration. "
            f"For steps of {batch} at any number of processes: instep.join(train="
            f"{{'global_batch': {batch}}}); for iterations of {batch}: a global_batch of "
            f"{batch * parts}; or give the dataset instead."
        )
    name = "the training"
    return [*data.given.unused(name, shuffled=shuffled, batch=batch or whole)]


def _lost_in_evaluations(data: Sequence[Data], train: TrainSpec) -> Iterator[Unused]:
    """What of the loaders to evaluate on is not kept; it changes nothing of what is trained."""
    for each in data:
        batch = each.batch or train.global_batch
        for lost in each.given.unused("an evaluation", shuffled=None, batch=batch):
            yield lost._replace(remedy="")


def _check_scheduler(optimizer: Optimizer, scheduler: Any) -> None:
    """A scheduler that the session does not know of would be advanced in every iteration.

    Raises:
        SpecError: there is one, or it is another optimizer's.
    """
    if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        raise SpecError(
            "the optimizer has a scheduler that prepare() was not given: it would be advanced in "
            "every iteration, and its state would be in no checkpoint. Give it to prepare() too."
        )
    of = getattr(scheduler, "optimizer", optimizer)
    if of is not optimizer:
        raise SpecError(
            f"the scheduler is of another optimizer ({type(of).__name__}) than the one that was "
            "given. Make it of that one."
        )
