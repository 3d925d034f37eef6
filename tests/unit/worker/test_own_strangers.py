"""What an own loop trains without `prepare` knowing of it is refused by name; the rest goes on."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn

from instep.errors import SpecError
from instep.worker.own.strangers import Strangers


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.W = nn.Parameter(torch.ones(3, 2))

    def forward(self, outputs):
        return (outputs @ self.W.T).square().mean()


class Loop:
    """Iterations of a loop as `OwnLoop` has them."""

    def __init__(self):
        self.model, self.now = nn.Linear(4, 2), None
        self.strangers = Strangers(self.model, lambda: self.now)
        self.inputs = torch.ones(5, 4)

    def run(self, passes, *, backward, move=lambda: None):
        for number in range(1, passes + 1):
            self.now = number
            loss = backward(self)
            self.strangers.look(loss, epoch=0)
            loss.backward()
            move()
        self.now = None


@contextmanager
def loop():
    made = Loop()
    try:
        yield made
    finally:
        made.strangers.close()


def by_hand(criterion):
    criterion.W.data -= 0.1 * criterion.W.grad


def by_an_optimizer(criterion):
    torch.optim.SGD(criterion.parameters(), lr=0.1).step()


@pytest.mark.parametrize("move", [by_hand, by_an_optimizer])
def test_a_loss_that_is_trained_beside_the_model_is_named(move):
    criterion = Centres()
    with loop() as it, pytest.raises(SpecError, match=r"'W' of Centres, which prepare\(\) does"):
        it.run(2, backward=lambda it: criterion(it.model(it.inputs)), move=lambda: move(criterion))


def test_an_optimizer_that_steps_in_two_iterations_is_named_though_its_graph_was_not_seen():
    other = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(other.parameters())

    def move():
        other(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with loop() as it, pytest.raises(SpecError, match=r"Adam.step\(\) was called.* and 1 more"):
        it.run(2, backward=lambda it: it.model(it.inputs).mean(), move=move)


def test_what_lives_for_an_iteration_and_what_is_never_moved_goes_on():
    teacher = nn.Linear(2, 2)  # its parameters get gradients, which nobody uses
    before = nn.Linear(2, 2)
    outside = torch.optim.SGD(before.parameters(), lr=0.1)

    def attacked(it):
        change = torch.zeros_like(it.inputs, requires_grad=True)
        attack = torch.optim.SGD([change], lr=0.1, maximize=True)
        it.model(it.inputs + change).square().mean().backward()
        attack.step()
        return teacher(it.model(it.inputs + change)).mean()

    with loop() as it:
        it.run(4, backward=attacked)
        for _ in range(2):
            outside.step()


def test_an_optimizer_that_another_thread_steps_meanwhile_goes_on():
    """As a test's or a notebook's second run in this process."""
    other = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(other.parameters())

    def move():
        with ThreadPoolExecutor(1) as pool:
            other(torch.ones(1, 2)).sum().backward()
            pool.submit(optimizer.step).result()

    before = other.weight.detach().clone()
    with loop() as it:
        it.run(3, backward=lambda it: it.model(it.inputs).mean(), move=move)
    assert not torch.equal(other.weight, before)
