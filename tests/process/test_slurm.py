"""Runs on a real Slurm, in allocations and as batch jobs, with losses and time limits."""

import os
import re
import signal
from collections.abc import Iterator
from importlib.metadata import distribution, version
from pathlib import Path

import psutil
import pytest
from started import RECIPES, TIMEOUT_S, Start, Started
from test_recovery import check_same_result, undisturbed
from test_survival import STEPS_OF_A_RUN, reach

from instep.store.run_folder import RunFolder
from marks import long, slow
from slurm import Slurm, until

pytestmark = pytest.mark.process

METADATA = Path(str(distribution("torch").locate_file(f"torch-{version('torch')}.dist-info")))

__all__ = ["undisturbed"]  # the fixture


@pytest.fixture
def in_allocation(slurm: Slurm) -> Iterator[dict[str, str]]:
    """The environment of a process in an allocation of three nodes."""
    with slurm.allocation(3) as environment:
        yield environment


def begin(
    start: Start, folder: Path, environment: dict[str, str], *words: str, launch: str = ""
) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 3\nseed = 5\n'
        f'[train]\nsteps = {STEPS_OF_A_RUN}\nglobal_batch = 16\ndeterminism = "bits"\n'
        "validate_every = 40\n[checkpoint]\nevery = 25\n"
        f'[launch]\non = "slurm"\naddress = "127.0.0.1"\n{launch}'
    )
    return start("-m", "instep", "run", job, *words, environment=environment)


def sha256_of(run: Path) -> str:
    return str(RunFolder(run).last("model_saved")["parameters_sha256"])


def hosts_of(program: Started) -> dict[int, int]:
    """The newest process of each host."""
    return {int(e["host"]): int(e["pid"]) for e in program.events("host_joined")}


def is_whole_again(program: Started, generations: int) -> bool:
    """Whether another generation has three workers, on three hosts, and no one is lost since."""
    formed = program.events("generation_started")
    if len(formed) <= generations or len(formed[-1]["members"]) < 3:
        return False
    gone = [e["time"] for name in ("host_lost", "worker_lost") for e in program.events(name)]
    hosts = {e["worker"]: e["host"] for e in program.events("worker_joined")}
    spread = {hosts[worker] for worker in formed[-1]["members"]} == {0, 1, 2}
    return spread and max(gone) < formed[-1]["time"]


def steps_of(slurm: Slurm) -> list[str]:
    """Steps of jobs that have not ended."""
    return slurm.ask("squeue", "-h", "-s", "-o", "%i %N").splitlines()


def check_nothing_is_left(program: Started, slurm: Slurm) -> None:
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    until(lambda: steps_of(slurm) == [], "the end of all steps")


def check_end(
    program: Started, undisturbed: Path, slurm: Slurm, limit_s: float = TIMEOUT_S
) -> None:
    """That it ends as if nothing had been, without going back, and leaves nothing."""
    assert program.end(limit_s) == 0, program.stderr
    assert program.events("went_back") == []
    check_same_result(program, undisturbed)
    check_nothing_is_left(program, slurm)


@pytest.mark.slow
def test_three_nodes_give_the_bits_of_one_machine_and_so_do_two_once_one_is_lost(
    start: Start, tmp_path: Path, slurm: Slurm, in_allocation: dict[str, str], undisturbed: Path
) -> None:
    program = begin(start, tmp_path, in_allocation)
    program.until(program.is_training, "training")
    reach(program, 40)
    assert sorted(line.split()[1] for line in steps_of(slurm)) == slurm.nodes
    slurm.down("n2")
    try:
        assert program.end() == 0, program.stderr
    finally:
        slurm.up("n2")
    assert [e["host"] for e in program.events("host_lost")] == [2]
    assert len(program.events("generation_started")[0]["members"]) == 3
    assert program.events("went_back") == []
    warnings = [e["text"] for e in program.events("warning") if "host 2" in e["text"]]
    assert len(warnings) <= 1, warnings
    check_same_result(program, undisturbed)
    check_nothing_is_left(program, slurm)


@pytest.mark.parametrize("losses", [slow(6), long(20)])
def test_hosts_and_nodes_that_are_lost_leave_no_trace_in_the_result(
    start: Start,
    tmp_path: Path,
    slurm: Slurm,
    in_allocation: dict[str, str],
    undisturbed: Path,
    losses: int,
) -> None:
    pause = f"[arguments]\npause_s = {0.05 + 0.004 * losses}\n"
    program = begin(start, tmp_path, in_allocation, launch=pause)
    program.until(program.is_training, "training")
    for turn in range(losses):
        lost, generations = turn % 3, len(program.events("generation_started"))
        if turn % 2:
            slurm.crash(slurm.nodes[lost])
            slurm.up(slurm.nodes[lost])
        else:
            psutil.Process(hosts_of(program)[lost]).kill()
        program.until(lambda n=generations: is_whole_again(program, n), "whole again")
    check_end(program, undisturbed, slurm, 300)


@pytest.mark.slow
def test_steps_whose_srun_was_killed_are_ended_with_the_run(
    start: Start, tmp_path: Path, slurm: Slurm, in_allocation: dict[str, str], undisturbed: Path
) -> None:
    program = begin(start, tmp_path, in_allocation)
    program.until(program.is_training, "training")
    for process in program.processes():
        if process.name() == "srun":
            process.kill()
    assert program.end() == 0, program.stderr
    check_same_result(program, undisturbed)
    check_nothing_is_left(program, slurm)


@pytest.mark.slow
def test_a_signal_to_all_job_steps_ends_no_host(
    start: Start, tmp_path: Path, slurm: Slurm, in_allocation: dict[str, str], undisturbed: Path
) -> None:
    """What `--signal=USR1@60` without `B:` sends."""
    program = begin(start, tmp_path, in_allocation)
    program.until(program.is_training, "training")
    slurm.ask("scancel", "--signal=USR1", in_allocation["SLURM_JOB_ID"])
    assert program.end() == 0, program.stderr
    assert program.events("host_lost") == program.events("worker_lost") == []
    check_same_result(program, undisturbed)
    check_nothing_is_left(program, slurm)


@pytest.mark.slow
def test_a_job_is_submitted_and_followed(
    start: Start, tmp_path: Path, slurm: Slurm, undisturbed: Path
) -> None:
    more = 'nodes = 3\ncpus = 2\n[launch.options]\npartition = "all"\ntime = 10\n'
    program = begin(start, tmp_path, slurm.environment, "--json", launch=more)
    assert program.end() == 0, program.stderr
    assert "#SBATCH --nodes=3\n" in program.stderr
    assert re.search(r"job \d+ RUNNING on n\[0-2\]\n", program.stderr)
    assert re.search(r"job \d+ COMPLETED\n", program.stderr)
    folder = program.work / "runs" / "disturbed"
    assert f'"steps": {STEPS_OF_A_RUN}' in program.stdout.splitlines()[-1]
    assert sha256_of(folder) == sha256_of(undisturbed)
    assert {path.name for path in folder.with_name("disturbed.slurm").iterdir()} == {
        *("batch.sh", "submitted.toml", "output.log", "progress.log")
    }
    program.check_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(("sent", "following"), [("USR1", "requeue"), ("USR2", "submit")])
def test_a_job_whose_time_runs_out_saves_and_goes_on_in_its_next_turn_or_in_another_job(
    start: Start, tmp_path: Path, slurm: Slurm, undisturbed: Path, sent: str, following: str
) -> None:
    options = f'[launch.options]\nsignal = "{sent}@60"\nnext = "{following}"\n'
    program = begin(start, tmp_path, slurm.environment, launch=f"nodes = 2\n{options}")
    program.until(lambda: "RUNNING on" in program.stderr, "running")
    job = re.findall(r"slurm   job (\d+)", program.stderr)[0]
    folder = program.work / "runs" / "disturbed"
    program.until(lambda: any(folder.glob("checkpoints/step-*")), "a checkpoint")
    slurm.ask("scancel", "--batch", f"--signal={sent}", job)  # what --signal=B:USR1@60 sends
    assert program.end() == 0, program.stderr
    again = "PENDING" if following == "requeue" else "COMPLETED"
    assert re.search(rf"RUNNING on(.|\n)* {again}(.|\n)* RUNNING on", program.stderr)
    jobs = set(re.findall(r"slurm   job (\d+) RUNNING", program.stderr))
    assert len(jobs) == (1 if following == "requeue" else 2)
    assert "resumed_step" in (folder / "events.jsonl").read_text()
    assert sha256_of(folder) == sha256_of(undisturbed)
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_job_whose_first_node_is_lost_is_queued_again_and_resumes(
    start: Start, tmp_path: Path, slurm: Slurm, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, slurm.environment, launch="nodes = 2\n")
    folder = program.work / "runs" / "disturbed"
    program.until(lambda: any(folder.glob("checkpoints/step-*")), "a checkpoint")
    slurm.down("n0")
    slurm.up("n0")
    assert program.end() == 0, program.stderr
    assert "has lost its first node, n0; it is queued again" in program.stderr
    assert sha256_of(folder) == sha256_of(undisturbed)
    program.check_no_process_is_left()


@pytest.mark.slow
def test_ctrl_c_leaves_the_job_and_a_cancelled_one_saves_and_is_not_queued_again(
    start: Start, tmp_path: Path, slurm: Slurm
) -> None:
    program = begin(start, tmp_path, slurm.environment, launch="nodes = 2\n")
    folder = program.work / "runs" / "disturbed"
    program.until(lambda: any(folder.glob("checkpoints/step-*")), "a checkpoint")
    os.kill(program.process.pid, signal.SIGINT)
    assert program.end() == 130
    job = re.findall(r"next    scancel (\d+)", program.stderr)[0]
    assert slurm.ask("squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING"
    slurm.cancel(job)
    assert slurm.ask("squeue", "-h", "-t", "all", "-j", job, "-o", "%T").strip() == "CANCELLED"
    program.check_no_process_is_left()
    assert "interrupted" in (folder / "events.jsonl").read_text()


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "nodes = 9\n",
            "launch.nodes = 9, and the nodes of Slurm's partitions are: all 3. Ask for fewer",
        ),
        ('[launch.options]\npartition = "gpu"\n', "sbatch failed: .*partition"),
        (
            "cpus = 99\n",
            r"no nodes .* have what the job asks for: partition all has 3 of 16 cores, .* MB\. "
            r"Ask for less with launch\.cpus, .* The script is above",
        ),
    ],
    ids=["too few nodes", "no such partition", "too many cores"],
)
def test_what_slurm_refuses_is_said_at_once_and_leaves_nothing(
    start: Start, tmp_path: Path, slurm: Slurm, more: str, expected: str
) -> None:
    program = begin(start, tmp_path, slurm.environment, launch=more)
    assert program.end() == 2
    assert re.search(expected, program.error), program.stderr
    assert list(program.work.glob("runs/*")) == []


def test_an_allocation_with_too_few_nodes_is_named_with_them(
    start: Start, tmp_path: Path, in_allocation: dict[str, str]
) -> None:
    program = begin(start, tmp_path, in_allocation, launch="nodes = 4\n")
    assert program.end() == 2
    assert "launch.nodes = 4, and the allocation" in program.error
    assert "has 3 nodes: n0, n1, n2." in program.error


def test_a_node_that_does_not_see_the_runs_folder_is_named_before_anything_starts(
    start: Start, tmp_path: Path, slurm: Slurm
) -> None:
    (there := tmp_path / "there").mkdir()
    (runs := tmp_path / "program-0" / "work" / "runs").mkdir(parents=True)
    with slurm.mounted("n1", there, runs), slurm.allocation(2) as environment:
        program = begin(start, tmp_path, environment)
        assert program.end() == 2
    assert (
        f"the node n1 does not see the run's folder {runs / 'disturbed'}. Put recipe, data and"
        in (program.error)
    )
    assert list(runs.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "says"),
    [
        (RECIPES, f"the node n1 does not have the recipe's file {RECIPES / 'slow_tiny.py'}."),
        (METADATA, f"the node n1 has torch 1.0, and this machine {version('torch')}."),
    ],
    ids=["recipe", "torch"],
)
def test_a_node_that_lacks_something_is_named_before_anything_starts(
    start: Start, tmp_path: Path, slurm: Slurm, place: Path, says: str
) -> None:
    (there := tmp_path / "there").mkdir()
    (there / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.0\n")
    with slurm.mounted("n1", there, place), slurm.allocation(2) as environment:
        program = begin(start, tmp_path, environment)
        assert program.end() == 2
    assert says in program.error
    assert list(program.work.glob("runs/*")) == []


def test_a_machine_without_slurm_is_told_so(start: Start, tmp_path: Path) -> None:
    for environment in ({}, {"SLURM_JOB_ID": "7"}):
        (folder := tmp_path / f"{len(environment)}").mkdir()
        program = begin(start, folder, {**environment, "PATH": str(tmp_path)}, launch="nodes = 2\n")
        assert program.end() == 2
        assert "launch.on = 'slurm', and there is no command" in program.error


def test_a_machine_that_knows_no_cluster_is_told_so(start: Start, tmp_path: Path) -> None:
    """Slurm's commands are there, as on a machine where the package was installed only."""
    (programs := tmp_path / "bin").mkdir()
    command = programs / "sinfo"
    command.write_text(
        "#!/bin/sh\necho 'sinfo: fatal: Could not establish a configuration source' >&2\nexit 1\n"
    )
    command.chmod(0o755)
    program = begin(start, tmp_path, {"PATH": f"{programs}:/usr/bin:/bin"}, launch="nodes = 2\n")
    assert program.end() == 2
    assert "This machine knows no Slurm cluster: run it on one that does" in program.error
    assert program.error.count("\n") == 1
