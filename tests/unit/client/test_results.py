"""What a client writes at a run's end is for looking: it costs nothing of what was computed."""

import json

import pytest

from instep.cli import main
from instep.client.results import failure, finish
from instep.comm.protocol.messages import Failed
from instep.errors import RunError
from instep.events import LEDGER, read_records
from made_up_runs import make_run, write_ledger


@pytest.mark.parametrize(
    ("leave", "missing"),
    [(500_000, ["trace.json"]), (0, ["summary.json", "report.html", "trace.json"])],
)
def test_what_finds_no_room_on_the_disk_is_left_out_and_said(small_disk, capsys, leave, missing):
    run = make_run(small_disk.path / "net")
    small_disk.fill(leave=leave)
    assert finish(run)["outcome"] == "completed"
    said = capsys.readouterr().err
    for name in ("summary.json", "report.html", "trace.json"):
        assert (f"{run / name} was not written: " in said) == (name in missing)
        written = run / name
        assert not written.exists() or (name in missing) == (written.stat().st_size == 0)
    small_disk.make_room()


@pytest.mark.parametrize(
    ("kind", "step", "resumes"),
    [("CheckpointError", 0, False), ("CheckpointError", 7, True), ("error", 0, True)],
)
def test_what_would_end_in_the_same_way_is_not_resumed(tmp_path, kind, step, resumes):
    run = make_run(tmp_path / "net")
    (run / "checkpoints" / "step-00000003").mkdir(parents=True)
    failed = Failed(
        kind=kind, cause="wrong.", where="", line="", step=step, phase="joining", exit_code=7
    )
    assert ("to resume" in str(failure(1, failed, run))) == resumes


def test_a_run_whose_ledger_was_damaged_is_not_listed_as_completed(tmp_path, capsys):
    run = make_run(tmp_path / "net")
    (run / "run.id").write_text("id\n")
    ledger = read_records(run / "ledger.bin", LEDGER).copy()
    ledger["first"][5] -= 1
    write_ledger(run, ledger)
    with pytest.raises(RunError, match="is not exact"):
        finish(run)
    assert json.loads((run / "summary.json").read_text())["outcome"] == "failed"
    assert main(["list", str(tmp_path), "--json"]) == 0
    assert [each["state"] for each in json.loads(capsys.readouterr().out)] == ["failed"]
    assert main(["status", str(run)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("failed")
    assert "is not exact" in said
