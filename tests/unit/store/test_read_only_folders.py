"""A run folder that cannot be written to is refused with one sentence, before anything starts."""

import json

import pytest

from instep.cli import main
from instep.client.results import finish
from instep.errors import RunError
from instep.events import LEDGER, read_records
from made_up_runs import make_run, write_ledger


def test_runs_are_neither_begun_nor_gone_on_with_nor_reported(frail_disk, tmp_path, capsys):
    recipe = tmp_path / "net.py"
    recipe.write_text("def recipe():\n    raise AssertionError('nobody should call it')\n")
    job = tmp_path / "job.toml"
    job.write_text(f'recipe = "{recipe}:recipe"\n')
    run = make_run(frail_disk.path / "run", steps=20, outcome="stopped")
    text = (run / "job.toml").read_text()
    (run / "job.toml").write_text(text.replace('"digits.py:recipe"', f'"{recipe}:recipe"'))
    frail_disk.give_up()
    for command, words in (
        (["run", str(job), "--runs", str(frail_disk.path)], "the run folder"),
        (["resume", str(run)], "the run folder"),
        (["report", str(run)], "report.html cannot be written"),
    ):
        assert main(command) == 6
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
        assert "Read-only file system" in line
    assert main(["audit", str(run)]) == 0


def test_a_run_whose_end_could_not_be_recorded_says_so(tmp_path):
    run = make_run(tmp_path / "run", steps=20, outcome=None)
    with pytest.raises(RunError, match="the run has ended, but its end could not be written"):
        finish(run)


@pytest.mark.parametrize("outcome", ["completed", "stopped"])
def test_a_run_whose_ledger_lacks_samples_does_not_end_well(tmp_path, outcome):
    run = make_run(tmp_path / "run", outcome=outcome)
    assert finish(run)["missing_samples"] == 0
    records = read_records(run / "ledger.bin", LEDGER)
    write_ledger(run, records[records["step"] != 7])
    with pytest.raises(
        RunError, match=r"has ended, but the ledger .* 64 samples missing"
    ) as caught:
        finish(run)
    assert caught.value.exit_code == 6
    assert json.loads((run / "summary.json").read_text())["missing_samples"] == 64
    assert (run / "report.html").is_file()
