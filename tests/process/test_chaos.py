"""`instep chaos`: a run that is broken on purpose ends as if nothing had been, and that is told."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from started import RECIPES, Start

from instep.cli import main
from instep.lab import namespaces, netlab
from instep.store.run_folder import RunFolder
from marks import slow

NO = netlab.why_not()
pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]


def job_file(folder: Path, steps: int, loaders: int = 0, **train: Any) -> Path:
    job = folder / "job.toml"
    keys = {"steps": steps, "global_batch": 16, "determinism": '"bits"', **train}
    lines = "\n".join(f"{key} = {value}" for key, value in keys.items())
    job.write_text(
        f'name = "net"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nseed = 5\n'
        f"[train]\n{lines}\n[checkpoint]\nevery = 10\n[data]\nloaders = {loaders}\n"
    )
    return job


@pytest.mark.slow
def test_chaos_runs_a_job_twice_and_it_survives_kills_of_any_role(
    tmp_path: Path, capsys: Out
) -> None:
    job = job_file(tmp_path, 60, loaders=1)
    asked = ("--kills", "6", "--seed", "9", "--runs", str(tmp_path / "runs"), "--json")
    assert main(["chaos", str(job), *asked]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["holds"] is True
    assert answer["injected"] == answer["injections"] == 6
    assert {each["role"] for each in answer["each"]} == {"worker", "loader"}
    assert all(each["recovery_s"] > 0 for each in answer["each"])
    assert answer["parameters_sha256"] == answer["undisturbed_parameters_sha256"]
    assert answer["repeated_samples"] == answer["missing_samples"] == 0
    assert "6 of 6: killed " in said.err
    broken, whole = (tmp_path / "runs" / f"net-{name}" for name in ("disturbed", "undisturbed"))
    written = json.loads((broken / "chaos.json").read_text())
    assert written["asked"]["seed"] == 9
    assert written["each"] == answer["each"]
    killed = [each for each in answer["each"] if each["role"] == "worker"]
    lost = RunFolder(broken).named("worker_lost")
    assert [e["worker"] for e in lost] == [each["number"] for each in killed]
    assert RunFolder(whole).named("worker_lost") == []


@pytest.mark.slow
def test_a_run_survives_a_stop_of_any_role(tmp_path: Path, capsys: Out) -> None:
    job = job_file(tmp_path, 300)
    asked = ("--kills", "0", "--hangs", "7", "--seed", "10", "--json")
    assert main(["chaos", str(job), *asked, "--runs", str(tmp_path / "runs")]) == 0
    said = capsys.readouterr()
    answer = json.loads(said.out)
    assert answer["injected"] == answer["injections"] == 7
    assert {each["role"] for each in answer["each"]} == {"worker", "master", "host", "spare"}
    assert {each["kind"] for each in answer["each"]} == {"hang"}
    assert not any(each["released"] for each in answer["each"])
    assert set(answer["recovery_s"]) == {f"hang {each['role']}" for each in answer["each"]}
    assert answer["parameters_sha256"] == answer["undisturbed_parameters_sha256"]
    assert "stopped spare of host 0 (pid " in said.err


@pytest.mark.slow
def test_a_run_with_other_bits_fails_the_verdict(tmp_path: Path, capsys: Out) -> None:
    runs = tmp_path / "runs"
    job = job_file(tmp_path, 12)
    assert main(["run", str(job), "--runs", str(runs), "--set", "workers=1"]) == 0
    events = runs / "net" / "events.jsonl"
    sha256 = RunFolder(runs / "net").last("model_saved")["parameters_sha256"]
    events.write_text(events.read_text().replace(sha256, "ab" * 32))
    capsys.readouterr()
    assert main(["chaos", str(runs / "net"), "--kills", "1", "--seed", "1"]) == 5
    said = capsys.readouterr()
    assert "verdict does not hold" in said.out
    assert "fault   the parameters have the SHA-256 " in said.out
    assert "instep: " in said.err
    assert ", and undisturbed abababababab..." in said.err
    assert (runs / "net-disturbed" / "chaos.json").is_file()


@pytest.mark.skipif(NO is not None, reason=str(NO))
@pytest.mark.slow
def test_a_run_survives_partitions_and_kills_of_its_hosts(tmp_path: Path, capsys: Out) -> None:
    job = job_file(tmp_path, 90)
    asked = ("--kills", "3", "--hangs", "1", "--partitions", "3", "--seed", "7", "--json")
    assert main(["chaos", str(job), *asked, "--runs", str(tmp_path / "runs")]) == 0
    mine = str(os.getpid())
    assert [name for name in namespaces.networks() if name.split("-")[2] == mine] == []
    answer = json.loads(capsys.readouterr().out)
    assert answer["parameters_sha256"] == answer["undisturbed_parameters_sha256"]
    assert answer["repeated_samples"] == answer["missing_samples"] == 0
    cut = [set(each["hosts"]) for each in answer["each"] if each["kind"] == "partition"]
    assert len(cut) == 3
    broken = RunFolder(tmp_path / "runs" / "net-disturbed")
    assert {e["host"] for e in broken.named("host_lost")} & set().union(*cut)
    assert broken.spec.launch.hosts == ()  # they are gone: so it can be resumed and replayed
    assert main(["replay", str(broken.path), "--step", "90"]) == 0


@pytest.mark.slow
def test_chaos_injects_faults_into_a_running_run_which_continues(
    start: Start, tmp_path: Path, capsys: Out
) -> None:
    going = start("-m", "instep", "run", job_file(tmp_path, 5000))
    going.until(going.is_training, "training")
    assert main(["chaos", str(going.run), "--partitions", "1"]) == 2
    assert "is running, and a run can be put on" in capsys.readouterr().err
    assert main(["chaos", str(going.run), "--kills", "2", "--over", "1", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "broken  2 of 2 times: kill worker 2" in said
    assert "hash    nothing to compare with: the run has not ended" in said
    assert f"next    instep replay {going.run} --step" in said
    assert len(going.events("worker_lost")) == 2
    assert going.process.poll() is None
    going.process.send_signal(signal.SIGINT)
    assert going.end() == 130


@pytest.mark.parametrize("number", [signal.SIGINT, slow(signal.SIGTERM)])
@pytest.mark.slow
def test_a_signal_ends_it_with_the_run_that_it_was_breaking(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    job = job_file(tmp_path, 60)
    program = start("-m", "instep", "chaos", job, "--kills", "3", "--seed", "1", "--over", "100")
    log = program.work / "runs" / "net-disturbed" / "ledger.bin"
    program.until(lambda: log.is_file() and os.stat(log).st_size > 0, "breaking")
    program.process.send_signal(number)
    assert program.end() == 130
    assert program.stdout == ""
    assert "Traceback" not in program.stderr
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert RunFolder(log.parent).outcome == "interrupted"
