"""Loss and metrics over a whole dataset, each sample counted once.

The batches are fixed by the job and dealt out whole. Every batch's values
go into a table in which each cell is filled by one worker, and the means are
taken over the finished table in one order; so the result has the same bits at
any number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from instep.comm.base import Comm
from instep.data.balance import deal
from instep.data.loader import Loader, Slice
from instep.run.forward import Forward


def evaluate(
    forward: Forward,
    loader: Loader,
    samples: int,
    batch: int,
    comm: Comm,
    speeds: Sequence[float] | None = None,
    arrived: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Mean loss and metrics over `samples` samples, in eval mode; every worker calls it.

    Args:
        forward: computes one batch.
        loader: of the dataset, in its natural order.
        samples: in the dataset.
        batch: samples of one forward pass.
        comm: the workers that share the work.
        speeds: of each, where they are not alike; who is slow gets fewer batches.
        arrived: called when this worker has done its part, and waits for the others.

    Returns:
        `loss` and each metric by name, equal on every worker.
    """
    names = ["loss", *forward.recipe.metrics]
    count = -(-samples // batch)
    table = torch.zeros(count, len(names), dtype=torch.float64)
    own = list(deal(count, comm.size, speeds)[comm.rank])
    was_training = forward.model.training
    forward.model.eval()
    try:
        batches = loader.load(_slices(own, batch, samples))
        for number, loaded in zip(own, batches, strict=True):
            values = forward.measure(loaded)
            table[number] = torch.tensor([values[name] for name in names], dtype=torch.float64)
    finally:
        forward.model.train(was_training)
    shared = table.to(forward.device)
    arrived()
    comm.all_reduce(shared).wait()
    table = shared.to("cpu")
    sizes = torch.tensor(
        [min(batch, samples - n * batch) for n in range(count)], dtype=torch.float64
    )
    means = (table * sizes[:, None]).sum(0) / samples
    return dict(zip(names, means.tolist(), strict=True))


def _slices(numbers: list[int], batch: int, samples: int) -> Iterator[Slice]:
    for number in numbers:
        yield Slice(0, number * batch, min((number + 1) * batch, samples))
