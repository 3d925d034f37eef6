"""Training goes on from a copy in memory as if what came after it had not been."""

import pytest
import torch
from torch import nn

from instep.integrity.clean_copy import CleanCopy
from instep.worker.saving import TakenUp, gather
from instep.worker.standing import Committed
from instep.worker.update import Update


class Standing:
    """What a copy takes from a worker's standing, and gives back."""

    def __init__(self):
        self.carried, self.last, self.settled = TakenUp(), None, 0


class Tied(nn.Module):
    """Tied weights, a buffer, and one that is not kept in a checkpoint."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("seen", torch.zeros(2))
        self.register_buffer("aside", torch.zeros(2), persistent=False)

    def forward(self, x):
        self.seen += 1
        self.aside += 2
        return self.second(torch.tanh(self.first(x)))


class Worker:
    def __init__(self):
        torch.manual_seed(2)
        self.model = Tied()
        parameters = list(self.model.parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        self.update = Update(
            optimizer,
            torch.optim.lr_scheduler.StepLR(optimizer, 2),
            parameters,
            seed=0,
            max_grad_norm=None,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self.standing = Standing()
        self.copy = CleanCopy(self.model, self.update, self.standing)

    def train(self, steps):
        for _ in range(steps):
            step = self.standing.carried.step + 1
            self.model(torch.full((2, 3), step / 7)).square().sum().backward()
            self.update.apply(step)
            self.update.optimizer.zero_grad()
            self.standing.carried = TakenUp(step, {}, 0.5 * step, 3 * step)
            self.standing.last = Committed(step, 0.5, None, False, False)
            self.standing.settled = step

    def state(self):
        carried = self.standing.carried._replace(strategy={})  # looked at by itself
        live = gather(carried, self.model, self.update)
        live.tensors["aside"] = {"aside": self.model.aside}
        tensors = {g: {n: t.tolist() for n, t in ts.items()} for g, ts in live.tensors.items()}
        return tensors, live.facts, self.standing.carried[0], self.standing.carried[2:]


@pytest.mark.parametrize("before", [0, 3])
def test_what_was_trained_after_the_copy_is_as_if_it_had_not_been(before):
    worker = Worker()
    worker.train(before)
    wanted = worker.state()
    worker.copy.keep({"lattice": torch.tensor([1])})
    worker.train(4)
    assert worker.state() != wanted
    worker.copy.give_back()
    assert worker.state() == wanted
    assert worker.standing.settled == worker.copy.step == before
    assert worker.standing.carried.strategy["lattice"].tolist() == [1]
    assert (worker.standing.last.step if before else worker.standing.last) == (before or None)


def test_training_from_the_copy_leaves_the_copy_alone():
    worker = Worker()
    worker.train(2)
    worker.copy.keep({})
    wanted = worker.state()
    for _ in range(2):
        worker.copy.give_back()
        worker.train(3)
    worker.copy.give_back()
    assert worker.state() == wanted


def test_a_newer_copy_takes_the_place_and_the_memory_of_the_one_before():
    worker = Worker()
    worker.train(1)
    worker.copy.keep({})
    places = {t.data_ptr() for g in worker.copy._kept.tensors.values() for t in g.values()}
    worker.train(1)
    worker.copy.keep({})
    wanted = worker.state()
    assert places == {t.data_ptr() for g in worker.copy._kept.tensors.values() for t in g.values()}
    worker.train(3)
    worker.copy.give_back()
    assert worker.state() == wanted


def test_tied_weights_stay_tied():
    worker = Worker()
    worker.copy.keep({})
    worker.train(1)
    worker.copy.give_back()
    assert worker.model.first.weight is worker.model.second.weight
