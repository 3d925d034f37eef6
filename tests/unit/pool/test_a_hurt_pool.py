"""A pool whose disk is full or journal damaged, or which has a scheduler; jobs that end badly."""

import errno
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time

import pytest
from msgspec.structs import replace

from instep import detached
from instep.cli import main
from instep.dashboard.pools import pool_brief
from instep.errors import InstepError, RunError
from instep.pool.jobs import PoolJob, PoolSpec, PoolState
from instep.pool.local_runs import LocalRuns
from instep.pool.pool_file import PoolFolder
from instep.pool.scheduler import LATER, REFUSED, SCALED, JobSight, PoolScheduler
from instep.pool.view import how_it_ends
from instep.search.begin import found_in
from instep.search.record import FILE
from made_up_runs import make_run
from made_up_searches import make_search


@pytest.fixture
def pool(tmp_path):
    found = PoolFolder(tmp_path / "pool")
    found.make(PoolSpec(cores=2))
    (tmp_path / "recipe.py").touch()
    (tmp_path / "job.toml").write_text('recipe = "recipe.py:recipe"\n')
    return found


def test_a_key_whose_job_could_not_be_written_still_submits_it(tmp_path, pool, monkeypatch):
    words = ["submit", "--pool", str(pool.folder), "--key", "k", str(tmp_path / "job.toml")]

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as disk:
        disk.setattr(os, "fsync", full)
        assert main(words) == 6
        with pytest.raises(RunError, match=r"pool\.json cannot be written: No space left"):
            pool.make(pool.spec)
    assert not [*pool.jobs.iterdir()]
    assert main(words) == 0
    (written,) = pool.jobs.glob("*.toml")
    assert "recipe.py:recipe" in written.read_text()
    assert [*pool.state().jobs] == [written.stem]
    assert main(words) == 0
    assert [*pool.state().jobs] == [written.stem]


def test_a_pool_is_not_said_to_have_started_if_its_journal_is_damaged(pool, monkeypatch, capsys):
    monkeypatch.setattr(detached, "start", lambda *words: pytest.fail("started"))
    (pool.folder / "pool.sqlite").write_bytes(b"SQLite format 4" + bytes(1000))
    assert main(["pool", "--pool", str(pool.folder), "start"]) == 6
    assert "not a database" in capsys.readouterr().err


def test_a_search_of_a_grid_with_fewer_points_than_trials_is_over_after_its_points(tmp_path, pool):
    grid = {"seed": [1, 2, 3, 4, 5]}
    make_search(pool.runs / "net", trials=40, sampler="grid", space=grid)
    make_search(pool.runs / "more", trials=40, sampler="grid", space={"seed": [*range(6)]})
    for name in ("net", "more"):
        (pool.jobs / f"{name}.log").touch()
    hands = LocalRuns(pool.jobs, pool.runs)
    job = PoolJob(id="net", share="a", at_least=1, at_most=1, kind="search")
    assert hands.look(job).outcome == "completed"
    assert hands.look(replace(job, id="more")).outcome == ""


@pytest.mark.parametrize("job", ['recipe = "a.py:b', 'recipe = "a.py:b"\nunknown = 1'])
def test_a_scheduler_outlives_a_search_whose_record_is_damaged(pool, job):
    folder = make_search(pool.runs / "net")
    rows = sqlite3.connect(folder / FILE)
    assert rows.execute("UPDATE about SET value = ? WHERE key = 'job'", (job,)).rowcount == 1
    rows.commit()
    rows.close()
    wanted = PoolJob(id="net", share="a", at_least=1, at_most=1, kind="search")
    (pool.jobs / "net.log").touch()
    assert LocalRuns(pool.jobs, pool.runs).look(wanted) == JobSight(False)
    with pytest.raises(InstepError):
        found_in(folder)


def test_a_scheduler_that_finds_a_run_on_gpus_asks_it_for_nothing_twice():
    class OnGpus:
        """Hands of a run that keeps its two workers."""

        asked = 0

        def look(self, job):
            return JobSight(True, 2)

        def scale(self, job):
            self.asked += 1
            return REFUSED

    class Journal(list):
        def write(self, event, before, after):
            self.append(event)

    job = PoolJob(id="net", share="a", at_least=2, at_most=2, status="running", target=2, held=2)
    hands, journal = OnGpus(), Journal()
    scheduler = PoolScheduler(PoolState(cores=2, jobs={"net": job}, at=1.0), journal, hands)
    for number in range(20):
        scheduler.turn([], 1.0 + number / 10)
    assert (hands.asked, len(journal)) == (1, 1)


def test_a_pool_has_one_scheduler_whoever_started_it(pool, capsys):
    with detached.holding(pool.lock) as alone, detached.holding(pool.lock) as mine:
        assert alone
        assert mine  # as one that was started with its file locked
        assert detached.pid_of(pool.lock) == os.getpid()
        pool.lock.write_text(f"{os.getppid()}\n")
        for action in ("serve", "start"):
            assert main(["pool", "--pool", str(pool.folder), action]) == 6
            assert "has a scheduler already" in capsys.readouterr().err
    assert not pool.scheduled


COMMAND = """
import sys
from pathlib import Path
from instep.pool.commands.running import run_command
from instep.pool.jobs import PoolJob
words = ("sh", "-c", "sh -c 'echo $$ > left; sleep 600; true'; true")
job = PoolJob(id="a", share="a", at_least=1, at_most=1, command=words, folder=sys.argv[1])
run_command(job, Path(sys.argv[1], "ending"))
"""


def test_of_a_command_that_is_cancelled_nothing_is_left(tmp_path):
    running = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path)])
    left = tmp_path / "left"
    while not (left.exists() and left.read_text().strip()):
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    running.wait()
    assert not (tmp_path / "ending").exists()
    with pytest.raises(ProcessLookupError):
        os.kill(int(left.read_text()), 0)


def test_a_run_that_diverged_has_failed_in_a_pool(tmp_path, pool):
    make_run(tmp_path / "runs" / "a", nan_from=20)
    make_run(tmp_path / "runs" / "b")
    for name, diverged in (("a", "true"), ("b", "false")):
        said = f'{{"diverged": {diverged}, "rule_text": null, "metrics": {{}}}}'
        (tmp_path / "runs" / name / "summary.json").write_text(said)
        (pool.jobs / f"{name}.log").touch()
    jobs = [PoolJob(id=each, share="a", at_least=1, at_most=1) for each in ("a", "b")]
    runs = LocalRuns(pool.jobs, pool.runs)
    assert [runs.look(each)[5:7] for each in jobs] == [
        ("failed", "its loss is not finite"),
        ("completed", ""),
    ]


@pytest.mark.parametrize(
    ("kind", "status", "says"),
    [
        ("run", "waiting", "not start"),
        ("run", "running", "next commit"),
        ("command", "running", "killed"),
    ],
)
def test_cancelling_says_what_becomes_of_the_job(kind, status, says):
    job = PoolJob(id="a", share="a", at_least=1, at_most=1, kind=kind, status=status)
    assert says in how_it_ends(job)


def test_what_gives_a_job_to_a_pool_loads_neither_numpy_nor_torch(tmp_path, pool):
    code = (
        "import sys; from instep.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'numpy', 'torch'} & sys.modules.keys()"
    )
    for words in (["submit", str(tmp_path / "job.toml")], ["list"]):
        command = [sys.executable, "-c", code, *words, "--pool", str(pool.folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_a_run_that_does_not_answer_keeps_no_other_job_waiting(pool, monkeypatch):
    answers, asked = threading.Event(), list[int]()

    def silent(run, workers, places):
        asked.append(workers)
        assert answers.wait(10.0)

    monkeypatch.setattr("instep.pool.local_runs.scale", silent)
    monkeypatch.setattr("instep.pool.local_runs.ANSWER_S", 0.0)
    hands = LocalRuns(pool.jobs, pool.runs)
    job = PoolJob(id="net", share="a", at_least=1, at_most=2, target=1)
    assert hands.scale(job) == LATER
    assert hands.scale(replace(job, target=2)) == LATER  # nothing is asked beside it
    answers.set()
    monkeypatch.setattr("instep.pool.local_runs.ANSWER_S", 10.0)
    while (answer := hands.scale(replace(job, target=2))) == LATER:
        time.sleep(0.001)
    assert (answer, asked) == (SCALED, [1, 2])


@pytest.mark.parametrize("host", ['{"cores": 1, "memory": "lots"}', '{"cores": "many"}'])
def test_a_pools_own_file_that_was_edited_is_said_and_hides_no_run(pool, host, capsys):
    spec = f'{{"listen": "127.0.0.1:2220", "hosts": {{"one": {host}}}, "runs": "{pool.runs}"}}'
    (pool.folder / "pool.json").write_text(spec)
    assert main(["list", "--pool", str(pool.folder)]) == 6
    assert "pool.json cannot be read: " in capsys.readouterr().err
    assert "cannot be read" in pool_brief(pool.folder)["error"]
