"""Evaluation between steps, on each of several processes: folder of runs. Prints what failed."""

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import instep

RUNS = sys.argv[1]


def main() -> None:
    train = {"global_batch": 8, "micro_batches": 4}
    session = instep.join(name="evaluates", runs=RUNS, train=train, quiet=True)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = torch.arange(11.0)[:, None]
    data = TensorDataset(rows, torch.arange(11))
    odd = DataLoader(data, batch_size=3, shuffle=True)  # 4 batches, the last of 2
    one_batch = DataLoader(data, batch_size=11)
    plateau = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    loader, few, optimizer, whole, model, plain, plateau = session.prepare(
        data, odd, optimizer, one_batch, model, TensorDataset(rows[:5]), plateau
    )
    assert (loader.dataset, few.dataset, whole.dataset) == (data, data, data)
    assert (loader.batch_size, few.batch_size, whole.batch_size) == (2, 3, 11)
    assert not hasattr(loader, "sampler")
    for x, _ in loader:
        assert len(x) <= loader.batch_size
        session.backward(model(x).pow(2).mean())
        if session.sync_gradients:
            (every,) = session.gather_for_metrics((x,))
            assert every.dim() == 2
        optimizer.step()

    seen, numbers, means = [], [], []
    for x, number in few:
        with torch.no_grad():
            of_all = session.gather_for_metrics({"out": [model(x)], "number": (number, x.mean())})
        seen.append(of_all["out"][0])
        numbers.append(of_all["number"][0])
        means.append(of_all["number"][1])
    assert torch.cat(numbers).tolist() == list(range(11))
    assert torch.equal(torch.cat(means), torch.tensor([1.0, 4.0, 7.0, 9.5]))
    plainly = [model(rows[first : first + 3]) for first in range(0, 11, 3)]
    assert torch.equal(torch.cat(seen), torch.cat(plainly).detach()), "the same bits"

    count = total = 0.0
    for x, number in few:  # nothing is gathered: each process has its own alone
        count, total = count + len(x), total + float(number.sum())
    assert session.sum(count, total) == (11.0, 55.0)
    assert session.sum(0.1 * (1 + session.rank))[0] == sum_of_tenths(session.size)

    for (x,) in plain:
        assert len(session.gather_for_metrics(x)) == 5
    for x, _ in whole:  # fewer batches than processes
        assert session.gather_for_metrics(x).flatten().tolist() == list(range(11))
    told = refused(lambda: [None for _ in whole])
    assert ("has 1 batches for" in told) == (session.rank > 0), told
    assert "was given 3: tensors are wanted" in refused(lambda: session.gather_for_metrics([3]))
    for metric in (2.0, 3.0):
        plateau.step(metric)
    assert plateau.get_last_lr() == [0.005]
    differs = refused(lambda: plateau.step(4.0 + session.rank))
    assert ("was given 4 in one process and 5 in another" in differs) == (session.size > 1)
    session.close()
    if session.rank == 0:
        print("all of it")


def refused(act: Callable[[], Any]) -> str:
    try:
        act()
    except instep.InstepError as error:
        return str(error)
    return ""


def sum_of_tenths(size: int) -> float:
    return math.fsum(0.1 * (1 + rank) for rank in range(size))


if __name__ == "__main__":
    main()
