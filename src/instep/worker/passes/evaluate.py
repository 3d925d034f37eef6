"""Loss and metrics over a whole dataset, each sample counted once.

The job fixes the batches, and each is computed by one worker. Their values go into one table,
and the means are taken over the finished table in a fixed order. So the result has the same bits
at any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.data.dealing import deal
from instep.data.loader import Loader, Skipped, Slice
from instep.errors import DataError, RecipeError
from instep.parallel.nested import on_tensors
from instep.recipe.forward import Forward, Measured
from instep.recipe.metrics import WholeMetrics
from instep.worker.passes.in_order import InOrder

ATTEMPTS = 64
"""Samples that a worker without work tries to read, to find one for its pass."""


class Evaluation(NamedTuple):
    """The result of a whole dataset."""

    metrics: dict[str, float]
    """`loss` and each metric by name, equal on every worker."""
    samples: int
    """Samples that were read, over all workers; the means are over them."""
    skipped: list[Skipped]
    """Samples that this worker could not read."""
    participants: dict[str, list[float]]
    """`loss` and each metric by name, of each participant; NaN for one without samples that count.
    Empty where the dataset is not divided."""


class Sharing(NamedTuple):
    """How ranks share the batches of a dataset."""

    speeds: Sequence[float] | None = None
    """Speed of each worker, if they differ; a slow one gets fewer batches, but not in lockstep."""
    workers: int | None = None
    """Their number; that of the ranks, if left out."""
    rank: int | None = None
    """Which worker this rank is, as others may be too; the one of its number, if left out."""
    tells: bool = True
    """Whether this rank tells what it computes; one does, of those that are one worker."""
    lockstep: bool = False
    """Whether ranks compute a batch together, so that all must run equally many."""

    def own(self, comm: Comm, count: int) -> tuple[list[int], int]:
        """Numbers of this rank's batches, and in lockstep how many fewer it has than another."""
        dealt = deal(count, self.workers or comm.size, None if self.lockstep else self.speeds)
        rank = comm.rank if self.rank is None else self.rank
        own = list(dealt[rank]) if rank < len(dealt) else []
        return own, (max(map(len, dealt)) - len(own)) * self.lockstep


def evaluate(
    forward: Forward,
    loader: Loader,
    samples: int,
    batch: int,
    comm: Comm,
    sharing: Sharing,
    *,
    arrived: Callable[[], None] = lambda: None,
    sizes: Sequence[int] = (),
    as_participant: Callable[[int], AbstractContextManager[None]] | None = None,
) -> Evaluation:
    """Mean loss and metrics over `samples` samples, in eval mode; every worker calls it.

    The mean of the loss is by weight, over what it is a mean of; that of a metric by samples.

    Args:
        forward: computes one batch.
        loader: of the dataset, in its natural order.
        samples: in the dataset.
        batch: samples of one forward pass.
        comm: the workers that share the work.
        sharing: who computes which batch.
        arrived: called when this worker has finished and waits for the others.
        sizes: samples of each participant, which stand one after the other; none where the dataset
            is not divided.
        as_participant: where it is divided: the model is a participant's, in this context.

    Raises:
        DataError: no sample could be read.
        RecipeError: the loss is a mean over nothing.
    """
    cuts, whose = _cuts(sizes or [samples], batch)
    table = _BatchTable(forward, comm, len(cuts))
    skipped: list[Skipped] = []
    own, beside = sharing.own(comm, len(cuts))
    with _eval_mode(forward):
        reads = loader.read(cuts[number] for number in own)
        for number, read in zip(own, reads, strict=True):
            skipped += read.skipped if sharing.tells else []
            if read.size:
                with as_participant(whose[number]) if sizes and as_participant else nullcontext():
                    found = forward.measure(read.batch, read.size)
                if sharing.tells and found is not None:
                    table.put(number, read.size, found)
            else:
                beside += sharing.lockstep
        if beside:
            spare = first_readable(loader, samples)
            for _ in range(beside):
                forward.measure(on_tensors(spare, Tensor.clone), 1)
    table.add_up(arrived)
    if not table.samples:
        example = f"; of sample {skipped[0].sample}: {skipped[0].cause}" if skipped else ""
        raise DataError(f"none of the {samples} samples to validate on can be read{example}.")
    metrics = table.metrics()
    return Evaluation(metrics, table.samples, skipped, table.of_groups(whose, len(sizes)))


@contextmanager
def _eval_mode(forward: Forward) -> Iterator[None]:
    was_training = forward.model.training
    forward.model.eval()
    try:
        yield
    finally:
        forward.model.train(was_training)


class _BatchTable:
    """The values of each batch: a rank's own, and after `add_up` those of all ranks."""

    def __init__(self, forward: Forward, comm: Comm, count: int) -> None:
        self._forward, self._comm = forward, comm
        self._whole = whole = WholeMetrics(forward.recipe.metrics)
        self._names = ["loss", *(n for n in forward.recipe.metrics if n not in whole.names)]
        # the last columns: samples read, samples in the batch, and the weight of the loss
        self._rows = torch.zeros(count, len(self._names) + 3, dtype=torch.float64)
        self._in_order = InOrder(comm, count, lambda pair: whole.update(*pair), forward.device)
        whole.reset()

    def put(self, number: int, read: int, found: Measured) -> None:
        """Keep the values of a batch, for which so many samples were read."""
        if self._whole.names:
            self._in_order.put(number, (found.outputs, found.targets))
        row = [*(found.values[name] for name in self._names), read, found.samples, found.weight]
        self._rows[number] = torch.tensor(row, dtype=torch.float64)

    def add_up(self, arrived: Callable[[], None]) -> None:
        """Get the rows of all ranks; `arrived` is called before this one waits for them."""
        shared = self._rows.to(self._forward.device)
        arrived()
        self._comm.all_reduce(shared).wait()
        self._rows = shared.to("cpu")

    @property
    def samples(self) -> int:
        """Samples that were read."""
        return int(self._rows[:, -3].sum())

    def metrics(self) -> dict[str, float]:
        """Mean loss and metrics, by name, and the metrics of the whole dataset.

        Raises:
            RecipeError: the loss is a mean over nothing.
        """
        if not float(self._rows[:, -1:].sum()):
            raise RecipeError(
                f"the {self.samples} samples to validate on have the weight 0 together: there is "
                "nothing that the loss could be a mean of."
            )
        of_all = self._of_all() if self._whole.names else {}
        means = self.of_groups([0] * len(self._rows), 1)
        by_name = {name: mean for name, (mean,) in means.items()} | of_all
        return {name: by_name[name] for name in ("loss", *self._forward.recipe.metrics)}

    def of_groups(self, group: Sequence[int], groups: int) -> dict[str, list[float]]:
        """Mean loss and metrics of so many groups, by name; `group` is that of each batch."""
        if not groups:
            return {}
        table, _, counts, weights = self._rows.split([len(self._names), 1, 1, 1], dim=1)

        def total(rows: Tensor) -> Tensor:
            return rows.new_zeros(groups, rows.shape[1]).index_add_(0, torch.tensor(group), rows)

        means = total(table * counts) / total(counts)
        # by weight, as a batch's loss is its total
        means[:, 0] = total(table[:, :1])[:, 0] / total(weights)[:, 0]
        return dict(zip(self._names, means.T.tolist(), strict=True))

    def _of_all(self) -> dict[str, float]:
        """Metrics of the whole dataset: rank 0 gets all batches, and tells the others."""
        self._in_order.finish()
        whole, forward = self._whole, self._forward
        found = torch.zeros(len(whole.names), dtype=torch.float64, device=forward.device)
        if self._comm.rank == 0:
            forward.phase = "metrics"
            found.copy_(torch.tensor(whole.compute(), dtype=torch.float64))
        whole.reset()
        self._comm.broadcast(found)
        return dict(zip(whole.names, found.tolist(), strict=True))


def first_readable(loader: Loader, samples: int) -> Any:
    """A batch of one sample, for a worker that takes part in a pass and has no work in it.

    Raises:
        DataError: none of the first ones can be read.
    """
    tried = min(ATTEMPTS, samples)
    for index in range(tried):
        (read,) = loader.read([Slice(0, index, index + 1)])
        if read.size:
            return read.batch
    raise DataError(f"none of the first {tried} samples of an epoch can be read.")


def _cuts(sizes: Sequence[int], batch: int) -> tuple[list[Slice], list[int]]:
    """Batches of one participant after the other, and whose each is."""
    cuts, whose, begin = list[Slice](), list[int](), 0
    for number, size in enumerate(sizes):
        for first in range(0, size, batch):
            cuts.append(Slice(0, begin + first, begin + min(first + batch, size)))
            whose.append(number)
        begin += size
    return cuts, whose
