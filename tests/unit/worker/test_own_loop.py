"""What an own loop refuses before it joins anybody."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.data.batches import Batches
from instep.data.torch_loader import Unused
from instep.errors import RecipeError, SpecError
from instep.job.checkpoint import CheckpointSpec
from instep.job.spec import CheckSpec, JobSpec
from instep.job.sync import SyncSpec
from instep.job.train import TrainSpec
from instep.worker.own.checks import verdict_of
from instep.worker.own.loop import OwnLoop
from instep.worker.own.taken_over import take_over


def test_the_best_cannot_be_kept_where_no_validation_is_seen():
    job = JobSpec(recipe="a.py:recipe", checkpoint=CheckpointSpec(keep_best=1))
    member = SimpleNamespace(job=job)
    with pytest.raises(SpecError, match="keep_best = 1: there is no validation"):
        OwnLoop(member, None, None, None, None, Batches(10, 5))


def test_corruption_cannot_be_looked_out_for_where_the_user_runs_the_passes():
    train = TrainSpec(determinism="bits")
    job = JobSpec(recipe="a.py:recipe", train=train, check=CheckSpec(corruption=True))
    with pytest.raises(SpecError, match=r"check\.corruption = true: your own loop"):
        OwnLoop(SimpleNamespace(job=job), None, None, None, None, Batches(10, 5))


def test_an_own_loop_of_which_nothing_can_be_shown_refuses_to_be_strict():
    job = JobSpec(recipe="a.py:recipe", check=CheckSpec(strict=True))
    with pytest.raises(SpecError, match="nothing can be tried"):
        OwnLoop(SimpleNamespace(job=job), None, None, None, None, Batches(10, 5))


def test_an_own_loop_refuses_to_advance_a_scheduler_that_wants_a_metric():
    job = JobSpec(recipe="a.py:recipe")
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    with pytest.raises(RecipeError, match=r"ReduceLROnPlateau\.step\(\) wants 'metrics'"):
        OwnLoop(
            SimpleNamespace(job=job),
            model,
            optimizer,
            scheduler,
            None,
            Batches(10, 5),
            advances=True,
        )


@pytest.mark.parametrize(
    ("layer", "train", "verdict"),
    [
        (nn.BatchNorm1d(2), TrainSpec(), "no: BatchNorm1d '0' sees the 8 samples"),
        (nn.BatchNorm1d(2), TrainSpec(micro_batches=1), "not shown: your own loop"),
        (nn.BatchNorm1d(2), TrainSpec(merge="always"), "no: train.merge = 'always' joins"),
        (nn.Dropout(), TrainSpec(), "not shown: your own loop"),
    ],
)
def test_the_verdict_names_a_layer_that_sees_its_micro_batch(layer, train, verdict):
    assert verdict_of(nn.Sequential(layer), train, []).startswith(verdict)


def test_the_verdict_names_a_sampler_that_is_not_used():
    lost = [Unused("a sampler is not used", "Give a dataset"), Unused("a generator is not used")]
    assert verdict_of(nn.ReLU(), TrainSpec(), lost) == "no: a sampler is not used. Give a dataset"


def test_each_process_of_an_own_loop_is_one_participant():
    job = JobSpec(recipe="a.py:recipe", sync=SyncSpec(name="averaging", participants=4))
    with pytest.raises(
        SpecError, match=r"participants = 4 with 2 processes.*Start 4 processes, set"
    ):
        OwnLoop(SimpleNamespace(job=job), None, None, None, None, Batches(10, 5))


def test_an_optimizer_that_is_taken_over_says_so_and_is_copied_as_what_it_was():
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(2))], lr=0.5)
    before, kind = repr(optimizer), type(optimizer)
    loop = SimpleNamespace(optimizer=optimizer, scheduler=None, scaler=None)
    loop.state = SimpleNamespace(two_points=None)
    give_back = take_over(loop)
    assert isinstance(optimizer, kind)
    assert type(optimizer).__name__ == "AdamW"
    assert repr(optimizer).startswith(before)
    assert "taken over by instep" in repr(optimizer)
    for copied in (pickle.loads(pickle.dumps(optimizer)), copy.deepcopy(optimizer)):
        assert type(copied) is kind
        assert copied.param_groups[0]["lr"] == 0.5
    give_back()
    assert type(optimizer) is kind
    assert repr(optimizer) == before
