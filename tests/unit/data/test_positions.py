"""Which positions commits take, against a walk through the epochs."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.data.batches import Batches
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.train import TrainSpec
from instep.worker.rounds.round_checks import check_length, updates


def walked(batches, commits):
    epoch, first, found = 0, 0, []
    for number in range(1, commits + 1):
        size = batches.early_size if number <= batches.early else batches.size
        stop = min(first + size, batches.samples)
        found.append((epoch, first, stop))
        epoch, first = (epoch + 1, 0) if stop == batches.samples else (epoch, stop)
    return found


@given(
    samples=st.integers(1, 50),
    size=st.integers(1, 60),
    early=st.integers(0, 30),
    early_size=st.integers(1, 60),
    last=st.integers(0, 60),
)
def test_commits_follow_each_other_through_all_epochs(samples, size, early, early_size, last):
    batches = Batches(samples, size, early, early_size)
    wanted = walked(batches, last)
    assert [tuple(batches.of(number)) for number in range(1, last + 1)] == wanted
    assert [batches.is_early(*where[:2]) for where in wanted] == [n < early for n in range(last)]
    due = [0] * (wanted[-1][0] + 1 if wanted else 0)
    for epoch, _, stop in wanted:
        due[epoch] = stop
    assert batches.due(last) == due
    if last:
        assert batches.epochs(last) == due.count(samples)


@given(
    samples=st.integers(1, 50),
    size=st.integers(1, 60),
    early=st.integers(0, 30),
    early_size=st.integers(1, 60),
    epochs=st.integers(1, 8),
)
def test_so_many_epochs_end_with_their_last_commit(samples, size, early, early_size, epochs):
    batches = Batches(samples, size, early, early_size)
    last = batches.in_epochs(epochs)
    assert batches.due(last) == [samples] * epochs
    assert batches.of(last + 1)[:2] == (epochs, 0)


def job_of(**train):
    options = {"start_after": 6, "local_steps": 4}
    sync = SyncSpec(name="averaging", options=options)
    return JobSpec(recipe="a.py:f", train=TrainSpec(global_batch=8, **train), sync=sync)


def test_a_job_takes_single_batches_first_and_whole_rounds_then():
    batches = Batches.of_job(job_of(steps=10), 100)
    assert [stop - first for _, first, stop in map(batches.of, (1, 6, 7, 8, 9))] == [
        *(8, 8, 32, 20, 32)
    ]
    assert updates(job_of(steps=10), 10) == 6 + 4 * 4
    assert Batches.of_job(job_of(epochs=2), 100).length(job_of(epochs=2)) == 8 + 4


def test_a_run_that_never_comes_to_a_round_is_refused():
    check_length(job_of(steps=7), 100)
    with pytest.raises(SpecError, match="start_after = 6: the run has 6 steps, so no round would"):
        check_length(job_of(steps=6), 100)
