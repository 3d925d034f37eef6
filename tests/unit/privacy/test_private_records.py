"""The epsilon that a run claims is of all that it has published, and a changed budget counts."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from instep.client import preparing
from instep.job.privacy import PrivacySpec
from instep.job.spec import JobSpec
from instep.privacy import found
from instep.privacy.figures import privacy_of, privacy_words
from instep.privacy.released import Releases

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
