import json
from itertools import pairwise

import numpy as np
import pytest

from instep.events import STEPS
from instep.report.timeline import write_trace
from instep.store.run_files import PARTS
from instep.store.run_folder import RunFolder
from made_up_runs import START_UP_S, make_run


def trace_of(path):
    write_trace(RunFolder(path), path / "trace.json")
    return json.loads((path / "trace.json").read_text())["traceEvents"]


def spans(trace, pid):
    """(steps, parts) of one process, each a list of (name, begin, end)."""
    found = [
        (e["name"], e["ts"], e["ts"] + e["dur"])
        for e in trace
        if e["ph"] == "X" and e["pid"] == pid
    ]
    steps = [span for span in found if span[0].startswith("step ")]
    return steps, [span for span in found if span not in steps]


def assert_spans_nest(trace, pid):
    steps, parts = spans(trace, pid)
    for (_, begin, end), (_, following, _) in pairwise(steps):
        assert begin <= end <= following
    for (_, begin, end), (_, following, _) in pairwise(parts):
        assert begin < end <= following
    for _, begin, end in parts:
        assert any(first <= begin and end <= last for _, first, last in steps)


def test_every_process_is_named_and_on_one_time_base(tmp_path):
    trace = trace_of(make_run(tmp_path / "digits"))
    names = {e["pid"]: e["args"]["name"] for e in trace if e["name"] == "process_name"}
    assert names == {0: "master", 1: "worker 0", 2: "worker 1"}
    starts = [spans(trace, pid)[0][0][1] for pid in (1, 2)]
    assert starts == [pytest.approx(START_UP_S * 1e6, abs=1)] * 2


def test_parts_nest_in_steps_and_times_never_go_back(tmp_path):
    trace = trace_of(make_run(tmp_path / "digits"))
    for pid in (1, 2):
        assert_spans_nest(trace, pid)
        steps, parts = spans(trace, pid)
        assert [name for name, _, _ in steps] == [f"step {n}" for n in range(1, 49)]
        assert {name for name, _, _ in parts} == set(PARTS)


def test_spans_nest_even_if_the_clock_was_set_back(tmp_path):
    path = make_run(tmp_path / "digits")
    steps = np.fromfile(path / "steps.bin", STEPS)
    steps["begin"][steps["step"] > 30] -= 0.1
    steps.tofile(path / "steps.bin")
    trace = trace_of(path)
    assert_spans_nest(trace, 1)


def test_events_are_instants_of_the_master_with_their_fields(tmp_path):
    trace = trace_of(make_run(tmp_path / "digits", steps=21, outcome="failed"))
    instants = [e for e in trace if e["ph"] == "i"]
    assert instants[0]["name"] == "run_started"
    assert [e["ts"] for e in instants] == sorted(e["ts"] for e in instants)
    (failed,) = (e for e in instants if e["name"] == "worker_failed")
    assert failed["args"]["where"] == "digits.py:41"


def test_a_long_run_is_drawn_by_its_first_and_last_steps(tmp_path):
    trace = trace_of(make_run(tmp_path / "digits", report={"trace_steps": 5}))
    steps, _ = spans(trace, 1)
    assert [name for name, _, _ in steps] == [f"step {n}" for n in (1, 2, 3, 47, 48)]


@pytest.mark.parametrize("how", [{"steps": 0}, {"report": {"trace_steps": 0}}, {"nan_from": 3}])
def test_a_poor_run_has_a_valid_trace(tmp_path, how):
    trace = trace_of(make_run(tmp_path / "digits", **how))
    assert [e["name"] for e in trace if e["ph"] == "M"].count("process_name") == 3
