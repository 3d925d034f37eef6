"""What an own loop refuses before it joins anybody."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from instep.errors import SpecError
from instep.run.own_loop import OwnLoop
from instep.spec import CheckpointSpec, CheckSpec, JobSpec, TrainSpec


def test_the_best_cannot_be_kept_where_no_validation_is_seen():
    job = JobSpec(recipe="a.py:recipe", checkpoint=CheckpointSpec(keep_best=1))
    member = SimpleNamespace(job=job)
    with pytest.raises(SpecError, match="keep_best = 1: there is no validation"):
        OwnLoop(member, None, None, None, None, 10)


def test_corruption_cannot_be_looked_out_for_where_the_user_runs_the_passes():
    train = TrainSpec(determinism="bits")
    job = JobSpec(recipe="a.py:recipe", train=train, check=CheckSpec(corruption=True))
    with pytest.raises(SpecError, match=r"check\.corruption = true: your own loop"):
        OwnLoop(SimpleNamespace(job=job), None, None, None, None, 10)
