"""When process 0 takes a run for complete."""

from types import SimpleNamespace

import pytest

from instep.client.join.hosting import is_complete
from instep.data.batches import Batches
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec


def plan_of(samples):
    return SimpleNamespace(batches_of=lambda job: Batches.of_job(job, samples))


@pytest.mark.parametrize(
    ("outcome", "last_step", "length", "expected"),
    [
        ("completed", 14, {"epochs": 2}, True),
        ("completed", 14, {"epochs": 1}, True),
        ("completed", 14, {"epochs": 3}, False),
        ("completed", 14, {"steps": 14}, True),
        ("completed", 14, {"steps": 15}, False),
        ("unfinished", 14, {"epochs": 2}, False),
        ("failed", 14, {"epochs": 2}, False),
        ("stopped", 14, {"epochs": 2}, False),
    ],
)
def test_a_run_is_complete_where_it_ended_and_the_job_wants_no_more(
    outcome, last_step, length, expected
):
    run = SimpleNamespace(outcome=outcome, last_step=last_step, plan=plan_of(samples=7 * 64))
    assert is_complete(run, JobSpec(recipe="a.py:f", train=TrainSpec(**length))) is expected


def test_a_run_whose_length_was_never_known_is_not_complete():
    run = SimpleNamespace(outcome="completed", last_step=14, plan=plan_of(samples=0))
    assert not is_complete(run, JobSpec(recipe="a.py:f"))
