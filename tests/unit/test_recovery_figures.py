"""The figures of the recovery benchmark: from steps that are written here by hand."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from rivals.contender import (  # noqa: E402
    RECORD,
    Recorder,
    Recovery,
    Step,
    end_tree,
    newest_pid_of_each_rank,
    recovery,
    steps_in,
    tail,
)

BEFORE = [Step(1, 1.0, 3, 0), Step(2, 2.0, 3, 0)]
KILL = 2.5


@pytest.mark.parametrize(
    ("after", "wanted"),
    [
        ([], None),
        ([Step(3, 2.6, 3, 0)], None),  # was in flight, with the killed one in it
        ([Step(3, 3.0, 3, 1)], Recovery(0.5, 0.5, 0, 0)),
        ([Step(3, 2.6, 3, 0), Step(4, 3.0, 3, 1)], Recovery(0.5, 0.5, 0, 0)),
        ([Step(3, 3.0, 2, 1)], None),
        ([Step(3, 3.0, 2, 1), Step(4, 3.5, 2, 1), Step(5, 4.5, 3, 2)], Recovery(0.5, 2.0, 0, 2)),
        ([Step(1, 5.5, 3, 1), Step(2, 6.0, 3, 1)], Recovery(3.0, 3.0, 2, 0)),
        ([Step(3, 3.0, 3, 1), Step(4, 9.0, 2, 2)], Recovery(0.5, 0.5, 0, 0)),
    ],
)
def test_a_recovery_counts_from_the_kill_to_the_next_step_of_a_new_group(after, wanted):
    assert recovery([*BEFORE, *after], KILL, 3) == wanted


def test_a_step_is_there_when_as_many_have_recorded_it_as_gave_a_gradient(tmp_path):
    rows = {
        "0.10": [(1, 1.0, 2, 0), (2, 2.0, 2, 0)],
        "1.11": [(1, 1.5, 2, 0)],
        "1.12": [(3, 4.0, 1, 1)],
        "2.13": [(3, 5.0, 1, 1)],  # was brought up to date in it: gave nothing
    }
    for name, records in rows.items():
        (tmp_path / name).write_bytes(np.array(records, RECORD).tobytes() + b"torn")
    assert steps_in(tmp_path) == [Step(1, 1.5, 2, 0), Step(3, 5.0, 1, 1)]
    assert steps_in(tmp_path, newest=1) == [Step(3, 5.0, 1, 1)]
    assert [int(each["step"]) for each in tail(tmp_path / "0.10", RECORD, 1)] == [2]
    assert len(tail(tmp_path / "none", RECORD, None)) == 0


def test_a_recorder_says_whose_it_is_and_the_newest_of_each_rank_is_found(tmp_path):
    (tmp_path / "0.17").write_bytes(b"")
    os.utime(tmp_path / "0.17", (1, 1))
    recorder = Recorder(tmp_path, 0)
    recorder.committed(1, 1, 0)
    recorder.close()
    (step,) = steps_in(tmp_path)
    assert step[0] == 1
    assert newest_pid_of_each_rank(tmp_path) == [os.getpid()]


@pytest.mark.process
def test_ending_a_tree_ends_what_it_has_started_too():
    nested = "import subprocess; p = subprocess.Popen(['sleep', '100']); print(p.pid); p.wait()"
    parent = subprocess.Popen([sys.executable, "-uc", nested], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout as said:
        child = int(said.readline())
    end_tree(parent.pid)
    parent.wait()
    assert not runs(child)
    end_tree(parent.pid)


def runs(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
