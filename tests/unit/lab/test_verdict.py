"""What holds of a run that was broken, and what does not, is told from two folders alone."""

import json
import math

import numpy as np
import pytest

from instep.events import LEDGER, STEPS, ledger_header, read_records
from instep.lab.chaos.verdict import Fall, Injected, judge
from instep.store.run_folder import RunFolder
from made_up_runs import BEGIN_S, START_UP_S, make_run, with_servers

BITS = {"determinism": "bits", "steps": 20}
MIDDLE = BEGIN_S + START_UP_S + 9.5 * 0.02  # in the tenth step


def killed(at=MIDDLE, **values):
    given = {"kind": "kill", "role": "worker", "number": 1, "pid": 7, "step": 9, "time": at}
    return Injected(**{**given, **values})


@pytest.fixture
def folders(tmp_path):
    """Of a disturbed and an undisturbed run that agree."""
    return [make_run(tmp_path / name, steps=20, train=BITS) for name in ("broken", "whole")]


def judged(folders, injected=None, falls=(), **options):
    run, whole = (RunFolder(folder) for folder in folders)
    return judge(run, whole, [killed()] if injected is None else injected, falls, **options)


def test_a_run_that_ends_like_the_other_holds(folders):
    found = judged(folders, [killed(), killed(kind="hang"), killed(role="loader")])
    assert found.holds
    assert found.losses == 20
    assert 0 < found.recovery_of("worker")["median"] < 0.02  # within the step
    said = list(found.lines())
    assert "broken  3 of 3 times: hang worker 1, kill loader 1, kill worker 1" in said
    assert "losses  of 20 steps: the same bits as undisturbed" in said
    assert "verdict holds: the same result as undisturbed" in said
    table = json.loads(json.dumps(found.as_table(), allow_nan=False))
    assert table["recovery_s"]["kill worker"]["worst"] > 0
    assert [each["role"] for each in table["each"]] == ["worker", "worker", "loader"]


def changed(folder, name, dtype, row, field, value):
    records = read_records(folder / name, dtype).copy()
    records[field][row] = value
    head = ledger_header() if dtype is LEDGER else b""
    (folder / name).write_bytes(head + records.tobytes())


def test_other_bits_of_a_loss_do_not_hold(folders):
    for row in (6, 7):
        changed(folders[0], "steps.bin", STEPS, row, "loss", np.nextafter(0.5, 1))
    found = judged(folders)
    assert found.other_loss == (4, 0.5, np.nextafter(0.5, 1))
    assert "the loss of step 4 is 0.5000000000000001, and undisturbed 0.5" in found.faults


def test_other_parameters_do_not_hold_unless_the_order_is_all_that_is_promised(folders):
    text = (folders[0] / "events.jsonl").read_text()
    (folders[0] / "events.jsonl").write_text(text.replace("3f" * 32, "4e" * 32))
    (fault,) = judged(folders).faults
    assert fault == (
        "the parameters have the SHA-256 4e4e4e4e4e4e..., and undisturbed 3f3f3f3f3f3f..."
    )
    for folder in folders:
        job = (folder / "job.toml").read_text()
        (folder / "job.toml").write_text(job.replace('"bits"', '"order"'))
    found = judged(folders)
    assert found.holds
    assert "verdict holds, to rounding" in list(found.lines())


def test_a_sample_that_was_used_twice_does_not_hold(folders):
    changed(folders[0], "ledger.bin", LEDGER, 1, "first", 31)
    (fault,) = judged(folders).faults
    assert "is not exact up to step 20: 1 samples repeated" in fault


def test_a_run_that_failed_does_not_hold_and_its_cause_is_told(tmp_path, folders):
    failed = make_run(tmp_path / "failed", steps=12, train=BITS, outcome="failed")
    found = judged([failed, folders[1]], [killed(math.inf)])
    assert "the run ended at step 12 (failed): target 10 is out of bounds" in found.faults
    assert "after 1 injections no step of all 2 workers followed" in found.faults
    assert math.isnan(found.recovery_s[0])


@pytest.mark.parametrize(
    ("injected", "options", "fault"),
    [
        ([killed(missed="the run ended before")], {}, "1 of 1 injections could not be made: the"),
        (
            [killed(kind="hang", released=True)],
            {},
            "1 hang not noticed by the run",
        ),
        ([killed()], {"falls": [Fall(0.0, 9, 7)]}, "2 committed steps were lost at once"),
        ([killed()], {"stuck_s": 120.0}, "no step was committed for 2m00s, so it was given up"),
        ([killed()], {"left": [99]}, "processes outlived the run: 99"),
    ],
)
def test_what_else_does_not_hold(folders, injected, options, fault):
    (found,) = judged(folders, injected, **options).faults
    assert found.startswith(fault)


def test_steps_that_are_computed_again_are_counted(folders):
    found = judged(folders, falls=[Fall(0.0, 9, 8)])
    assert found.holds
    assert found.twice == (9,)
    assert "twice   1 step computed again that a worker had already committed" in list(
        found.lines()
    )


def test_steps_taken_back_to_a_checkpoint_are_counted_apart(folders):
    event = {"time": BEGIN_S, "event": "went_back", "resumed_step": 4, "path": "checkpoints/x"}
    with (folders[0] / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    found = judged(folders, falls=[Fall(0.0, 9, 4)])
    assert found.deepest == 0
    assert found.gone_back == (5, 6, 7, 8, 9)
    assert any("5 of them after going back to a checkpoint" in line for line in list(found.lines()))


def test_steps_taken_back_because_of_corruption_are_no_loss(folders):
    event = {"time": BEGIN_S, "event": "corruption_found", "step": 10, "clean_step": 4}
    event |= {"workers": [1], "suspects": [], "what": "state", "where": "w", "how": "so"}
    with (folders[0] / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    found = judged(folders, falls=[Fall(0.0, 9, 4)])
    assert found.deepest == 0
    assert found.holds


def test_a_run_that_goes_on_is_judged_without_another(folders):
    run = RunFolder(folders[0])
    found = judge(run, None, [killed()], going_on=True)
    assert found.holds
    said = list(found.lines())
    assert (
        "hash    nothing to compare with: the run has not ended; a step of it can be replayed"
        in said
    )
    assert "verdict holds, as far as can be said without an undisturbed run" in said
    assert said[-1] == f"next    instep replay {run.path} --step 20"
    later = judge(run, None, [killed(math.inf)], going_on=True)
    assert later.faults == ["after 1 injections no step of all 2 workers followed"]


def test_a_killed_server_is_judged_by_the_steps_of_the_workers(tmp_path):
    pair = [make_run(tmp_path / name, steps=20, train=BITS, workers=3) for name in ("a", "b")]
    found = judged([with_servers(each, 2) for each in pair], [killed(role="server", number=2)])
    assert found.holds
    assert 0 < found.recovery_of("server")["median"] < 0.02


def test_where_the_result_depends_on_timing_only_the_samples_are_compared(tmp_path):
    train = {"steps": 20}
    names = ("broken", "whole")
    pair = [make_run(tmp_path / name, steps=20, train=train) for name in names]
    for row in (6, 7):
        changed(pair[0], "steps.bin", STEPS, row, "loss", 0.25)
    assert not judged(pair).holds
    for folder in pair:
        job = folder / "job.toml"
        job.write_text(job.read_text().replace('"all_reduce"', '"server_async"'))
    found = judged(pair)
    assert found.holds
    assert found.losses == 0
    said = "\n".join(found.lines())
    assert "not compared, nor are losses: they depend on timing" in said
    assert "holds: the same samples as undisturbed" in said
