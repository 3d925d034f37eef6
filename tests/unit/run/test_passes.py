"""Shares cover a step exactly, and merging is refused where a layer could tell."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from instep.comm.alone import AloneComm
from instep.data.order import Position
from instep.run.forward import Forward
from instep.run.passes import may_merge, parts_of, plan, ranges_of, share_of
from instep.run.recipe import Recipe
from instep.spec import JobSpec, TrainSpec

CPU = torch.device("cpu")


SPEEDS = st.lists(st.sampled_from([0.01, 0.2, 1.0, 1.1, 3.0]), min_size=9, max_size=9)


@given(
    first=st.integers(0, 1000),
    size=st.integers(1, 60),
    micro_batches=st.integers(1, 20),
    workers=st.integers(1, 9),
    merge=st.booleans(),
    speeds=st.none() | SPEEDS,
)
def test_the_shares_of_all_workers_cover_the_positions_of_a_step_exactly(
    first, size, micro_batches, workers, merge, speeds
):
    where = Position(3, first, first + size)
    known = {"merge": merge, "speeds": speeds and speeds[:workers]}
    shares = [share_of(where, micro_batches, workers, n, **known) for n in range(workers)]
    covered = [i for s in shares for p in s.passes for i in range(p.samples.first, p.samples.stop)]
    assert covered == list(range(first, first + size))
    for share in shares:
        assert sum(one.size for one in share.passes) == share.stop - share.first
        assert all(one.size > 0 and one.samples.epoch == 3 for one in share.passes)
        assert not merge or speeds or len(share.passes) <= 1
    ranges = ranges_of(where, micro_batches, workers, known["speeds"])
    assert ranges == [(share.first, share.stop) for share in shares]


@given(micro_batches=st.integers(1, 40), workers=st.integers(1, 9), speeds=SPEEDS)
def test_no_merged_pass_is_larger_than_the_even_deal_makes_it(micro_batches, workers, speeds):
    where, most = Position(0, 0, 3 * micro_batches), 3 * -(-micro_batches // workers)
    for rank in range(workers):
        share = share_of(where, micro_batches, workers, rank, merge=True, speeds=speeds[:workers])
        sizes = [part.size for part in share.passes]
        assert max(sizes, default=0) <= most
        assert len(sizes) == -(-sum(sizes) // most)


@given(
    micro_batches=st.integers(1, 12),
    size=st.integers(1, 40),
    workers=st.integers(1, 6),
    speeds=SPEEDS,
)
def test_a_micro_batch_holds_the_same_samples_whoever_computes_it(
    micro_batches, size, workers, speeds
):
    where = Position(0, 0, size)

    def cut(number_of_workers, speeds=None):
        shares = [
            share_of(where, micro_batches, number_of_workers, n, merge=False, speeds=speeds)
            for n in range(number_of_workers)
        ]
        return {one.number: one.samples for share in shares for one in share.passes}

    assert cut(workers) == cut(1) == cut(workers, speeds[:workers])


def test_a_worker_may_have_no_pass_in_a_short_step():
    share = share_of(Position(0, 60, 61), 8, 4, 0, merge=True)
    assert share.passes == []
    assert share.first == share.stop == 60


def test_a_plan_goes_through_epochs_without_a_gap():
    job = JobSpec(recipe="a.py:f", train=TrainSpec(global_batch=16))
    steps = list(plan(job, 37, 1, 6, AloneComm(), merge=True))
    assert [where for where, _ in steps] == [
        Position(epoch, first, min(first + 16, 37)) for epoch in (0, 1) for first in (0, 16, 32)
    ]
    later = list(plan(job, 37, 4, 6, AloneComm(), merge=True))
    assert later == steps[3:]


class CentredByBatch(nn.Module):
    """A layer of the user's own that no list of layers could know."""

    def forward(self, x):
        return x - x.mean(0)


class NoisyByTorch(nn.Module):
    def forward(self, x):
        return x + 0.0 * torch.rand(x.shape)


def verdict(*layers, loss=nn.functional.mse_loss, dtype=torch.float32, precision="float32"):
    torch.manual_seed(0)
    model = nn.Sequential(*layers).to(dtype)
    inputs, targets = torch.randn(7, 1, 4, 4, dtype=dtype), torch.randn(7, 2, dtype=dtype)
    recipe = Recipe(model=model, loss=loss, train=[0], optimizer=lambda p: None)
    apart = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    result = may_merge(
        Forward(recipe, model, CPU, precision), model, apart, [4, 3], (inputs, targets)
    )
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert modes == [module.training for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    return result


def mlp(*between):
    return [nn.Flatten(), nn.Linear(16, 6), *between, nn.ReLU(), nn.Linear(6, 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "layers",
    [
        mlp(),
        mlp(nn.LayerNorm(6)),
        [nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), *mlp()[:1], nn.Linear(12, 2)],
        mlp(nn.Dropout(0.0)),
    ],
    ids=["MLP", "LayerNorm", "convolution", "dropout of nothing"],
)
def test_layers_that_treat_samples_apart_may_be_merged(layers, dtype):
    result = verdict(*layers, dtype=dtype)
    assert result.merge, result.reason


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        (mlp(nn.BatchNorm1d(6)), "buffers"),
        ([nn.BatchNorm2d(1), *mlp()], "buffers"),
        (mlp(nn.BatchNorm1d(6, track_running_stats=False)), "apart"),
        (mlp(nn.Dropout(0.5)), "random"),
        (mlp(NoisyByTorch()), "random"),
        (mlp(CentredByBatch()), "apart"),
    ],
    ids=["BatchNorm", "BatchNorm2d", "BatchNorm untracked", "dropout", "noise", "own layer"],
)
def test_layers_that_see_their_batch_or_draw_numbers_may_not_be_merged(layers, reason):
    result = verdict(*layers)
    assert not result.merge
    assert reason in result.reason


def test_a_loss_that_weighs_samples_unevenly_may_not_be_merged():
    def over_words(outputs, target):
        words = target.abs()
        return ((outputs - target) ** 2 * words).sum() / words.sum()

    result = verdict(*mlp(), loss=over_words)
    assert not result.merge
    assert "two micro-batches lose" in result.reason


def test_a_loss_that_is_a_sum_may_not_be_merged():
    assert not verdict(*mlp(), loss=lambda o, t: ((o - t) ** 2).sum()).merge


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.BatchNorm1d(6)])
def test_a_model_that_came_in_evaluation_mode_is_tried_as_it_will_be_trained(layer):
    """Pretrained models are often handed out so, and training switches the mode back."""
    model = nn.Sequential(*mlp(layer)).eval()
    inputs, targets = torch.randn(7, 16), torch.randn(7, 2)
    recipe = Recipe(model=model, loss=nn.functional.mse_loss, train=[0], optimizer=lambda p: None)
    apart = [(inputs[:4], targets[:4]), (inputs[4:], targets[4:])]
    forward = Forward(recipe, model, CPU, "float32")
    assert not may_merge(forward, model, apart, [4, 3], (inputs, targets)).merge
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("samples", range(1, 65))
def test_a_smaller_last_batch_is_cut_into_fewer_parts_of_about_the_same_size(samples):
    train = TrainSpec(global_batch=64, micro_batches=8)
    where = Position(0, 0, samples)
    passes = share_of(where, parts_of(where, train), 1, 0, merge=False).passes
    assert sum(part.size for part in passes) == samples
    assert all(min(samples, 4) <= part.size <= 8 for part in passes)
