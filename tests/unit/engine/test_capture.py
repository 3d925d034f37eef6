"""What a snapshot gives back is what it was made of, also to optimizers that look at memory."""

import copy
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn

from instep.data.order import Position
from instep.engine.state.attributes import kept_beside
from instep.engine.state.average import Average
from instep.engine.state.capture import CommitProgress, capture, restore
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.update import Update
from instep.errors import CheckpointError
from instep.job.mesh import MeshSpec
from instep.recipe.optimizers.combined import CombinedOptimizer
from instep.recipe.optimizers.two_points import TwoPoints
from instep.state.boxes import MeshRank
from instep.worker.own.taken_over import take_over


class Nothing:
    """A strategy without memory."""

    def state(self):
        return {}

    def load_state(self, state):
        assert not state


class Turn(NamedTuple):
    """One update of a step."""

    name: str
    update: Update
    strategy: Nothing


def an_update(model, optimizer=None, scheduler=None):
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    parameters = list(model.parameters())
    return Update(optimizer, scheduler, parameters, seed=0, max_grad_norm=None, scaler=scaler)


def test_a_fused_optimizer_goes_on_with_weights_that_lie_in_memory_as_images_do():
    torch.manual_seed(3)
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    fresh, images = copy.deepcopy(model), torch.randn(5, 3, 2, 2)
    update = an_update(model)

    def step(of, by):
        of.zero_grad()
        of(images).square().sum().backward()
        by.apply(1)

    step(model, update)
    taken = capture(CommitProgress(), model, [Turn("", update, Nothing())])
    for group in taken.tensors.values():  # as files keep them
        for name, tensor in group.items():
            group[name] = tensor.clone(memory_format=torch.contiguous_format)
    again = an_update(fresh)
    restore(taken, "a test", fresh, [Turn("", again, Nothing())])
    for _ in range(2):
        step(model, update)
        step(fresh, again)
    assert torch.equal(model.weight, fresh.weight)


@pytest.mark.parametrize("rank", [None, MeshRank(MeshSpec(shard=2), 0)])
def test_what_an_optimizer_keeps_for_no_parameter_is_kept(rank):
    """A number, and a tensor, under names: as MADGRAD has its `k`."""
    model = nn.Linear(3, 2)
    turn, again = (Turn("", an_update(model), Nothing()) for _ in range(2))
    turn.update.optimizer.state["k"] = 3
    turn.update.optimizer.state["last"] = torch.arange(4.0)
    taken = capture(CommitProgress(), model, [turn], rank=rank)
    restore(taken, "a test", model, [again], rank=rank)
    found = again.update.optimizer.state
    assert found["k"] == 3
    assert torch.equal(found["last"], torch.arange(4.0))


def test_another_optimizer_or_scheduler_than_the_one_that_was_saved_is_named():
    model = nn.Linear(3, 2)
    adam = torch.optim.AdamW(model.parameters())
    steps = torch.optim.lr_scheduler.StepLR(adam, 3)
    taken = capture(CommitProgress(), model, [Turn("", an_update(model, adam, steps), Nothing())])
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    groups = torch.optim.AdamW([{"params": [each]} for each in model.parameters()])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 9)
    for update, message in (
        (an_update(model, sgd, steps), "optimizer has changed: SGD now, AdamW when"),
        (an_update(model, groups, steps), "groups of the optimizer has changed: 2 now, 1 when"),
        (an_update(model, adam, cosine), "scheduler has changed: CosineAnnealingLR now, StepLR"),
        (an_update(model, adam), "scheduler has changed: none now, StepLR when"),
    ):
        with pytest.raises(CheckpointError, match=message):
            restore(taken, "a test", model, [Turn("", update, Nothing())])


class TwoPointed(torch.optim.Optimizer):
    """Schedule-free SGD, as in its paper: trains at y, and gives x, the mean of the steps' z."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "training": True})

    def _move(self, training, by):
        for group in self.param_groups:
            for parameter in group["params"]:
                if group["training"] is not training and "z" in self.state[parameter]:
                    parameter.data.lerp_(self.state[parameter]["z"], by(group["beta"]))
            group["training"] = training

    def train(self):
        self._move(True, lambda beta: 1 - beta)

    def eval(self):
        self._move(False, lambda beta: 1 - 1 / beta)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            assert group["training"], "train() comes first"
            group["k"] += 1
            for parameter in group["params"]:
                z = self.state[parameter].setdefault("z", parameter.clone())
                x = parameter.lerp(z, 1 - 1 / group["beta"])
                z.sub_(parameter.grad, alpha=group["lr"])
                x.lerp_(z, 1 / group["k"])
                parameter.copy_(x.lerp_(z, 1 - group["beta"]))


def test_an_optimizer_with_two_points_gives_the_second_and_goes_on_at_the_first():
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    own, alone = TwoPointed(model.parameters()), TwoPointed(plain.parameters())
    points = TwoPoints([own], model)
    inputs = torch.randn(9, 4, 3)
    for batch in inputs:
        for of, by in ((model, own), (plain, alone)):
            of.zero_grad()
            of(batch).square().mean().backward()
            by.step()
        result = points.values()
        assert torch.equal(model.weight, plain.weight)  # not a bit was lost
    alone.eval()
    assert torch.equal(result["weight"], plain.weight)
    assert not torch.equal(result["weight"], model.weight)
    assert not TwoPoints([torch.optim.SGD(model.parameters(), lr=0.1)], model)


def test_an_optimizer_that_the_users_loop_has_switched_stays_where_it_is():
    model = nn.Linear(3, 2)
    optimizer = TwoPointed(model.parameters())
    give_back = take_over(
        loop := SimpleNamespace(
            optimizer=optimizer,
            scheduler=None,
            scaler=None,
            state=SimpleNamespace(two_points=TwoPoints([optimizer], model)),
            optimizer_step=lambda move: move(),
        )
    )
    for batch in torch.randn(3, 4, 3):
        model(batch).square().mean().backward()
        optimizer.step()
    points, trains_at = loop.state.two_points, model.weight.detach().clone()
    result = points.values()["weight"]
    optimizer.eval()
    assert torch.equal(points.values()["weight"], result)
    assert torch.equal(model.weight, result)
    assert not optimizer.param_groups[0]["training"]
    optimizer.train()
    assert torch.allclose(model.weight, trains_at)
    assert torch.allclose(points.values()["weight"], result)
    give_back()
    assert "eval" not in vars(optimizer)


def test_what_a_commit_gives_is_at_the_second_point_also_its_moving_average():
    model = nn.Linear(3, 2)
    optimizer = TwoPointed(model.parameters())
    state = CommittedState(model, [None])
    state.two_points = TwoPoints([optimizer], model)
    state.average, expected = Average(model, 0.5), torch.empty(0)
    for step, batch in enumerate(torch.randn(3, 4, 3), 1):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        result = state.two_points.values()["weight"]
        expected = result if step == 1 else expected.lerp(result, 0.5)
        state.commit(Commit(step, 0.5, None, told=False, ends=False), Position(0, 0, 4))
    with state.averaged():
        assert torch.allclose(model.weight, expected)
    state.average = None
    with state.averaged():
        assert torch.equal(model.weight, state.two_points.values()["weight"])


class SlowWeights(torch.optim.SGD):
    """Lookahead as people write it: slow weights in a list, moved in every twentieth step."""

    def __init__(self, params):
        params = list(params)
        super().__init__(params, lr=0.1)
        self.count, self.seen = 0, 0.0
        self.slow = [each.detach().clone() for each in params]

    def step(self, closure=None):
        super().step()
        self.count += 1
        if self.count % 20 == 0:
            self.slow = [each.detach().clone() for each in self.param_groups[0]["params"]]


class InOwnState(torch.optim.SGD):
    """What it keeps in `state` is not in its state dict."""

    def step(self, closure=None):
        super().step()
        own = self.state[self.param_groups[0]["params"][0]]
        own["memory"] = own.get("memory", 0) + 1

    def state_dict(self):
        return {**super().state_dict(), "state": {}}


def stepped(model, update, steps):
    for number in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 0.1)
        update.apply(number)


@pytest.mark.parametrize(
    ("make", "steps", "lost"),
    [
        (SlowWeights, 19, ["SlowWeights.count"]),
        (SlowWeights, 20, ["SlowWeights.count", "SlowWeights.slow"]),
        (InOwnState, 3, ["InOwnState.state"]),
        (lambda p: torch.optim.AdamW(p, lr=0.1), 3, []),
    ],
    ids=["count", "slow weights", "state", "of torch"],
)
def test_a_restored_state_names_what_optimizers_kept_beside_it(make, steps, lost):
    torch.manual_seed(3)
    model = nn.Linear(3, 2)
    start = copy.deepcopy(model)
    update = an_update(model, make(model.parameters()))
    stepped(model, update, steps)
    snapshot = capture(CommitProgress(), model, [Turn("", update, Nothing())])
    anew = an_update(start, make(start.parameters()))
    state = CommittedState(start, [Turn("", anew, Nothing())])
    assert state.lost == []
    state.restore(snapshot, "a checkpoint")
    assert state.lost == lost
    state.restore(capture(CommitProgress(), start, [Turn("", anew, Nothing())]), "itself")
    assert state.lost == []


def adam_of(model, names):
    every = dict(model.named_parameters())
    groups = [{"params": [every[n] for n in each]} for each in names]
    return torch.optim.AdamW(groups, lr=0.1)


def test_a_state_goes_to_the_parameters_of_its_names_in_whatever_order():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    fresh = copy.deepcopy(model)
    weights, biases = ["0.weight", "1.weight"], ["0.bias", "1.bias"]
    update = an_update(model, adam_of(model, [weights, biases]))
    for step in range(3):
        model.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        update.apply(step)
    snapshot = capture(CommitProgress(), model, [Turn("", update, Nothing())])
    other = an_update(fresh, adam_of(fresh, [weights[::-1], biases[::-1]]))
    restore(snapshot, "a checkpoint", fresh, [Turn("", other, Nothing())])
    names = dict(fresh.named_parameters())
    for name, own in model.named_parameters():
        mine, theirs = update.optimizer.state[own], other.optimizer.state[names[name]]
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), (name, key)
    wrong = an_update(fresh, adam_of(fresh, [["0.weight", "1.bias"], ["1.weight", "0.bias"]]))
    with pytest.raises(CheckpointError, match="groups of parameters has others now: "):
        restore(snapshot, "a checkpoint", fresh, [Turn("", wrong, Nothing())])


def test_hooks_of_several_optimizers_are_told_apart_by_their_order():
    def hooked(first, second):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        parts = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
        for part, number in zip(parts, (first, second), strict=True):
            part.register_step_pre_hook(lambda *_, number=number: None)
        return kept_beside(CombinedOptimizer(parts), None, model)

    assert all(hooked(1, 2) == hooked(1, 2) for _ in range(20))
    assert hooked(1, 2) != hooked(2, 1)
