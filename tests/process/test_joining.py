"""Training inside processes that somebody else started."""

import json
import os
import re
import shutil
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from started import EXECUTE, RECIPES, Start, Started, distance

from instep.cli import main
from instep.client.results import failure
from instep.comm.protocol.messages import Failed
from instep.control.resume import prepare
from instep.errors import SpecError
from instep.events import read_events
from instep.job.train import StopSpec
from instep.store.run_folder import RunFolder
from made_up_runs import write_events
from marks import slow

pytestmark = pytest.mark.process

TWICE, RAISES = RECIPES / "joins_twice.py", RECIPES / "joins_and_raises.py"
AGAIN, EARLY = RECIPES / "joins_again.py", RECIPES / "leaves_early.py"


def slurm_task(number: int) -> dict[str, str]:
    """What Slurm sets for one of two tasks on one node."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_STEP_ID": "0",
        "SLURM_NNODES": "1",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_PROCID": str(number),
        "SLURM_LOCALID": str(number),
    }


def summary_of(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    return summary


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs of a script that was started without any company."""
    folder = tmp_path_factory.mktemp("alone")
    program = Started(folder, [TWICE, folder / "runs"])
    try:
        assert program.end() == 0, program.stderr
        assert program.listened <= {"127.0.0.1"}
        program.check_no_process_is_left()
    finally:
        program.kill()
    return folder / "runs"


def check_both_runs(runs: Path, alone: Path) -> None:
    """That two processes came to what one did."""
    assert {path.name for path in runs.iterdir()} == {"recipe", "own"}  # and no meeting file
    for name, steps in (("recipe", 14), ("own", 12)):
        one, two = summary_of(alone / name), summary_of(runs / name)
        assert (one["workers"], two["workers"]) == (1, 2)
        assert one["outcome"] == two["outcome"] == "completed"
        assert one["steps"] == two["steps"] == steps
        assert one["samples"] == two["samples"] == 202
        assert two["repeated_samples"] == two["missing_samples"] == 0
        assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert distance(alone / name, runs / name) < 1e-6


@pytest.mark.slow
def test_two_processes_of_torchrun_come_to_what_one_process_does(
    start: Start, tmp_path: Path, alone: Path
) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    program = start(*torchrun, TWICE, tmp_path / "runs")
    assert program.end() == 0, program.stderr
    check_both_runs(tmp_path / "runs", alone)
    program.check_no_process_is_left()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun (Open MPI)")
def test_two_processes_of_mpirun_come_to_what_one_process_does(
    start: Start, tmp_path: Path, alone: Path
) -> None:
    mpirun = ("mpirun", "--allow-run-as-root", "--oversubscribe", "-n", 2)
    program = start("-c", EXECUTE, *mpirun, sys.executable, TWICE, tmp_path / "runs")
    assert program.end() == 0, program.stderr
    check_both_runs(tmp_path / "runs", alone)
    program.check_no_process_is_left()


@pytest.mark.slow
def test_two_tasks_of_slurm_come_to_what_one_process_does(
    start: Start, tmp_path: Path, alone: Path
) -> None:
    programs = [
        start(TWICE, tmp_path / "runs", environment=slurm_task(number)) for number in (1, 0)
    ]
    for program in programs:
        assert program.end() == 0, program.stderr
        assert program.listened <= {"127.0.0.1"}
        program.check_no_process_is_left()
        program.check_no_file_is_left()
    check_both_runs(tmp_path / "runs", alone)


def test_a_process_that_raises_ends_the_other_with_the_cause(start: Start, tmp_path: Path) -> None:
    zero, one = (
        start(RAISES, tmp_path / "runs", environment=slurm_task(number)) for number in (0, 1)
    )
    assert one.end() == 1
    assert "ValueError: process 1 has had enough" in one.stderr
    assert zero.end() != 0
    assert "worker 1 failed at step " in zero.stderr
    assert "ValueError: process 1 has had enough" in zero.stderr
    summary = summary_of(tmp_path / "runs" / "raises")
    assert (summary["outcome"], summary["steps"]) == ("failed", 2)
    for program in (zero, one):
        program.check_no_process_is_left()
        program.check_no_file_is_left()


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of runs with a joined run that came to its end; copy it, do not touch it."""
    folder = tmp_path_factory.mktemp("complete")
    program = Started(folder, [AGAIN, folder / "runs", 5])
    try:
        assert program.end() == 0, program.stderr
    finally:
        program.kill()
    assert json.loads(program.stdout)["steps"] == list(range(1, 15))
    return folder / "runs"


@pytest.fixture
def again(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "runs")) / "again"


def two_tasks(start: Start, *command: object) -> list[Started]:
    """Two tasks of Slurm, that have come to their end and left nothing."""
    programs = [start(*command, environment=slurm_task(number)) for number in (0, 1)]
    for program in programs:
        program.end()
        program.check_no_process_is_left()
        program.check_no_file_is_left()
    return programs


@pytest.mark.slow
def test_a_complete_run_that_is_started_again_is_left_as_it_is(start: Start, again: Path) -> None:
    files = {path: path.read_bytes() for path in again.rglob("*") if path.is_file()}
    zero, one = two_tasks(start, AGAIN, again.parent, 5)
    assert (zero.process.returncode, one.process.returncode) == (0, 0), zero.stderr + one.stderr
    summary = json.loads((again / "summary.json").read_text())
    assert json.loads(zero.stdout) == {"steps": [], "step": 14, "summary": summary}
    assert json.loads(one.stdout) == {"steps": [], "step": 14, "summary": None}
    assert {path: path.read_bytes() for path in again.rglob("*") if path.is_file()} == files
    assert [path.name for path in again.parent.iterdir()] == ["again"]


@pytest.mark.slow
def test_a_run_that_was_killed_after_its_last_step_is_ended(start: Start, again: Path) -> None:
    events = (again / "events.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in events if not re.search('"event": "(model_saved|run_finished)"', line)]
    (again / "events.jsonl").write_text("".join(kept))
    before = (again / "model.safetensors").read_bytes()
    (again / "model.safetensors").unlink()
    program = start(AGAIN, again.parent, 5)
    assert program.end() == 0, program.stderr
    told = json.loads(program.stdout)
    assert (told["steps"], told["summary"]["steps"]) == ([], 14)
    assert told["summary"]["outcome"] == "completed"
    assert (again / "model.safetensors").read_bytes() == before


@pytest.mark.tail
def test_a_refused_recipe_leaves_no_run_folder(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import instep\n"
        "def recipe():\n    return None\n"
        "with instep.join(recipe, runs='runs', quiet=True) as session:\n"
        "    for step in session.steps():\n        pass\n"
    )
    program = start(script)
    assert program.end() != 0
    assert "returned None, but an instep.Recipe is wanted" in program.stderr
    assert list((program.work / "runs").iterdir()) == []


@pytest.mark.slow
def test_what_process_0_refuses_all_refuse(start: Start, again: Path) -> None:
    for program in two_tasks(start, AGAIN, again.parent, 6):
        assert program.process.returncode != 0
        assert "instep.errors.SpecError: seed was 5 and cannot become 6" in program.stderr
    assert [path.name for path in again.parent.iterdir()] == ["again"]  # and no meeting file


@pytest.mark.tail
def test_processes_that_join_with_other_arguments_end_with_the_first_that_differs(
    start: Start, tmp_path: Path
) -> None:
    for program in two_tasks(start, RECIPES / "joins_differently.py", tmp_path / "runs"):
        assert program.process.returncode != 0
        assert "train.global_batch = 17 in process 1, and with 16 in process 0" in program.stderr


@pytest.mark.slow
def test_a_run_keeps_the_options_of_a_codec_that_processes_leave_out(
    start: Start, tmp_path: Path
) -> None:
    for program in two_tasks(start, RECIPES / "joins_with_a_codec.py", tmp_path / "runs"):
        assert program.process.returncode == 0, program.stderr
    run = RunFolder(tmp_path / "runs" / "coded")
    assert len(run.named("run_started")) == 2
    assert run.spec.sync.defaults["int4"] == {"block": 64, "rounding": "nearest"}


@pytest.mark.tail
def test_loops_of_unequal_length_end_with_the_reason_to_the_bit_too(
    start: Start, tmp_path: Path
) -> None:
    for program in two_tasks(start, EARLY, tmp_path / "runs"):
        assert program.process.returncode != 0
        assert "the processes' loops are not of the same length: 1 of 2 left" in program.stderr


@pytest.mark.slow
def test_sessions_of_one_process_let_go_of_their_runs_and_lose_no_step(
    start: Start, tmp_path: Path
) -> None:
    program = start(RECIPES / "one_process_many_sessions.py", tmp_path / "runs")
    assert program.end() == 0, program.stderr
    program.check_no_process_is_left()
    program.check_no_file_is_left()


@pytest.mark.tail
def test_the_hint_to_resume_a_joined_run_is_not_a_command(
    again: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    way = "start its script again with instep.join(..., name='again', resume=True)"
    assert main(["resume", str(again)]) == 2
    refused = capsys.readouterr().err
    assert "and instep resume cannot start them. To resume: " + way in refused
    events = list(read_events(again / "events.jsonl"))
    failed = {"completed": "failed"}
    write_events(again, [{k: failed.get(str(v), v) for k, v in each.items()} for each in events])
    assert main(["report", str(again)]) == 0
    told = capsys.readouterr().out
    assert way in told
    assert "instep resume" not in told
    word = Failed(kind="error", cause="x", where="", line="", step=3, phase="", exit_code=5)
    assert str(failure(0, word, again)).splitlines()[-1] == f"  to resume: {way}"
    job = msgspec.structs.replace(RunFolder(again).spec, stop=StopSpec(time_limit=0.001))
    with pytest.raises(SpecError) as used_up:
        prepare(again, job, recipe_sha256="")
    assert str(used_up.value).endswith(f"To train longer: {way} and stop.time_limit=0.002")


EARLY_WORDS = """
import os, sys, time
import instep
from instep.client.join import refusal

if os.environ.get("WAITS"):
    refusal.BRIEFLY_S = refusal.DOOR_S = 600.0  # a late process may be slow to come

def recipe():
    import tiny
    if sys.argv[2] == "recipe" and os.environ["SLURM_PROCID"] == "0":
        raise ValueError("process 0 has no data")
    return tiny.recipe()

if __name__ == "__main__":
    rank, wrong, late = os.environ["SLURM_PROCID"], sys.argv[2], sys.argv[3]
    while rank == late and not os.path.exists(sys.argv[4]):
        time.sleep(0.02)
    train = {"epoks": 1} if rank == wrong else {"epochs": 1, "global_batch": 16}
    with instep.join(recipe, name="early", runs=sys.argv[1], train=train, quiet=True) as session:
        for step in session.steps():
            pass
"""
"""Arguments: folder of runs, who has a wrong key or recipe, who joins late, the file it awaits."""


def early(
    start: Start, folder: Path, wrong: object, late: int, **environment: str
) -> tuple[list[Started], Path]:
    script, go = folder / "early.py", folder / "go"
    script.write_text(EARLY_WORDS)
    path = {"PYTHONPATH": f"{RECIPES}:{os.environ.get('PYTHONPATH', '')}"}
    command = (script, folder / "runs", wrong, late, go)
    tasks = [start(*command, environment={**slurm_task(n), **path, **environment}) for n in (0, 1)]
    return tasks, go


def seen(folder: Path, pattern: str) -> bool:
    return any((folder / "runs").glob(pattern))


@pytest.mark.slow
def test_process_0_ends_with_what_another_refused_after_it_had_come(
    start: Start, tmp_path: Path
) -> None:
    (zero, one), go = early(start, tmp_path, wrong=1, late=1)
    zero.until(lambda: seen(tmp_path, "early/events.jsonl"), "the run's beginning")
    go.touch()
    check_refused_by_1(zero, one, tmp_path / "runs")


@pytest.mark.slow
def test_process_0_ends_with_what_another_refused_before_it_came(
    start: Start, tmp_path: Path
) -> None:
    (zero, one), go = early(start, tmp_path, wrong=1, late=0)
    assert one.end() == 1
    go.touch()
    check_refused_by_1(zero, one, tmp_path / "runs")


def check_refused_by_1(zero: Started, one: Started, runs: Path) -> None:
    assert zero.end() == 1
    assert one.end() == 1
    assert "SpecError: " in one.stderr
    assert "epoks" in one.stderr
    last = zero.stderr[zero.stderr.rindex("instep.errors.") :]
    assert re.search("(worker|process) 1 failed: ", last), last
    assert "epoks" in last
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize("late", [slow(9), slow(1)])
def test_the_others_end_with_what_process_0_refused_before_it_had_a_master(
    start: Start, tmp_path: Path, late: int
) -> None:
    (zero, one), go = early(start, tmp_path, wrong=0, late=late)
    assert zero.end() == 1  # where nobody comes, it does not wait for long
    go.touch()
    assert one.end() == 1
    for program in (zero, one):
        assert "epoks" in program.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.slow
def test_a_process_that_joins_after_process_0_has_failed_gets_the_cause(
    start: Start, tmp_path: Path
) -> None:
    (zero, one), go = early(start, tmp_path, wrong="recipe", late=1)
    assert zero.end() == 1
    go.touch()
    assert one.end() == 1
    assert "ValueError: process 0 has no data" in one.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "early"] == []


@pytest.mark.slow
def test_where_all_meet_at_an_address_a_late_process_gets_the_cause_too(
    start: Start, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    where = {"INSTEP_RENDEZVOUS": f"127.0.0.1:{port}", "INSTEP_TOKEN_FILE": str(tmp_path / "token")}
    where["WAITS"] = "1"
    (zero, one), go = early(start, tmp_path, wrong="recipe", late=1, **where)
    events = tmp_path / "runs" / "early" / "events.jsonl"
    zero.until(lambda: events.exists() and "worker_failed" in events.read_text(), "failed")
    go.touch()
    assert (zero.end(), one.end()) == (1, 1)
    assert "ValueError: process 0 has no data" in one.stderr


@pytest.mark.slow
def test_a_quiet_process_0_names_missing_processes_after_a_while(
    start: Start, tmp_path: Path
) -> None:
    (zero, one), go = early(start, tmp_path, wrong=9, late=1)
    said = "instep: waiting for process 1 of 2 to call instep.join"
    zero.until(lambda: said in zero.stderr, "said")
    go.touch()
    assert (zero.end(), one.end()) == (0, 0), zero.stderr + one.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["early"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_process_is_reported_to_have_exited_without_a_message(
    start: Start, tmp_path: Path, number: int
) -> None:
    command = (RECIPES / "joined_for_long.py", tmp_path / "runs", 400, 0.05)
    run = tmp_path / "runs" / "long"
    zero, one = (start(*command, environment=slurm_task(n)) for n in (0, 1))
    zero.until(lambda: seen(tmp_path, "*/ledger.bin"), "training")  # made once both are there
    one.process.send_signal(number)
    assert zero.end() == 1
    assert "worker 1 failed" in zero.stderr
    assert "the process disconnected without a message" in zero.stderr
    assert "ended with code" not in zero.stderr
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    (said,) = (e for e in events if e["event"] == "warning")  # torchrun kills process 0 then
    assert said["text"].startswith("worker 1")
    assert "the process disconnected without a message" in said["text"]
    (failed,) = (e for e in events if e["event"] == "worker_failed")
    assert said["time"] < failed["time"]


@pytest.mark.slow
def test_a_process_that_joins_twice_is_refused(start: Start, tmp_path: Path) -> None:
    script = RECIPES / "joined_for_long.py"
    command = (script, tmp_path / "runs", 400, 0.05)
    zero, one = (start(*command, environment=slurm_task(n)) for n in (0, 1))
    zero.until(lambda: any((tmp_path / "runs").glob("*/ledger.bin")), "training")
    more = start(*command, environment=slurm_task(1))
    assert more.end() != 0
    assert "another has its place" in more.stderr
    assert zero.process.poll() is None
    assert one.process.poll() is None


@pytest.mark.slow
def test_a_program_that_ends_without_closing_its_session_says_what_is_missing(
    start: Start, tmp_path: Path
) -> None:
    script = tmp_path / "left_open.py"
    text = (
        "import instep, sys, torch\n"
        "train = {'epochs': 1, 'global_batch': 4, 'micro_batches': 1}\n"
        "session = instep.join(train=train, quiet=True)\n"
        "model = torch.nn.Linear(2, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "model, optimizer, data = session.prepare(model, optimizer, torch.ones(8, 2))\n"
        "for batch in data:\n"
        "    session.backward(model(batch).mean())\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    for end, said in (
        ("", ["session.close(), so the run has no model and no report", "left_open. Use `with"]),
        ("session.close()\n", []),
        ("raise ValueError('mine')\n", ["ValueError: mine"]),
    ):
        script.write_text(text + end)
        program = start(script)
        assert program.end() == bool("raise" in end), program.stderr
        assert [each for each in said if each not in program.stderr] == []
        assert ("instep: warning" in program.stderr) == (end == "")
