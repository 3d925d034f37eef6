"""`instep run script.py`: the user's own loop on workers that are replaced when they are lost."""

import json
import os
import random
import signal
from pathlib import Path

import pytest
from started import RECIPES, Start, Started, kill, kill_members, newest_pids, pid_of

from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

SCRIPT = RECIPES / "own_script.py"
EPOCHS = 6


def command(workers: int, pause_s: float, *options: object) -> list[object]:
    return [
        *("-m", "instep", "run", SCRIPT, "--name", "own", "--workers", workers, *options),
        *("--", EPOCHS, pause_s),
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    program = Started(tmp_path_factory.mktemp("undisturbed"), command(1, 0))
    try:
        assert program.end() == 0, program.stderr
    finally:
        program.kill()
    return RunFolder(program.run)


def check_as_if_nothing_had_been(program: Started, undisturbed: RunFolder) -> None:
    run = RunFolder(program.run)
    assert run.outcome == "completed"
    assert program.summary["steps"] == 7 * EPOCHS
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert run.audit.exact
    assert run.audit.sha256 == undisturbed.audit.sha256
    sums = [each.last("model_saved")["parameters_sha256"] for each in (run, undisturbed)]
    assert sums[0] == sums[1]
    metrics = [{e["step"]: e["metrics"] for e in each.validations} for each in (run, undisturbed)]
    assert metrics[0] == metrics[1]
    assert len(metrics[0]) == EPOCHS
    twice = {step: value for step, (value, _) in run.logged["step/twice"].items()}
    assert twice.items() <= {(step, 2.0 * step) for step in range(7 * EPOCHS + 1)}
    assert len(twice) > 5 * EPOCHS
    program.check_nothing_is_left()


@pytest.mark.tail
def test_what_the_loop_logs_reaches_the_runs_log_and_its_summary(undisturbed: RunFolder) -> None:
    logged = undisturbed.logged["step/twice"]
    wanted = {step: 2.0 * step for step in range(7 * EPOCHS + 1)}
    assert {step: value for step, (value, _) in logged.items()} == wanted
    summary = json.loads((undisturbed.path / "summary.json").read_text())
    assert summary["logged"] == {"step/twice": 14.0 * EPOCHS}


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, slow(30)])
def test_workers_that_are_killed_at_random_moments_leave_no_trace(
    start: Start, undisturbed: RunFolder, kills: int
) -> None:
    draw = random.Random(kills)
    program = start(*command(3, 0.006 * kills**0.5))
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, draw, pauses_s=(0.1, 0.6), most_idle=6)
    assert program.end() == 0, program.stderr
    assert killed.total() == kills
    assert len(program.events("worker_lost")) >= kills - 1  # the last may have been done
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
def test_a_master_and_a_fork_server_that_are_killed_are_replaced_in_an_own_loop_too(
    start: Start, undisturbed: RunFolder
) -> None:
    program = start(*command(3, 0.02))
    program.until(program.is_training, "training")
    kill(pid_of(program, "master_started"))
    program.until(lambda: len(program.events("master_started")) > 1, "another master")
    kill(newest_pids(program)[1])
    program.until(lambda: len(program.events("worker_joined")) > 3, "replaced")
    kill(pid_of(program, "host_joined"))
    program.until(lambda: len(program.events("host_joined")) > 1, "another host")
    kill(newest_pids(program)[0])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)


def validations(program: Started) -> int:
    return len(program.events("validated"))


@pytest.mark.slow
@pytest.mark.parametrize("worker", [0, 2])
def test_a_worker_that_is_killed_in_a_validation_is_replaced_there(
    start: Start, undisturbed: RunFolder, worker: int
) -> None:
    program = start(*command(3, 0.03))
    program.until(program.is_training, "training")
    program.until(lambda: int(program.ledger["step"].max(initial=0)) == 7, "validating")
    assert validations(program) == 0
    kill(newest_pids(program)[worker])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    (lost,) = program.events("worker_lost")
    assert lost["worker"] == worker


@pytest.mark.slow
def test_a_run_of_a_script_that_was_stopped_within_an_epoch_is_resumed_to_the_same_end(
    start: Start, undisturbed: RunFolder
) -> None:
    first = start(*command(2, 0, "--set", "train.stop_after_steps=24"))
    assert first.end() == 0, first.stderr
    again = start("-m", "instep", "resume", first.run, "--workers", 3)
    assert again.end() == 0, again.stderr
    run = RunFolder(first.run)
    assert run.audit.sha256 == undisturbed.audit.sha256
    sums = [each.last("model_saved")["parameters_sha256"] for each in (run, undisturbed)]
    assert sums[0] == sums[1]


@pytest.mark.slow
def test_ctrl_c_stops_a_script_at_a_commit_and_it_can_be_resumed(
    start: Start, undisturbed: RunFolder
) -> None:
    program = start(*command(2, 0.02))
    program.until(program.is_training, "training")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130, program.stderr
    assert program.summary["outcome"] == "interrupted"
    again = start("-m", "instep", "resume", program.run)
    assert again.end() == 0, again.stderr
    run = RunFolder(program.run)
    sums = [each.last("model_saved")["parameters_sha256"] for each in (run, undisturbed)]
    assert sums[0] == sums[1]
    replayed = start("-m", "instep", "replay", program.run, "--step", 3)
    assert replayed.end() == 0, replayed.stderr


@pytest.mark.slow
def test_an_own_loop_that_is_scaled_while_workers_are_killed_has_the_same_result(
    start: Start, undisturbed: RunFolder
) -> None:
    program = start(*command(3, 0.03))
    program.until(program.is_training, "training")
    for workers in (2, 4):
        asked = start("-m", "instep", "scale", program.run, "--workers", workers)
        assert asked.end() == 0, asked.stderr
        program.until(
            lambda: len(program.events("generation_started")[-1]["members"]) == workers,  # noqa: B023
            "scaled",
        )
        kill(list(newest_pids(program).values())[1])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)


def script(folder: Path, text: str) -> Path:
    file = folder / "script.py"
    file.write_text(text)
    return file


RECIPE = """
import sys
import slow_tiny
import instep

train = {"steps": 120, "global_batch": 16, "determinism": "bits"}
session = instep.join(slow_tiny.recipe, arguments={"pause_s": 0.01}, train=train, seed=5)
assert sys.argv[1:] == ["a"]
for step in session.steps():
    last = step.number
assert last == 120
"""


@pytest.mark.slow
def test_a_script_with_a_recipe_has_its_workers_replaced_too(start: Start, tmp_path: Path) -> None:
    file, path = script(tmp_path, RECIPE), {}
    path["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{RECIPES}"
    whole = start("-m", "instep", "run", file, "--workers", 1, "--", "a", environment=path)
    program = start("-m", "instep", "run", file, "--workers", 2, "--", "a", environment=path)
    program.until(program.is_training, "training")
    for number in (1, 0):
        kill(newest_pids(program)[number])
        program.until(lambda: newest_step(program) > 40 * (2 - number), "further")  # noqa: B023
    assert program.end() == whole.end() == 0, program.stderr + whole.stderr
    assert len(program.events("worker_lost")) == 2
    sums = [each.events("model_saved")[-1]["parameters_sha256"] for each in (program, whole)]
    assert sums[0] == sums[1]


def newest_step(program: Started) -> int:
    return int(program.ledger["step"].max(initial=0))


WITHIN = """
import sys, torch
from torch.utils.data import TensorDataset
import instep

with instep.join(train={"global_batch": 16, "epochs": 1}, seed=3) as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(32, 2)))
    print("arguments", sys.argv[1:], __name__, "job", session.job.train.global_batch)
    for epoch in %s:
        for (x,) in loader:
            session.backward(model(x).mean())
            optimizer.step()
            %s
"""


def test_what_the_script_gives_to_join_is_the_job_and_the_command_line_comes_after_it(
    start: Start, tmp_path: Path
) -> None:
    file = script(tmp_path, WITHIN % ("session.epochs()", "pass"))
    options = ("--workers", 1, "--set", "train.global_batch=8")
    program = start("-m", "instep", "run", file, *options, "--", "a", "--b")
    assert program.end() == 0, program.stderr
    spec = RunFolder(program.run).spec
    assert (spec.name, spec.workers, spec.seed) == ("script", 1, 3)
    assert (spec.train.global_batch, spec.train.epochs) == (8, 1)
    assert program.summary["steps"] == 4
    log = (program.run / "logs" / "worker-0.log").read_text()
    assert "arguments ['a', '--b'] __main__ job 8" in log
    program.check_nothing_is_left()


@pytest.mark.parametrize(
    ("epochs", "more", "sentence"),
    [
        slow("[0]", "pass", "is not within `for epoch in session.epochs():`"),
        slow("session.epochs()", "session.sync_gradients and session.sum(1)", "was committed"),
        slow(
            "session.epochs()",
            "break\n        session.validated(1, loss=0.5)",
            "whose step is not committed (a loop that `break` has left",
        ),
        slow(
            "(each for each in session.epochs(4) if each < 3 or session.rank or session.sum(1))",
            "pass",
            "process 0 waited in session.sum of 1 values while process 1 waited in the exchange of "
            "the gradients of step 7: every process needs to make the same calls",
        ),
        slow(
            "(each for each in session.epochs() if session.rank or session.sum(1))",
            "pass",
            "process 0 waited in session.sum of 1 values while process 1 waited in the exchange of "
            "the gradients of step 1: every process needs to make the same calls",
        ),
        slow("session.epochs()", "sys.exit(3)", "ended itself with exit code 3"),
        slow("session.epochs()", "1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_what_no_other_worker_could_take_up_is_refused(
    start: Start, tmp_path: Path, epochs: str, more: str, sentence: str
) -> None:
    program = start("-m", "instep", "run", script(tmp_path, WITHIN % (epochs, more)))
    assert program.end() in (2, 5), program.stderr
    assert sentence in program.error
    if "the gradients of step 7" in sentence:
        assert len(program.events("generation_started")) == 2
    program.check_no_process_is_left()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("print(1)", "did not call instep.join, so there is nothing to run workers for"),
        slow("import nothing_such", "No module named 'nothing_such'"),
        slow("import instep; instep.join(train={'epoks': 1})", "epoks"),
        slow("import instep; instep.train('a.py:b')", "the script calls instep.train"),
    ],
)
def test_a_script_that_does_not_join_is_refused_before_anything_is_started(
    start: Start, tmp_path: Path, text: str, sentence: str
) -> None:
    program = start("-m", "instep", "run", script(tmp_path, text))
    assert program.end() != 0
    assert sentence in program.error
    assert not (program.work / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("command", [("-m", "instep", "run"), ()])
def test_a_session_that_trained_nothing_is_an_error(
    start: Start, tmp_path: Path, command: tuple[str, ...]
) -> None:
    file = script(tmp_path, "import instep\nwith instep.join() as session: pass")
    program = start(*command, file)
    assert program.end() != 0
    assert "closed before it trained anything: call session.prepare(...)" in program.stderr


TARGET = """
import torch
from torch.utils.data import TensorDataset
import instep

train, stop = {"global_batch": 16, "epochs": 4}, {"metric": "reached", "mode": "max", "target": 4}
with instep.join(train=train, stop=stop) as session:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, TensorDataset(torch.ones(32, 2)))
    for epoch in session.epochs():
        for (x,) in loader:
            session.backward(model(x).mean())
            optimizer.step()
        session.validated(32, reached=session.step)
"""


@pytest.mark.slow
def test_a_rule_can_stop_a_resumed_script_at_the_step_that_it_was_resumed_from(
    start: Start, tmp_path: Path
) -> None:
    command = ("-m", "instep", "run", script(tmp_path, TARGET), "--workers", 2)
    first = start(*command, "--set", "train.stop_after_steps=4")
    assert first.end() == 0, first.stderr
    again = start("-m", "instep", "resume", first.run)
    assert again.end() == 0, again.stderr
    summary = first.summary
    assert (summary["outcome"], summary["rule"], summary["steps"]) == ("stopped", "target", 4)


DIES = """
import os, signal
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep
from instep.worker.own.checks import Guard

compare, died = Guard.compare, Path("{died}")

def dies(self, comm):
    if comm.rank == {rank} and comm.size > 1 and not died.exists():
        died.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    compare(self, comm)

Guard.compare = dies
x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
train = {{"epochs": 3, "global_batch": 16, "determinism": "bits"}}
with instep.join(train=train, seed=5) as session:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = session.prepare(model, optimizer, TensorDataset(x, x[:, :2]))
    for epoch in session.epochs():
        for batch, target in loader:
            session.backward(nn.functional.mse_loss(model(batch), target))
            optimizer.step()
            optimizer.zero_grad()
        assert session.sum(1.0) == (session.size,)
"""


@pytest.mark.tail
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_dies_while_models_are_compared_at_an_epochs_end_is_replaced(
    start: Start, tmp_path: Path, rank: int
) -> None:
    """The newcomer goes on behind the epoch, and the others do not wait for it to compare."""
    sums = []
    for died in (tmp_path / "died", tmp_path):  # which is there: nobody dies
        text = DIES.format(died=died, rank=rank)
        program = start("-m", "instep", "run", script(tmp_path, text), "--workers", 2)
        assert program.end() == 0, program.stderr
        sums.append(program.events("model_saved")[-1]["parameters_sha256"])
        assert len(program.events("worker_lost")) == (died != tmp_path)
    assert sums[0] == sums[1]
