"""Which job a step is computed with again, and what may have made a difference since."""

import json

import pytest

from instep.client.results import about
from instep.errors import RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import as_table
from instep.lab.replay import changes_since, check_step, replay, stretches
from instep.store.run_folder import RunFolder


def recorded(folder, sessions, *, workers=3, meshes=(), **more):
    """A run of which each session began at a step, with its number of steps to train."""
    meshes = iter(meshes)
    folder.mkdir(exist_ok=True)
    events = [{"event": "worker_ready", "worker": 0, "samples": 640, "device": "cuda:0"}]
    for began, steps in sessions:
        table = {"recipe": "a.py:f", "workers": workers, "train": {"steps": steps}}
        table |= {"mesh": next(meshes, {})}
        job = spec_file.build(table, source="test")
        resumed = {"resumed_step": began} if began is not None else {}
        events.append({"event": "run_started", "job": as_table(job), **resumed, **more})
    (folder / "job.toml").write_text(spec_file.dump(job))
    lines = [json.dumps({"time": float(n), **event}) for n, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


@pytest.mark.parametrize(
    ("sessions", "after", "last", "expected"),
    [
        ([(None, 90)], 0, 20, [(0, 20, 90)]),
        ([(None, 90), (10, 90)], 0, 20, [(0, 20, 90)]),
        ([(None, 90), (10, 99)], 0, 20, [(0, 10, 90), (10, 20, 99)]),
        ([(None, 90), (10, 99)], 0, 10, [(0, 10, 90)]),
        ([(None, 90), (10, 99)], 10, 20, [(10, 20, 99)]),
        ([(None, 90), (10, 99)], 12, 20, [(12, 20, 99)]),
        ([(None, 90), (10, 99), (5, 70)], 0, 20, [(0, 5, 90), (5, 20, 70)]),
        ([(None, 90), (10, 99), (15, 70)], 7, 20, [(7, 10, 90), (10, 15, 99), (15, 20, 70)]),
        ([(None, 90), (0, 70)], 0, 3, [(0, 3, 70)]),
    ],
)
def test_each_step_has_the_job_of_the_session_that_it_counts_from(
    tmp_path, sessions, after, last, expected
):
    run = recorded(tmp_path / "run", sessions)
    found = list(stretches(run, after, last))
    assert [(s.after, s.last, s.job.train.steps) for s in found] == expected


def test_samples_that_cannot_be_read_are_what_the_session_of_the_step_had_them_be(tmp_path):
    run = recorded(tmp_path / "run", [(None, 9), (4, 9)])
    events = [json.loads(line) for line in (run.path / "events.jsonl").read_text().splitlines()]
    events[1]["job"]["data"]["unreadable"] = "skip"
    (run.path / "events.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    found = list(stretches(RunFolder(run.path), 0, 9))
    assert [(s.last, s.job.data.unreadable) for s in found] == [(4, "skip"), (9, "stop")]


def test_a_step_is_computed_by_one_worker_on_the_device_that_computed_it(tmp_path):
    (only,) = stretches(recorded(tmp_path / "run", [(None, 9)]), 0, 3)
    assert only.job.workers == 1
    assert only.job.train.device == "cuda"
    assert only.job.checkpoint.every == "never"


def test_a_step_of_a_mesh_is_computed_by_one_replica_as_it_was_in_that_session(tmp_path):
    meshes = [{"shard": 4, "zero": 2}, {"tensor": 2, "cuts": ["blocks.1"]}, {}]
    sessions = [(None, 9), (3, 9), (6, 9)]
    run = recorded(tmp_path / "run", sessions, workers=8, meshes=meshes)
    jobs = [stretch.job for stretch in stretches(run, 0, 9)]
    assert [job.workers for job in jobs] == [4, 2, 1]
    assert [(job.mesh.shard, job.mesh.tensor, job.mesh.zero) for job in jobs] == [
        (4, 1, 2),
        (1, 2, 3),
        (1, 1, 3),
    ]
    assert jobs[1].mesh.cuts == ("blocks.1",)


def test_what_has_changed_since_is_told(tmp_path):
    now = about(spec_file.build({"recipe": "a.py:f"}, source="test"))
    same = {key: now[key] for key in ("host", "versions")}
    assert changes_since(recorded(tmp_path / "a", [(None, 9)], **same), 3) == []
    other = {"host": {"name": "afar"}, "versions": {"torch": "1.0"}, "recipe_sha256": "ab"}
    told = changes_since(recorded(tmp_path / "b", [(None, 9)], **other), 3)
    assert told[0] == "a.py has changed since the run."
    assert told[1].startswith("the run had torch 1.0, this is torch ")
    assert told[2].startswith("the run was on afar, this is ")


def test_runs_of_scripts_and_steps_that_there_are_not_are_refused(tmp_path):
    run = recorded(tmp_path / "run", [(None, 9)])
    with pytest.raises(RunError, match="has no committed step yet"):
        check_step(run, 1)
    with pytest.raises(SpecError, match=r"--step 0: steps count from 1\."):
        check_step(run, 0)
    joined = recorded(tmp_path / "joined", [(None, 9)], started_by="join")
    with pytest.raises(SpecError, match=r"called instep\.join"):
        check_step(joined, 1)


def test_a_model_is_not_written_into_the_run_folder(tmp_path):
    run = recorded(tmp_path / "run", [(None, 9)])
    with pytest.raises(SpecError, match=r"--to '.*' lies in the run folder"):
        replay(run, 1, print, to=run.path / "model.safetensors")


def test_what_depends_on_timing_cannot_be_computed_again(tmp_path):
    run = recorded(tmp_path / "run", [(None, 90)])
    job = run.path / "job.toml"
    job.write_text(job.read_text().replace('"all_reduce"', '"bounded_stale"'))
    with pytest.raises(SpecError, match="'bounded_stale': its updates depend on timing"):
        check_step(RunFolder(run.path), 1)
