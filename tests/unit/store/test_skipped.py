"""A sample counts as skipped once, and only in the attempt at its step that was committed."""

import json

import numpy as np

from instep.report.figures.proof import prove
from instep.report.figures.summary import summarise
from instep.report.page.page import write_report
from instep.report.terminal.closing import closing_lines
from instep.store.audit import skipped_in
from instep.store.run_folder import RunFolder
from made_up_runs import make_ledger, make_run, write_events

LEDGER = make_ledger(2, 100, 10, 8)
LEDGER["generation"][LEDGER["step"] > 4] = 2


def told(step, generation=1, index=7, dataset="training"):
    return {
        "time": 1_790_000_010.0 + step,
        "event": "sample_skipped",
        "worker": 0,
        "generation": generation,
        "dataset": dataset,
        "epoch": 0,
        "index": index,
        "step": step,
        "cause": "OSError: sector 7 is gone",
    }


def steps(events):
    return [event["step"] for event in skipped_in(events, LEDGER)]


def test_one_of_a_committed_step_counts_once_though_it_was_told_twice():
    assert steps([told(2), told(2), told(2, index=8), told(3)]) == [2, 2, 3]


def test_one_of_an_attempt_that_came_to_nothing_does_not_count():
    assert steps([told(5, generation=1), told(5, generation=2), told(9, 2)]) == [5]
    assert steps([told(5, generation=1)]) == []


def test_those_of_validations_and_other_events_do_not_count():
    assert steps([told(2, dataset="validation"), {"event": "warning"}]) == []
    assert steps([]) == []


def test_summary_verdict_audit_and_report_have_the_count(tmp_path):
    path = make_run(tmp_path / "holes")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    write_events(path, [*events[:-1], *(told(2, index=i) for i in range(3)), events[-1]])
    folder = RunFolder(path)
    summary = summarise(folder)
    assert summary["skipped_samples"] == 3
    assert summary["samples"] == 3000
    words = "each exactly once per epoch, 3 of them skipped as unreadable"
    assert words in closing_lines(summary, folder)[0]
    assert "skipped 3 samples: OSError: sector 7 is gone" in closing_lines(summary, folder)
    proof = prove(folder)
    assert proof.exact
    assert proof.as_table()["skipped"] == 3
    assert "3 positions: the sample could not be read" in "\n".join(proof.lines())
    write_report(folder, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "Skipped samples" in page
    assert "sector 7 is gone" in page


def test_the_loss_of_an_epoch_weighs_each_step_by_the_samples_that_were_read(tmp_path):
    path = make_run(tmp_path / "holes", epochs=1)
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    write_events(path, [*events[:-1], *(told(1, index=i) for i in range(32)), events[-1]])
    loss = 2.0 / np.arange(1, 17)
    read = np.array([32, *[64] * 14, 40])
    assert abs(summarise(RunFolder(path))["loss"] - np.average(loss, weights=read)) < 1e-12
