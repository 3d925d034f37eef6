"""Training goes on from a copy in memory as if what came after it had not been."""

import pytest
import torch
from torch import nn

from instep.engine.state.capture import CommitProgress
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.integrity.clean_copy import CleanCopy
from instep.sync.base import make_strategy


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
        self.strategy = make_strategy("all_reduce", {})
        turn = TurnState("", parameters, self.update, self.strategy)
        self.held = CommittedState(self.model, [turn])
        self.copy = CleanCopy(self.held)

    def train(self, steps):
        for _ in range(steps):
            step = self.held.progress.step + 1
            self.model(torch.full((2, 3), step / 7)).square().sum().backward()
            self.update.apply(step)
            self.update.optimizer.zero_grad()
            self.held.progress = CommitProgress(
                step, self.held.progress.course, 0.5 * step, 3 * step
            )
            self.held.last = Commit(step, 0.5, None, False, False)
            self.held.settled = step

    def state(self):
        live = self.held.capture()
        del live.facts["course"]
        tensors = {g: {n: t.tolist() for n, t in ts.items()} for g, ts in live.tensors.items()}
        return tensors, live.facts, live.step


@pytest.mark.parametrize("before", [0, 3])
def test_what_was_trained_after_the_copy_is_as_if_it_had_not_been(before):
    worker = Worker()
    worker.train(before)
    worker.strategy.load_state({"lattice": torch.tensor([1])})
    wanted = worker.state()
    worker.copy.keep()
    worker.train(4)
    worker.strategy.load_state({"lattice": torch.tensor([2])})
    assert worker.state() != wanted
    worker.copy.give_back()
    assert worker.state() == wanted
    assert worker.held.settled == worker.copy.step == before
    assert worker.held.progress.course == 1
    assert (worker.held.last.step if before else worker.held.last) == (before or None)


def test_training_from_the_copy_leaves_the_copy_alone():
    worker = Worker()
    worker.train(2)
    worker.copy.keep()
    wanted = worker.state()
    for _ in range(2):
        worker.copy.give_back()
        worker.train(3)
    worker.copy.give_back()
    assert worker.state() == wanted


def test_a_newer_copy_takes_the_place_and_the_memory_of_the_one_before():
    worker = Worker()
    worker.train(1)
    worker.copy.keep()
    places = {t.data_ptr() for g in worker.copy._kept.tensors.values() for t in g.values()}
    worker.train(1)
    worker.copy.keep()
    wanted = worker.state()
    assert places == {t.data_ptr() for g in worker.copy._kept.tensors.values() for t in g.values()}
    worker.train(3)
    worker.copy.give_back()
    assert worker.state() == wanted


def test_tied_weights_stay_tied():
    worker = Worker()
    worker.copy.keep()
    worker.train(1)
    worker.copy.give_back()
    assert worker.model.first.weight is worker.model.second.weight
