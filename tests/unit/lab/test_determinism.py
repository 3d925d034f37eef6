"""What `--check-determinism` judges: only runs that came as far as they should."""

import json

import pytest

from instep.errors import RunError, SpecError
from instep.job import file as spec_file
from instep.lab.determinism import check_determinism, check_length
from instep.store.run_folder import RunFolder


def ended(folder, planned, step):
    """A run of `planned` steps that a stop has ended after `step`."""
    job = spec_file.build({"recipe": "a.py:f", "workers": 1}, source="test")
    (folder / "job.toml").write_text(spec_file.dump(job))
    events = [
        {"event": "worker_ready", "worker": 0, "samples": 1000, "last_step": planned},
        {"event": "run_finished", "outcome": "stopped", "step": step},
    ]
    lines = [json.dumps({"time": 0.0, **event}) for event in events]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


@pytest.mark.parametrize(("planned", "step"), [(100, 2), (3, 0), (2, 1)])
def test_a_run_that_ended_too_soon_is_not_judged(tmp_path, planned, step):
    due = min(planned, 3)
    with pytest.raises(RunError, match=rf"1 workers ended after {step} of {due} steps \(stopped\)"):
        check_length(ended(tmp_path, planned, step))


@pytest.mark.parametrize(("planned", "step"), [(100, 3), (3, 3), (2, 2), (1, 1)])
def test_a_run_of_three_steps_or_of_its_whole_length_is(tmp_path, planned, step):
    check_length(ended(tmp_path, planned, step))


@pytest.mark.parametrize(
    ("mesh", "sync", "refusal"),
    [
        ({}, {}, "train.micro_batches = 1: to compare one worker with two, .* to 2 or more"),
        (
            {"tensor": 2},
            {},
            r"train.micro_batches = 1: to compare one replica with two \(\[mesh\] tensor = 2\), "
            "there must be work for two. Set train.micro_batches to 2 or more",
        ),
        (
            {"shard": 2},
            {"name": "averaging", "participants": 1},
            "sync.participants = 1: to compare one replica with two .* to 2 or more",
        ),
    ],
)
def test_a_job_without_work_for_two_replicas_cannot_be_checked(mesh, sync, refusal):
    workers = 2 if mesh else 1
    table = {"recipe": "a.py:f", "workers": workers, "mesh": mesh, "sync": sync}
    job = spec_file.build({**table, "train": {"micro_batches": 1}}, source="test")
    with pytest.raises(SpecError, match=refusal):
        check_determinism(job, print)


def test_a_job_with_too_few_micro_batches_for_two_meshes_is_told_how_many_it_takes():
    table = {"recipe": "a.py:f", "workers": 4, "mesh": {"shard": 4}}
    job = spec_file.build({**table, "train": {"micro_batches": 6}}, source="test")
    with pytest.raises(SpecError, match=r"with two \(\[mesh\] shard = 4\).* to 8 or more"):
        check_determinism(job, print)
