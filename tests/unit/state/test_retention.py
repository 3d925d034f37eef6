"""The best checkpoints are kept, across restarts, and a validation among them causes a save."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SpecError
from instep.job.checkpoint import CheckpointSpec
from instep.state.files.manifest import published
from instep.state.retention import Best, best_rule, facts_of, metric_values, to_delete
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot


def snapshot(step, metrics=None):
    tensors = {"model": {"w": torch.full((3,), float(step))}}
    return Snapshot(step=step, tensors=tensors, facts=facts_of(metrics))


def save(writer, step, loss=None):
    writer.save(snapshot(step, None if loss is None else {"loss": loss}))
    writer.finish()
    writer.poll()


def steps(folder):
    return sorted(step for step, _ in published(folder))


@pytest.mark.parametrize(
    ("spec", "largest"),
    [
        ({}, False),
        ({"best_metric": "accuracy"}, True),
        ({"best_metric": "perplexity", "best_mode": "min"}, False),
        ({"best_mode": "max"}, True),
    ],
)
def test_small_losses_and_large_metrics_are_good_unless_the_job_says_otherwise(spec, largest):
    assert Best.by(CheckpointSpec(keep_best=1, **spec)).largest is largest


def test_of_equals_the_earlier_is_the_better():
    values = {10: 0.5, 20: 0.3, 30: 0.3, 40: 0.4}
    assert Best(count=2).choose(values) == [20, 30]
    assert Best(count=1, largest=True).choose(values) == [10]


@given(st.dictionaries(st.integers(0, 50), st.floats(-9, 9)), st.integers(1, 5), st.booleans())
def test_none_that_is_left_out_is_better_than_one_that_is_chosen(values, count, largest):
    chosen = Best(count=count, largest=largest).choose(values)
    assert len(chosen) == min(count, len(values))
    sign = -1 if largest else 1
    left = [sign * values[step] for step in values.keys() - set(chosen)]
    assert all(sign * values[step] <= each for step in chosen for each in left)


def test_the_best_stay_beside_the_newest(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, best=Best(count=2))
    for step, loss in [(1, 0.9), (2, 0.2), (3, 0.7), (4, 0.3), (5, 0.8), (6, None)]:
        save(writer, step, loss)
    assert steps(tmp_path) == [2, 4, 6]


def test_milestones_stay_as_well(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, keep_every=4)
    for step in range(1, 11):
        save(writer, step)
    assert steps(tmp_path) == [4, 8, 10]


def test_the_choice_survives_a_restart_as_the_manifests_tell_it(tmp_path):
    best = Best(count=1)
    save(CheckpointWriter(tmp_path, keep_last=1, best=best), 1, 0.1)
    writer = CheckpointWriter(tmp_path, keep_last=1, best=best)
    assert not writer.is_best(2, {"loss": 0.2})
    for step in (2, 3):
        save(writer, step, 0.2)
    assert steps(tmp_path) == [1, 3]
    assert metric_values(tmp_path, best) == {1: 0.1, 3: 0.2}


def test_a_damaged_manifest_counts_for_nothing(tmp_path):
    best = Best(count=1)
    save(CheckpointWriter(tmp_path, best=best), 1, 0.1)
    (tmp_path / "step-00000001" / "manifest.json").write_text("{")
    writer = CheckpointWriter(tmp_path, keep_last=1, best=best)
    assert writer.is_best(2, {"loss": 0.2})
    save(writer, 2, 0.2)
    assert steps(tmp_path) == [2]


def test_what_a_run_that_went_back_had_reached_is_forgotten(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=1, best=Best(count=1))
    save(writer, 1, 0.5)
    save(writer, 9, 0.1)
    assert writer.is_best(5, {"loss": 0.4})
    save(writer, 5, 0.4)
    assert steps(tmp_path) == [5]
    assert writer.is_best(10, {"loss": 0.3})


def test_a_validation_is_worth_a_save_while_it_is_among_the_best(tmp_path):
    writer = CheckpointWriter(tmp_path, best=Best(count=2, metric="accuracy", largest=True))
    assert not writer.is_best(1, None)
    assert not writer.is_best(1, {"loss": 0.1})
    assert not writer.is_best(1, {"accuracy": math.nan})
    for step, accuracy, worth in [(1, 0.5, True), (2, 0.4, True), (3, 0.4, False), (4, 0.45, True)]:
        assert writer.is_best(step, {"accuracy": accuracy}) is worth
        if worth:
            writer.save(snapshot(step, {"accuracy": accuracy}))
    writer.finish()


def test_without_keep_best_no_validation_causes_a_save(tmp_path):
    assert not CheckpointWriter(tmp_path).is_best(1, {"loss": 0.0})


def test_a_checkpoint_that_could_not_be_written_is_no_rival(tmp_path):
    writer = CheckpointWriter(tmp_path, best=Best(count=1))
    (tmp_path / ".saving-step-00000001").write_text("in the way of the folder")
    writer.save(snapshot(1, {"loss": 0.1}))
    writer.finish()
    (failed,) = writer.poll()
    assert "step 1 was not saved" in str(failed)
    assert writer.is_best(2, {"loss": 0.2})


def test_figures_that_are_no_numbers_are_left_out_of_the_facts():
    assert facts_of({"loss": math.nan, "accuracy": 0.5}) == {"metrics": {"accuracy": 0.5}}
    assert facts_of(None) == {}
    assert Best(count=1).value({"metrics": ["loss"]}) is None


@pytest.mark.parametrize(
    ("spec", "metrics", "says"),
    [
        ({"keep_best": 2}, (), "checkpoint.keep_best = 2: there is no validation"),
        (
            {"keep_best": 1, "best_metric": "acuracy"},
            ("loss", "accuracy"),
            "checkpoint.best_metric = 'acuracy'.*Did you mean 'accuracy'",
        ),
    ],
)
def test_keep_best_needs_a_metric_that_is_measured(spec, metrics, says):
    with pytest.raises(SpecError, match=says):
        best_rule(CheckpointSpec(**spec), metrics)
    assert best_rule(CheckpointSpec(), metrics) is None


some_steps = st.sets(st.integers(0, 60))


def test_the_last_few_stay():
    assert to_delete([10, 40, 20, 30], current=40, keep_last=2) == [10, 20]


def test_milestones_and_the_best_stay_for_good():
    kept = to_delete([10, 15, 20, 25, 30], current=30, keep_last=1, keep_every=20, keep_best=[15])
    assert kept == [10, 25]


def test_what_lies_beyond_the_current_step_goes_as_the_run_went_back():
    assert to_delete([10, 20, 30, 40], current=20, keep_last=2, keep_every=10) == [30, 40]


@given(some_steps, st.integers(0, 60), st.integers(1, 5), st.integers(0, 7), some_steps)
def test_the_current_one_and_enough_others_always_stay(known, current, keep, every, best):
    known.add(current)
    gone = to_delete(known, current=current, keep_last=keep, keep_every=every, keep_best=best)
    left = known - set(gone)
    assert max(left) == current
    assert sorted(left)[-keep:] == sorted(s for s in known if s <= current)[-keep:]
    assert set(gone) <= known
    assert gone == sorted(gone)
    assert to_delete(left, current=current, keep_last=keep, keep_every=every, keep_best=best) == []
