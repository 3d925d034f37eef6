"""The epsilon that a run claims is of all that it has published, and a changed budget counts."""

from __future__ import annotations

import io
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from instep.client import preparing
from instep.errors import WorkerError
from instep.job.privacy import PrivacySpec
from instep.job.spec import JobSpec
from instep.privacy import found, secret_files
from instep.privacy.figures import privacy_of, privacy_words
from instep.privacy.released import (
    FILE,
    Releases,
    contents_by_commit,
    read_released,
    secret_tag,
)

ACCOUNTED = {"samples": 96.0, "steps": 4.0, "in_epoch": 3.0, "epsilon": 1.0, "epsilon_lower": 0.9}
SPEC = PrivacySpec(protects="sample", noise=2.0, delta=1e-4, accounted=ACCOUNTED)


def test_steps_that_were_published_after_the_last_accounted_one_leave_epsilon_unknown(tmp_path):
    releases = Releases(tmp_path)
    releases.begin(bytes(32))
    for commit in (1, 2, 3, 4, 4):  # by two workers
        releases.write(commit, bytes(16))
    within = privacy_of(SPEC, tmp_path, 4)
    assert (within["epsilon"], within["released"], within["released_again"]) == (1.0, 4, 0)
    lost = privacy_of(SPEC, tmp_path / "elsewhere", 4)
    assert (lost["epsilon"], lost["unrecorded"]) == (None, 4)
    assert "4 of the committed steps are not in the record" in privacy_words(lost)
    releases.write(5, bytes(16))
    beyond = privacy_of(SPEC, tmp_path, 4)
    assert beyond["epsilon"] is None
    assert "steps after 4, the last that is accounted, were published" in privacy_words(beyond)


def test_two_copies_of_a_folder_find_what_the_other_has_published(tmp_path, monkeypatch):
    monkeypatch.setenv(secret_files.ENVIRONMENT, str(tmp_path))
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    records = Releases(one, "an-id")
    records.begin(bytes(32))
    for commit in (1, 2):
        records.write(commit, bytes(16))
    shutil.copytree(one, two)
    records.write(3, bytes(16))
    Releases(two, "an-id").write(3, bytes(16))  # the same content publishes nothing new
    assert privacy_of(SPEC, two, 3, "an-id")["epsilon"] == 1.0
    Releases(two, "an-id").write(4, bytes([1] * 16))
    records.write(4, bytes(16))
    for run in (one, two):
        found = privacy_of(SPEC, run, 4, "an-id")
        assert (found["epsilon"], found["released"], found["released_again"]) == (None, 5, 1)
        assert "by a copy of the run's folder" in privacy_words(found)
    assert (tmp_path / "an-id.releases.bin").stat().st_mode & 0o077 == 0


def test_a_record_that_was_not_written_to_its_end_is_cut_and_those_after_it_are_whole(tmp_path):
    records = Releases(tmp_path)
    records.begin(bytes(32))
    records.write(1, bytes(16))
    with open(tmp_path / FILE, "ab") as file:
        file.write(bytes(7))
    Releases(tmp_path).begin(bytes(32))
    records.write(2, bytes(16))
    assert contents_by_commit(tmp_path) == {1: 1, 2: 1}


def test_a_sum_that_cannot_be_recorded_is_not_published(tmp_path, monkeypatch):
    class Full(io.FileIO):
        def write(self, data):
            return super().write(data[:5])

    records = Releases(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("builtins.open", lambda path, mode, **_: Full(path, mode))
        with pytest.raises(WorkerError, match="cannot be written to its end"):
            records.begin(bytes(32))
    Releases(tmp_path).begin(bytes(32))  # resumed, with room
    Releases(tmp_path).write(1, bytes(16))
    assert read_released(tmp_path) == (secret_tag(bytes(32)), {1: 1}, {1: 1})


def test_what_another_worker_records_after_a_torn_record_is_read_as_it_was_written(tmp_path):
    records = Releases(tmp_path)
    records.begin(bytes(32))
    with open(tmp_path / FILE, "ab") as file:
        file.write(bytes([9] * 7))
    Releases(tmp_path).write(1, bytes(16))
    assert contents_by_commit(tmp_path) == {1: 1}


def test_a_record_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(WorkerError, match=r"releases.bin cannot be written \(No such file"):
        Releases(tmp_path / "gone").write(1, bytes(16))


@pytest.mark.parametrize(("epsilon", "again"), [(3.0, 0), (1.0, 1)])
def test_a_budget_that_was_changed_is_accounted_anew(monkeypatch, epsilon, again):
    asked = []

    def computed(*given, **named):
        asked.append(named["input"])
        return SimpleNamespace(stdout=found.told(replace(SPEC, epsilon=epsilon)).encode())

    monkeypatch.setattr(subprocess, "run", computed)
    before = JobSpec(recipe="here.py:recipe", privacy=replace(SPEC, epsilon=3.0))
    job = replace(before, privacy=replace(before.privacy, epsilon=epsilon))
    assert preparing.as_run(job, before).privacy.epsilon == epsilon
    assert len(asked) == again
