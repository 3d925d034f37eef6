"""`instep run script.py`: the user's own loop on workers that are replaced when they are lost."""

import os
import random
import signal
import time

import pytest
from started import RECIPES, Start, Started, slow

from instep.store.run_folder import RunFolder

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
    program.check_nothing_is_left()


def newest_pids(program: Started) -> dict[int, int]:
    return {int(e["worker"]): int(e["pid"]) for e in program.events("worker_joined")}


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False  # it is being replaced already
    return True


@pytest.mark.parametrize("kills", [4, slow(30)])
def test_workers_that_are_killed_at_random_moments_leave_no_trace(
    start: Start, undisturbed: RunFolder, kills: int
) -> None:
    draw = random.Random(kills)
    program = start(*command(3, 0.006 * kills**0.5))
    program.until(program.is_training, "training")
    killed, idle, farthest = 0, 0, 0
    while killed < kills and program.process.poll() is None:
        time.sleep(draw.uniform(0.1, 0.6))  # the moment is what is drawn
        committed = int(program.ledger["step"].max(initial=0))
        idle = 0 if committed > farthest else idle
        farthest = max(farthest, committed)
        if idle < 6:
            hit = kill(draw.choice(list(newest_pids(program).values())))
            killed, idle = killed + hit, idle + hit
    assert program.end(200) == 0, program.stderr
    assert killed == kills
    assert len(program.events("worker_lost")) >= kills - 1  # the last may have been done
    check_as_if_nothing_had_been(program, undisturbed)
