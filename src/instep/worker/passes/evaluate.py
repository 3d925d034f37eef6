"""Loss and metrics over a whole dataset, each sample counted once.

The job fixes the batches, and each is computed by one worker. Their values go into one table,
and the means are taken over the finished table in a fixed order. So the result has the same bits
at any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.data.dealing import deal
from instep.data.loader import Loader, Skipped, Slice
from instep.errors import DataError, RecipeError
from instep.parallel.nested import on_tensors
from instep.recipe.forward import Forward
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


def evaluate(
    forward: Forward,
    loader: Loader,
    samples: int,
    batch: int,
    comm: Comm,
    speeds: Sequence[float] | None = None,
    workers: int | None = None,
    rank: int | None = None,
    tells: bool = True,
    arrived: Callable[[], None] = lambda: None,
    lockstep: bool = False,
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
        speeds: of each worker, if they differ; a slow one gets fewer batches. In lockstep
            none does.
        workers: how many share the work; all ranks, if left out.
        rank: which of these this one is; its rank in `comm`, if left out. Several ranks may be
            the same one.
        tells: whether this rank tells what it computes; one does, of those that are the same.
        arrived: called when this worker has finished and waits for the others.
        lockstep: whether ranks compute a batch together, so that all must run equally many.
        sizes: samples of each participant, which stand one after the other; none where the dataset
            is not divided.
        as_participant: where it is divided: the model is a participant's, in this context.

    Raises:
        DataError: no sample could be read.
        RecipeError: the loss is a mean over nothing.
    """
    whole = WholeMetrics(forward.recipe.metrics)
    names = ["loss", *(name for name in forward.recipe.metrics if name not in whole.names)]
    cuts, whose = _cuts(sizes or [samples], batch)
    count = len(cuts)
    # the last columns: samples read, samples in the batch, and the weight of the loss
    table = torch.zeros(count, len(names) + 3, dtype=torch.float64)
    skipped: list[Skipped] = []
    dealt = deal(count, workers or comm.size, None if lockstep else speeds)
    rank = comm.rank if rank is None else rank
    own = list(dealt[rank]) if rank < len(dealt) else []
    beside = max(map(len, dealt)) - len(own) if lockstep else 0
    in_order = InOrder(comm, count, lambda pair: whole.update(*pair), forward.device)
    whole.reset()
    was_training = forward.model.training
    forward.model.eval()
    try:
        reads = loader.read(cuts[number] for number in own)
        for number, read in zip(own, reads, strict=True):
            skipped += read.skipped if tells else []
            if read.size:
                with as_participant(whose[number]) if sizes and as_participant else nullcontext():
                    found = forward.measure(read.batch, read.size)
                if tells and found is not None:
                    values, weight = found.values, found.weight
                    if whole.names:
                        in_order.put(number, (found.outputs, found.targets))
                    row = [*(values[name] for name in names), read.size, found.samples, weight]
                    table[number] = torch.tensor(row, dtype=torch.float64)
            else:
                beside += lockstep
        if beside:
            spare = first_readable(loader, samples)
            for _ in range(beside):
                forward.measure(on_tensors(spare, Tensor.clone), 1)
    finally:
        forward.model.train(was_training)
    shared = table.to(forward.device)
    arrived()
    comm.all_reduce(shared).wait()
    table, taken, counts, weights = shared.to("cpu").split([len(names), 1, 1, 1], dim=1)
    read_in_all = int(taken.sum())
    if not read_in_all:
        example = f"; of sample {skipped[0].sample}: {skipped[0].cause}" if skipped else ""
        raise DataError(f"none of the {samples} samples to validate on can be read{example}.")
    if not float(weights.sum()):
        raise RecipeError(
            f"the {read_in_all} samples to validate on have the weight 0 together: there is "
            "nothing that the loss could be a mean of."
        )
    of_all = _of_all(whole, in_order, comm, forward) if whole.names else {}
    means = _means(table, counts, weights, torch.zeros(count, dtype=torch.int64), 1)[:, 0]
    each: Sequence[Tensor] = ()
    if sizes:
        each = tuple(_means(table, counts, weights, torch.tensor(whose), len(sizes)))
    by_name = dict(zip(names, means.tolist(), strict=True)) | of_all
    return Evaluation(
        {name: by_name[name] for name in ("loss", *forward.recipe.metrics)},
        read_in_all,
        skipped,
        {name: values.tolist() for name, values in zip(names, each, strict=False)},
    )


def _of_all(
    whole: WholeMetrics, in_order: InOrder, comm: Comm, forward: Forward
) -> dict[str, float]:
    """Metrics of the whole dataset: rank 0 gets all batches, and tells the others."""
    in_order.finish()
    found = torch.zeros(len(whole.names), dtype=torch.float64, device=forward.device)
    if comm.rank == 0:
        forward.phase = "metrics"
        found.copy_(torch.tensor(whole.compute(), dtype=torch.float64))
    whole.reset()
    comm.broadcast(found)
    return dict(zip(whole.names, found.tolist(), strict=True))


def _means(table: Tensor, counts: Tensor, weights: Tensor, group: Tensor, groups: int) -> Tensor:
    """[names, groups] of the rows of each group: by samples, but the loss by weight."""

    def total(rows: Tensor) -> Tensor:
        return rows.new_zeros(groups, rows.shape[1]).index_add_(0, group, rows)

    means = total(table * counts) / total(counts)
    means[:, 0] = total(table[:, :1])[:, 0] / total(weights)[:, 0]  # a batch's loss is its total
    return means.T


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
