"""What `--check-determinism` judges: only runs that came as far as they should."""

import json

import pytest

from instep import spec_file
from instep.errors import RunError
from instep.lab.determinism import check_length
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
