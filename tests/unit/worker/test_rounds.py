"""What a participant of a round leaves behind: nothing."""

import copy

import pytest
import torch
from torch import nn

from instep.data.loader import Slice
from instep.engine.passes import Pass
from instep.errors import PeerError, SpecError
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.train import TrainSpec
from instep.worker.rounds.participant import Participant
from instep.worker.rounds.round_checks import check_length
from instep.worker.rounds.round_update import RoundUpdate
from ranks import averaging

PART = Pass(Slice(0, 0, 4), 0)


def half_way(optimizer):
    return torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        ],
        milestones=[3],
    )


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam], ids=lambda m: m.__name__
)
def test_what_local_steps_moved_is_put_back_also_where_a_peer_is_lost_in_them(make):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), lr=0.1)
    update = RoundUpdate(
        optimizer,
        half_way(optimizer),
        list(model.parameters()),
        seed=0,
        max_grad_norm=None,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
        job=averaging(local_steps=2),
    )

    def state():
        parts = model.state_dict(), optimizer.state_dict(), update.scheduler.state_dict()
        return copy.deepcopy(parts)

    def local_step():
        model(torch.ones(4, 3)).square().mean().backward()
        update.take_step(1, 0, 0)

    def lose_a_peer():
        with Participant(update, PART, 0) as participant:
            local_step()
            assert not torch.equal(participant.begin[0], model.weight)
            raise PeerError("a peer is lost.")

    before = state()
    with pytest.raises(PeerError):
        lose_a_peer()
    after = state()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    torch.testing.assert_close(after[1], before[1], rtol=0, atol=0)
    assert str(after[2]) == str(before[2])
    assert model.weight.grad is None
    with Participant(update, PART, 0):
        local_step()
        once = state()
    with Participant(update, PART, 0):
        local_step()
        torch.testing.assert_close(state()[0], once[0], rtol=0, atol=0)
        torch.testing.assert_close(state()[1], once[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("local_steps", "fits"), [(1, True), (8, True), (9, False), (2**62, False)]
)
def test_a_round_takes_no_more_local_steps_than_an_epoch_has(local_steps, fits):
    sync = SyncSpec(name="averaging", participants=4, options={"local_steps": local_steps})
    job = JobSpec(recipe="a.py:recipe", sync=sync, train=TrainSpec(global_batch=20))
    if fits:
        check_length(job, 149)
        return
    with pytest.raises(SpecError, match=r"149 samples of an epoch are 8 local steps.*at most 8\."):
        check_length(job, 149)
