"""A second Slurm job adds its nodes to a running run, and takes them away: a real Slurm."""

import re
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from started import Start, Started, kill, pid_of
from test_recovery import undisturbed
from test_slurm import begin, check_end, check_nothing_is_left
from test_survival import reach, step_of

from slurm import Slurm, until

pytestmark = [pytest.mark.process]

__all__ = ["undisturbed"]  # the fixture

SLOWER = "[arguments]\npause_s = 0.022\n"


@pytest.fixture
def program(start: Start, tmp_path: Path, slurm: Slurm) -> Iterator[Started]:
    """A run that trains on two workers, on n0 and n1."""
    with slurm.allocation(2, "--nodelist=n0,n1") as environment:
        program = begin(start, tmp_path, environment, "--workers", "2", launch=SLOWER)
        program.until(program.is_training, "training")
        yield program


@pytest.fixture
def more(slurm: Slurm) -> Iterator[dict[str, str]]:
    """The environment of a process in a second allocation: n2."""
    with slurm.allocation(1, "--nodelist=n2") as environment:
        yield environment


def join(start: Start, program: Started, environment: dict[str, str], *words: str) -> Started:
    return start("-m", "instep", "join-run", program.run, *words, environment=environment)


def hosts_of_members(program: Started) -> list[int]:
    """The hosts of the workers of the newest generation."""
    hosts = {e["worker"]: e["host"] for e in program.events("worker_joined")}
    return sorted(hosts[worker] for worker in program.events("generation_started")[-1]["members"])


def train_on(program: Started, hosts: list[int]) -> None:
    """Wait until these are the hosts of its workers, and it has trained on them."""
    program.until(lambda: hosts_of_members(program) == hosts, f"on hosts {hosts}")
    reach(program, step_of(program) + 5)


@pytest.mark.slow
def test_a_node_that_joins_has_a_worker_until_it_leaves_and_no_worker_is_lost(
    start: Start, slurm: Slurm, program: Started, more: dict[str, str], undisturbed: Path
) -> None:
    joined = join(start, program, more)
    train_on(program, [0, 1, 2])
    kill(pid_of(program, "master_started"))  # another master knows of it too
    program.until(lambda: len(program.events("master_started")) == 2, "another master")
    reach(program, step_of(program) + 5)
    joined.process.send_signal(signal.SIGUSR1)  # as --signal=B:USR1@60 does
    assert joined.end() == 0, joined.stderr
    assert f"n2 joined {program.run.resolve()} with 1 worker more" in joined.stderr
    assert "left the run, which goes on" in joined.stderr
    joined.check_no_process_is_left()
    train_on(program, [0, 1])
    check_end(program, undisturbed, slurm)
    assert program.events("worker_lost") == program.events("host_lost") == []
    assert [(e["workers"], e["hosts"]) for e in program.events("scaled")] == [(3, [2]), (2, [2])]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cancelled", "node lost", "client killed"])
def test_a_job_that_is_gone_at_once_takes_its_workers_with_it_and_the_others_go_on(
    start: Start,
    slurm: Slurm,
    program: Started,
    more: dict[str, str],
    undisturbed: Path,
    how: str,
) -> None:
    joined = join(start, program, more)
    train_on(program, [0, 1, 2])
    if how == "cancelled":
        slurm.cancel(more["SLURM_JOB_ID"])
        assert joined.end() == 0, joined.stderr
    elif how == "node lost":
        slurm.down("n2")
        slurm.up("n2")
        assert joined.end() == 0, joined.stderr
    else:
        joined.process.kill()
    train_on(program, [0, 1])
    check_end(program, undisturbed, slurm)
    joined.check_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("cancelled", [True, False])
def test_a_batch_job_joins_until_it_is_cancelled_or_the_run_is_over(
    start: Start,
    tmp_path: Path,
    slurm: Slurm,
    program: Started,
    undisturbed: Path,
    cancelled: bool,
) -> None:
    words = shlex.join([sys.executable, "-m", "instep", "join-run", str(program.run)])
    submit = ["sbatch", "--parsable", "--nodelist=n2", f"--output={tmp_path / 'output'}"]
    job = slurm.ask(*submit, "--wrap", f"exec {words}").strip()
    train_on(program, [0, 1, 2])
    if cancelled:
        slurm.cancel(job)
        train_on(program, [0, 1])
    check_end(program, undisturbed, slurm)
    state = ["squeue", "-h", "--states=all", "-o", "%T", "-j", job]
    end = "CANCELLED" if cancelled else "COMPLETED"
    until(lambda: slurm.ask(*state).strip() == end, "the end of the second job")
    said = "left the run, which goes on" if cancelled else "the run is over"
    assert said in (tmp_path / "output").read_text()


@pytest.mark.slow
def test_nodes_alone_take_workers_over_from_others(
    start: Start, slurm: Slurm, program: Started, more: dict[str, str], undisturbed: Path
) -> None:
    done = start("-m", "instep", "scale", program.run, "--workers", "4", environment=more)
    assert done.end() == 0, done.stderr
    train_on(program, [0, 0, 1, 1])
    joined = join(start, program, more, "--workers", "0")
    train_on(program, [0, 1, 1, 2])
    joined.process.send_signal(signal.SIGINT)
    assert joined.end() == 0, joined.stderr
    train_on(program, [0, 0, 1, 1])
    check_end(program, undisturbed, slurm)


@pytest.mark.slow
def test_what_cannot_join_is_told_why_at_once(
    start: Start, tmp_path: Path, slurm: Slurm, program: Started, more: dict[str, str]
) -> None:
    for environment, words, expected in [
        (slurm.environment, (), "outside a Slurm allocation, so there are no nodes to add"),
        (more, ("--workers", "99"), r"99 more than now: workers = 101: a run needs 1 or more"),
        (more, ("--workers", "-1"), r"--workers -1: needs 0 or more"),
    ]:
        joined = join(start, program, environment, *words)
        assert joined.end() == 2
        assert re.search(expected, joined.error), joined.stderr
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    joined = join(start, program, more)
    assert joined.end() == 6
    assert "is not running; it is interrupted" in joined.error
    check_nothing_is_left(program, slurm)


def test_a_run_on_one_machine_is_named_as_such(start: Start, tmp_path: Path) -> None:
    """Also where there is no Slurm."""
    job = tmp_path / "job.toml"
    recipe = Path(__file__).parent / "recipes" / "slow_tiny.py"
    job.write_text(
        f'name = "local"\nrecipe = "{recipe}:recipe"\nworkers = 1\n[train]\nsteps = 2000\n'
        "global_batch = 16\n"
    )
    program = start("-m", "instep", "run", job)
    folder = program.work / "runs" / "local"
    program.until((folder / "steps.bin").exists, "training")
    joined = start("-m", "instep", "join-run", folder)
    assert joined.end() == 2
    assert "is not on Slurm (launch.on = 'local'), so other machines cannot join" in joined.error
