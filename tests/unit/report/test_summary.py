import json
import shutil

import numpy as np
import pytest

from instep.events import LEDGER, read_records
from instep.report.figures.summary import summarise, time_split
from instep.report.page.sections import changes_and_failures, configuration
from instep.report.terminal.closing import closing_lines
from instep.report.terminal.screen import notice
from instep.store.run_files import PARTS
from instep.store.run_folder import RunFolder
from made_up_runs import BEGIN_S, make_run, stopped_by, write_ledger


def summary_of(path, **how):
    return summarise(RunFolder(make_run(path / "digits", **how)))


def test_a_summary_holds_what_the_design_promises(tmp_path):
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["samples"], summary["epochs"]) == (48, 3000, 3)
    assert (summary["workers"], summary["generations"]) == (2, 1)
    assert (summary["repeated_samples"], summary["missing_samples"]) == (0, 0)
    assert summary["metrics"] == {"loss": 0.5, "accuracy": pytest.approx(1 - 0.4 / 3)}
    assert summary["wire_bytes"] == 1_000_001
    assert summary["parameters_sha256"] == "3f" * 32
    assert (summary["name"], summary["outcome"]) == ("digits", "completed")


def test_loss_is_the_mean_over_the_samples_of_the_last_epoch(tmp_path):
    weights = [64] * 15 + [40]
    expected = np.average([2 / step for step in range(33, 49)], weights=weights)
    assert summary_of(tmp_path)["loss"] == pytest.approx(expected)


def test_loss_of_an_unfinished_epoch_is_over_what_was_seen_of_it(tmp_path):
    summary = summary_of(tmp_path, steps=18, outcome="stopped")
    assert summary["loss"] == pytest.approx((2 / 17 + 2 / 18) / 2)


def test_a_job_that_counts_steps_reports_its_last_hundred(tmp_path):
    summary = summary_of(tmp_path, steps=160, samples=640, train={"steps": 160})
    assert summary["loss"] == pytest.approx(np.mean([2 / step for step in range(61, 161)]))


def test_speed_is_over_the_training_period_alone(tmp_path):
    summary = summary_of(tmp_path, step_s=0.1)
    assert summary["samples_per_second"] == pytest.approx(3000 / 4.8, rel=0.03)
    assert summary["seconds"] > 4.8 + 2.5


def test_the_parts_of_time_add_up_to_the_training_time_of_each_worker(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    for worker in folder.members.numbers:
        split = time_split(folder, worker)
        assert sum(split.values()) == pytest.approx(folder.times.training_seconds(worker))
    mean = summarise(folder)["time"]
    assert list(mean) == [*PARTS, "other"]
    assert mean["forward"] == pytest.approx(48 * 0.02 * (0.25 + 0.20) / 2)


def test_numbers_that_json_lacks_become_null(tmp_path):
    summary = summary_of(tmp_path, nan_from=40)
    assert summary["loss"] is None
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


@pytest.mark.parametrize(
    "how", [{"steps": 0}, {"steps": 0, "outcome": None}, {"workers": 1}, {"metrics": False}]
)
def test_a_poor_run_has_a_whole_summary(tmp_path, how):
    summary = summary_of(tmp_path, **how)
    assert set(summary) == set(summary_of(tmp_path / "rich"))
    json.dumps(summary, allow_nan=False)


def test_the_lag_is_that_of_all_updates_that_count(tmp_path):
    path = make_run(tmp_path / "digits")
    assert summarise(RunFolder(path))["lag"] is None
    told = [
        {"time": BEGIN_S + 5.1, "step": 10, "updates": 40, "mean": 1.0, "largest": 3},
        {"time": BEGIN_S + 5.1, "step": 10, "updates": 40, "mean": 1.0, "largest": 3},
        {"time": BEGIN_S + 5.2, "step": 20, "updates": 7, "mean": 9.0, "largest": 99},
        {"time": BEGIN_S + 5.4, "step": 20, "updates": 10, "mean": 2.0, "largest": 5},
    ]
    events = [{**event, "event": "lag_measured"} for event in told]
    back = {"time": BEGIN_S + 5.3, "event": "went_back", "resumed_step": 10}
    lines = [json.dumps(each) for each in (*events[:3], back, events[3])]
    with (path / "events.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    folder = RunFolder(path)
    summary = summarise(folder)
    assert summary["lag"] == {"updates": 50, "mean": 1.2, "largest": 5}
    words = "1.2 other updates while a gradient was computed, and 5 at most"
    assert f"lag     {words}" in closing_lines(summary, folder)
    assert words in configuration(folder)


@pytest.mark.parametrize(
    ("outcome", "saved", "words"),
    [
        ("interrupted", 8, "steps 9 to 60, if you resume: the newest checkpoint is of step 8"),
        (None, 59, "step 60, if you resume: the newest checkpoint is of step 59"),
        ("failed", 0, "steps 1 to 60, if you resume: no checkpoint was saved"),
        ("interrupted", 60, ""),
        ("completed", 8, ""),
    ],
)
def test_the_steps_that_a_resumed_run_computes_again_are_named(tmp_path, outcome, saved, words):
    path = make_run(tmp_path / "digits", steps=60, outcome=outcome)
    for each in (path / "checkpoints").glob("*"):
        shutil.rmtree(each)
    if saved:
        (path / "checkpoints" / f"step-{saved:08}").mkdir(parents=True)
    folder = RunFolder(path)
    lost = [line for line in closing_lines(summarise(folder), folder) if line.startswith("lost")]
    assert bool(lost) == bool(words)
    assert not words or lost[0].startswith(f"lost    {words}")


def test_a_run_of_no_steps_has_no_loss_and_no_speed(tmp_path):
    summary = summary_of(tmp_path, steps=0, outcome="failed")
    assert (summary["steps"], summary["samples"], summary["loss"]) == (0, 0, None)
    assert summary["samples_per_second"] is None


def test_repeats_and_gaps_are_counted(tmp_path):
    path = make_run(tmp_path / "digits")
    ledger = read_records(path / "ledger.bin", LEDGER).copy()
    ledger[10] = ledger[12]
    write_ledger(path, ledger)
    folder = RunFolder(path)
    summary = summarise(folder)
    assert (summary["repeated_samples"], summary["missing_samples"]) == (32, 32)
    assert "32 repeated, 32 missing" in closing_lines(summary, folder)[0]


def test_the_verdict_of_a_good_run_ends_with_the_next_commands(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    (folder.path / "report.html").write_text("")
    lines = closing_lines(summarise(folder), folder)
    assert "48 steps   3,000 samples, each exactly once per epoch" in lines[0]
    assert (
        lines[1]
        == "training loss 0.0502 (mean of the epoch)   validation loss 0.5, accuracy 0.8667"
    )
    assert lines[2].startswith("2 workers   ")
    assert lines[-4:] == [
        f"model   {folder.path}/model.safetensors   sha256 3f3f3f3f3f3f",
        f"report  {folder.path}/report.html",
        f"next    instep report {folder.path}",
        f"        instep export {folder.path} --to model.safetensors",
    ]


def test_the_verdict_of_a_failed_run_names_the_cause_and_promises_no_model(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits", steps=21, outcome="failed"))
    lines = closing_lines(summarise(folder), folder)
    assert lines[0].startswith("failed after ")
    assert lines[2:4] == [
        "cause   IndexError: target 10 is out of bounds   (worker 1, step 22, forward)",
        "        digits.py:41   return self.head(x)",
    ]
    assert not any("export" in line or "model  " in line for line in lines)


def test_the_verdict_of_a_run_without_steps_claims_nothing(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits", steps=0, outcome="interrupted"))
    first, last = closing_lines(summarise(folder), folder)
    assert first.endswith("no step was committed")
    assert last == f"next    instep logs {folder.path}"


@pytest.mark.parametrize(
    ("verdict", "told"),
    [
        ("no: it normalises over samples", True),
        ("not shown: [mesh] was not compared: it cannot be copied", False),
    ],
)
def test_why_a_mesh_was_not_compared_is_told_once(tmp_path, verdict, told):
    path = make_run(tmp_path / "digits", workers=4, mesh={"tensor": 2})
    events = [
        {"time": 1.0, "event": "same_as_one_machine", "verdict": verdict},
        {"time": 1.0, "event": "mesh_checked", "why": "it cannot be copied"},
    ]
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    folder = RunFolder(path)
    lines = closing_lines(summarise(folder), folder)
    assert f"same    as one machine: {verdict}" in lines
    assert ("mesh    and one process: not compared: it cannot be copied" in lines) == told
    assert "\n".join(lines).count("it cannot be copied") == 1


@pytest.mark.parametrize(
    ("late", "counts"),
    [
        (["no: one", "not shown: other"], "no: one"),
        (["not shown: other", "no: one"], "no: one"),
        (["not shown: one", "not shown: other"], "not shown: one"),
        ([], "yes"),
    ],
)
def test_of_what_steps_have_shown_the_worst_is_the_verdict(tmp_path, late, counts):
    path = make_run(tmp_path / "digits")
    said = [{"time": 1.0, "event": "same_as_one_machine", "verdict": "yes"}]
    said += [said[0] | {"verdict": verdict, "step": 1 + n} for n, verdict in enumerate(late)]
    said.append(said[0])  # of the session that resumed it
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in said)
    assert RunFolder(path).same_as_one_machine == counts


REACHED = {"by": "master", "step": 20, "why": "accuracy 0.98 reached the target 0.97"}


def test_a_run_that_a_rule_stopped_names_rule_figures_and_step(tmp_path):
    folder = RunFolder(stopped_by(tmp_path / "run", "target", **REACHED))
    summary = summarise(folder)
    assert summary["rule"] == "target"
    assert summary["rule_text"] == "accuracy 0.98 reached the target 0.97, at step 20"
    lines = closing_lines(summary, folder)
    assert lines[0].startswith("stopped (target) after ")
    assert lines[1] == "rule    accuracy 0.98 reached the target 0.97, at step 20"


@pytest.mark.parametrize("rule", ["time_limit", "interrupted"])
def test_what_the_clock_or_a_person_asked_for_happened_at_the_step_that_was_the_last(
    tmp_path, rule
):
    why = "the run had taken 30 s, and its limit is 30 s"
    folder = RunFolder(stopped_by(tmp_path / "run", rule, by="master", step=20, why=why))
    assert summarise(folder)["rule_text"] == f"{why}, at step 21"


def test_a_rule_that_fired_too_late_to_be_the_end_is_not_given_as_the_reason(tmp_path):
    folder = RunFolder(stopped_by(tmp_path / "run", "epochs", asked="target", **REACHED))
    assert summarise(folder)["rule_text"] is None
    assert summarise(RunFolder(make_run(tmp_path / "other")))["rule_text"] is None


FOUND = {
    "step": 20,
    "what": "gradient",
    "where": "micro-batch 3",
    "how": "2 of 3 workers have another",
    "clean_step": 9,
}


@pytest.mark.parametrize(
    ("who", "words"),
    [
        ({"workers": [1], "suspects": []}, "worker 1 had a wrong gradient at step 20"),
        ({"workers": [], "suspects": [0, 1]}, "worker 0 or worker 1 had a wrong gradient"),
    ],
)
def test_corruption_that_was_found_is_counted_and_shown_everywhere(tmp_path, who, words):
    path = make_run(tmp_path / "digits")
    event = {"time": 1.0, "event": "corruption_found", **FOUND, **who}
    with (path / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    folder = RunFolder(path)
    summary = summarise(folder)
    assert summary["corruptions"] == 1
    for shown in (
        "\n".join(closing_lines(summary, folder)),
        notice(event),
        changes_and_failures(folder),
    ):
        assert words in shown
        assert "training continued from step 9" in shown


def test_where_nobody_had_a_copy_no_step_is_named_to_go_on_from():
    event = {"event": "corruption_found", **FOUND, "workers": [1], "suspects": [], "clean_step": -1}
    assert notice(event).endswith("no worker had a copy to go back to")


def test_where_nothing_was_found_it_says_so_in_the_summary_alone(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    summary = summarise(folder)
    assert summary["corruptions"] == 0
    assert not any("wrong" in line for line in closing_lines(summary, folder))
