"""Row-wise Adagrad against its formula, and several optimizers as one against each alone."""

import copy

import pytest
import torch
from torch import nn

import instep
from instep.errors import RecipeError
from instep.recipe.build import build
from instep.recipe.optimizers.combined import CombinedOptimizer, parts_of

STEPS = 4


def gradients(shape, rows):
    generator = torch.Generator().manual_seed(len(shape))
    for _ in range(STEPS):
        dense = torch.zeros(shape, dtype=torch.float64)
        touched = torch.randperm(shape[0], generator=generator)[:rows]
        dense[touched] = torch.randn(rows, *shape[1:], generator=generator, dtype=torch.float64)
        yield dense


@pytest.mark.parametrize("shape", [(7, 3), (6,), (5, 2, 4)])
@pytest.mark.parametrize("initial", [0.0, 0.3])
@pytest.mark.parametrize("sparse", [False, True])
def test_row_wise_adagrad_follows_its_formula(shape, initial, sparse):
    """w -= lr * g / (sqrt(s) + eps), where s adds up the mean of the squares of each row."""
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameter, wanted = nn.Parameter(start.clone()), start.clone()
    optimizer = instep.RowwiseAdagrad([parameter], 0.2, 1e-3, initial)
    total = torch.full((shape[0],), initial, dtype=torch.float64)
    for gradient in gradients(shape, 4):
        for row in range(shape[0]):
            total[row] += gradient[row].square().mean()
            if gradient[row].count_nonzero():
                wanted[row] -= 0.2 * gradient[row] / (total[row].sqrt() + 1e-3)
        parameter.grad = gradient.to_sparse(1) if sparse else gradient
        optimizer.step()
    torch.testing.assert_close(parameter.detach(), wanted, rtol=1e-12, atol=1e-14)
    assert optimizer.state[parameter]["sum"].shape == shape[:1]


@pytest.mark.parametrize(("name", "value"), [("lr", -0.1), ("eps", 0.0), ("lr", float("nan"))])
def test_row_wise_adagrad_refuses_odd_values(name, value):
    with pytest.raises(RecipeError, match=rf"RowwiseAdagrad: {name}"):
        instep.RowwiseAdagrad([nn.Parameter(torch.zeros(2))], **{name: value})


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))


def make(model):
    return [
        torch.optim.SparseAdam(model[0].parameters(), lr=0.1),
        torch.optim.SGD(model[1].parameters(), lr=0.2, momentum=0.9),
    ]


def train(model, step, steps):
    for number in steps:
        model.zero_grad()
        model(torch.tensor([number, 3, number])).square().sum().backward()
        step()


def test_several_optimizers_are_one_for_schedulers_and_for_states():
    alone, model = net(), net()
    every = make(alone)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 1, 0.5) for each in every]

    def step():
        for each in (*every, *schedulers):
            each.step()

    train(alone, step, range(6))
    one = CombinedOptimizer(make(model))
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
    train(model, lambda: (one.step(), scheduler.step()), range(3))
    kept, rates = copy.deepcopy(one.state_dict()), scheduler.state_dict()
    one = CombinedOptimizer(make(model))
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1, 0.5)
    one.load_state_dict(kept)
    scheduler.load_state_dict(rates)
    train(model, lambda: (one.step(), scheduler.step()), range(3, 6))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert [type(each).__name__ for each in parts_of(one)] == ["SparseAdam", "SGD"]


class Counting(torch.optim.SGD):
    """Keeps a number for no parameter, under a name, as MADGRAD does."""

    @torch.no_grad()
    def step(self, closure=None):
        number = self.state["k"] = self.state.get("k", 0) + 1
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / number)


def test_a_number_beside_the_parameters_is_that_of_one_optimizer():
    def several(model):
        return [Counting([parameter], lr=0.1) for parameter in model.parameters()]

    def trained(model, optimizers, steps):
        for number in steps:
            for scale, parameter in enumerate(model.parameters(), start=1):
                parameter.grad = torch.full_like(parameter, float(number * scale))
            for each in optimizers:
                each.step()

    alone, model = nn.Linear(3, 2), nn.Linear(3, 2)
    model.load_state_dict(alone.state_dict())
    trained(alone, several(alone), range(5))
    one = CombinedOptimizer(several(model))
    assert type(one).__name__ == "Counting"
    trained(model, [one], range(3))
    kept = copy.deepcopy(one.state_dict())
    assert kept["state"] == {"0.k": 3, "1.k": 3}
    one = CombinedOptimizer(several(model))
    one.load_state_dict(kept)
    trained(model, [one], range(3, 5))
    for found, wanted in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(found, wanted)


def recipe(optimizer):
    return instep.Recipe(
        model=net,
        train=[0],
        compute_loss=lambda model, batch: model(batch).sum(),
        parameters=lambda model: model,
        optimizer=optimizer,
    )


def test_a_recipe_may_return_a_list_of_optimizers():
    built = build(recipe(make), 0, torch.device("cpu"), 1)
    assert isinstance(built.optimizer, CombinedOptimizer)
    assert len(built.optimizer.param_groups) == 2


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (lambda model: [], "empty list"),
        (lambda model: [*make(model), *make(model)], "hold the same parameter"),
        (lambda model: make(model)[:1], "would never be trained"),
        (lambda model: [*make(model)[:1], torch.optim.LBFGS(model[1].parameters())], "LBFGS"),
        (lambda model: [None], r"torch\.optim\.Optimizer is wanted, or a list"),
    ],
)
def test_a_list_that_does_not_fit_is_refused(optimizer, message):
    with pytest.raises(RecipeError, match=message):
        build(recipe(optimizer), 0, torch.device("cpu"), 1)
