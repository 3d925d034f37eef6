"""The norm of an agreed gradient: computed where it is wanted, of what the optimizer will use."""

import math

import pytest
import torch
from torch import nn

from instep.engine.update import Update, global_norm


def model_with_gradients():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3, sparse=True), nn.Linear(3, 2))
    model(torch.tensor([1, 1, 4])).square().sum().backward()
    return model


def update_of(parameters, max_grad_norm=None, measure=False, scaler=None):
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    return Update(
        optimizer,
        None,
        parameters,
        seed=0,
        max_grad_norm=max_grad_norm,
        scaler=scaler,
        measure=measure,
    )


def test_the_global_norm_is_that_of_all_gradients_as_one_vector_sparse_ones_among_them():
    model = model_with_gradients()
    whole = torch.cat([p.grad.to_dense().reshape(-1) for p in model.parameters()])
    assert global_norm(model.parameters()) == pytest.approx(float(whole.norm()), rel=1e-6)
    assert global_norm([nn.Parameter(torch.ones(2))]) == 0.0


@pytest.mark.parametrize(
    ("wants", "known"),
    [({}, False), ({"max_grad_norm": 0.5}, True), ({"measure": True}, True)],
)
def test_the_norm_is_that_before_clipping_and_there_only_if_somebody_wants_it(wants, known):
    parameters = list(model_with_gradients()[1].parameters())
    norm = global_norm(parameters)
    assert norm > 0.5
    found = update_of(parameters, **wants).apply(1)
    assert found == (pytest.approx(norm) if known else None)


@pytest.mark.parametrize("wants", [{"max_grad_norm": 100.0}, {"measure": True}])
def test_of_a_scaled_loss_the_norm_is_unscaled_and_a_step_that_is_left_out_has_none(wants):
    """On the CPU, where the scaler's arithmetic is that of float16 on CUDA."""
    weight = nn.Parameter(torch.zeros(2))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    update = update_of([weight], scaler=scaler, **wants)
    for gradient, norm in (([math.inf, 0.0], None), ([3.0, 4.0], 5.0)):
        before = weight.detach().clone()
        scaler.scale(torch.zeros(1))  # makes the scale, as a pass does
        weight.grad = torch.tensor(gradient) * scaler.get_scale()
        assert update.apply(1) == norm
        assert torch.equal(weight, before) == (norm is None)


class Noisy(torch.optim.SGD):
    """Draws at each step, as Langevin dynamics does."""

    def step(self, closure=None):
        self.drawn = float(torch.randn(1))
        return super().step(closure)


def test_an_optimizer_draws_the_same_at_a_step_again_and_others_at_each_step_and_turn():
    weight = nn.Parameter(torch.ones(3))
    drawn = []
    for step, turn in ((1, 0), (2, 0), (1, 1), (1, 0)):
        optimizer, weight.grad = Noisy([weight], lr=0.1), torch.ones(3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        more = {"max_grad_norm": None, "scaler": scaler, "turn": turn}
        Update(optimizer, None, [weight], seed=3, **more).apply(step)
        drawn.append(optimizer.drawn)
    assert drawn[3] == drawn[0]
    assert len(set(drawn)) == 3
