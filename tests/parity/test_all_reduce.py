"""Training on any number of ranks equals one big batch on one process, to rounding."""

import copy

import pytest
import torch
from recipes import regression
from safetensors.torch import load_file
from torch import nn

import instep
from helpers import Table, batches, epochs, far_apart, train
from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks

RANKS = [1, 2, 3, 4, 5, 8]
NEAR = {torch.float32: 1e-6, torch.float64: 1e-12}
GLOBAL_BATCH = 12  # 37 samples: the last batch of an epoch has one, fewer than there are ranks


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-3)


def adamw(parameters):
    # eps far above rounding: else a gradient of nearly zero takes a full step in either direction
    return torch.optim.AdamW(parameters, lr=5e-3, eps=1e-3)


def schedule(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)


class Mixed(nn.Module):
    """Frozen, shared and unused parameters, and no layer that sees its batch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.second(torch.tanh(self.first(x))))))


def made(cls, dtype):
    torch.manual_seed(11)
    return cls().to(dtype)


def one_big_batch(model, make_optimizer, table, *, steps, clip):
    """The reference: plain PyTorch, one process, the whole global batch in one pass."""
    model = copy.deepcopy(model).train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    scheduler = schedule(optimizer)
    losses = []
    for inputs, targets in batches(table, GLOBAL_BATCH, steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return dict(model.state_dict()), losses


@pytest.mark.grid
@pytest.mark.parametrize("merge", [False, True], ids=["micro-batches", "merged"])
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_training_equals_one_big_batch(ranks, dtype, make_optimizer, merge):
    table, model = Table(37, dtype=dtype), made(Mixed, dtype)
    steps = epochs(table, GLOBAL_BATCH, 2)
    whole, losses = one_big_batch(model, make_optimizer, table, steps=steps, clip=0.4)
    settings = {
        "steps": steps,
        "global_batch": GLOBAL_BATCH,
        "merge": merge,
        "clip": 0.4,
        "schedule": schedule,
    }
    for state, own in run_ranks(
        ranks, lambda comm: train(comm, model, make_optimizer, table, **settings)
    ):
        assert far_apart(state, whole) < NEAR[dtype]
        # the loss travels as a note, in the type of the last bucket
        torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=1e-6, atol=0)
        assert torch.equal(state["unused"], model.unused)
        assert torch.equal(state["first.bias"], model.first.bias)


class Normed(nn.Module):
    """Running statistics that every forward pass moves."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.first(x))))


@pytest.mark.grid
@pytest.mark.parametrize("dtype", NEAR, ids=str)
@pytest.mark.parametrize("ranks", RANKS)
def test_batch_normalisation_gives_the_same_at_every_number_of_ranks(ranks, dtype):
    table, model = Table(48, dtype=dtype), made(Normed, dtype)
    settings = {"steps": epochs(table, 24, 3), "global_batch": 24, "micro_batches": 8, "clip": 1.0}
    whole, losses = train(AloneComm(), model, sgd, table, **settings)
    assert whole["norm.num_batches_tracked"] == settings["steps"]
    assert not torch.equal(whole["norm.running_mean"], model.norm.running_mean)
    results = run_ranks(ranks, lambda comm: train(comm, model, sgd, table, **settings))
    for state, own in results:
        assert far_apart(state, whole) < NEAR[dtype]
        torch.testing.assert_close(torch.tensor(own), torch.tensor(losses), rtol=1e-6, atol=0)
        for name, tensor in state.items():
            assert torch.equal(tensor, results[0][0][name]), f"{name} differs between ranks"


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_bfloat16_autocast_differs_by_the_rounding_of_its_passes_only(ranks):
    """A bfloat16 product keeps 8 bits, so a gradient is off by about 2**-8 of itself.

    Four times that, as a share of the way that the parameters travelled, is room
    for three layers; a wrong weight would cost a tenth of the way and more.
    """
    table, model = Table(37), made(Mixed, torch.float32)
    settings = {"steps": 8, "global_batch": GLOBAL_BATCH, "autocast": True}
    whole, _ = train(AloneComm(), model, sgd, table, merge=True, **settings)
    start = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    way = far_apart(start, whole)
    for state, _ in run_ranks(ranks, lambda comm: train(comm, model, sgd, table, **settings)):
        assert far_apart(state, whole) < 4 * 2**-8 * way


@pytest.mark.parametrize("options", [{"bucket_mb": 0.0001}, {"overlap": False}])
def test_how_gradients_travel_does_not_change_what_they_are(options):
    table, model = Table(37), made(Mixed, torch.float32)
    ways = [
        run_ranks(3, lambda comm, o=o: train(comm, model, adamw, table, steps=8, options=o))[0]
        for o in ({}, options)
    ]
    assert far_apart(ways[0][0], ways[1][0]) < 1e-7


@pytest.fixture(scope="module")
def models_of_workers(tmp_path_factory):
    """The model that real processes leave behind, by their number."""
    runs = tmp_path_factory.mktemp("runs")
    train_ = {"epochs": 3, "global_batch": 12, "micro_batches": 4, "max_grad_norm": 0.5}
    return {
        workers: load_file(
            instep.train(
                regression, workers=workers, runs=runs, seed=4, quiet=True, train=train_
            ).path
            / "model.safetensors"
        )
        for workers in (1, 2, 3)
    }


@pytest.mark.tail
@pytest.mark.process
@pytest.mark.parametrize("workers", [2, 3])
def test_real_processes_leave_the_model_that_one_process_leaves(models_of_workers, workers):
    assert far_apart(models_of_workers[workers], models_of_workers[1]) < 1e-6


@pytest.mark.tail
@pytest.mark.process
def test_the_shared_statistics_of_real_processes_have_counted_every_step_once(models_of_workers):
    for model in models_of_workers.values():
        assert int(model["norm.num_batches_tracked"]) == 3 * 5
