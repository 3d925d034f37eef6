"""A pool's journal that is damaged or cannot be written, and a command whose keeper is killed."""

import errno
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from instep.cli import main
from instep.errors import RunError
from instep.job.file import load
from instep.plain_file import replace_plain
from instep.pool.commands import running
from instep.pool.jobs import JobSubmitted, PoolJob, PoolSpec
from instep.pool.notice import SchedulerNotice, notice_in
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import ask, pending
from instep.pool.scheduler import JobSight, PoolScheduler
from instep.pool.serve import check_journal, turn
from instep.system.processes import has_ended
from made_up_searches import make_pool, make_search


def with_rows(pool, *statements):
    rows = sqlite3.connect(pool / "pool.sqlite")
    for each in statements:
        assert rows.execute(each).rowcount > 0
    rows.commit()
    rows.close()


def other_digits(text):
    """The text with each of its digits changed, one at a time."""
    for place, letter in enumerate(text):
        if letter.isdigit():
            yield text[:place] + str((int(letter) + 1) % 10) + text[place + 1 :]


def test_any_changed_digit_of_a_pools_journal_is_said_in_one_sentence(tmp_path):
    pool = make_pool(tmp_path / "pool")
    rows = sqlite3.connect(pool / "pool.sqlite", isolation_level=None)
    for table, column, key in (
        ("jobs", "job", "id"),
        ("about", "about", "one"),
        ("events", "event", "number"),
    ):
        name, text = rows.execute(f"SELECT {key}, {column} FROM {table}").fetchone()
        for other in other_digits(text):
            rows.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (other, name))
            with pytest.raises(RunError, match="is damaged"):
                check_journal(PoolFolder(pool))
        rows.execute(f"UPDATE {table} SET {column} = ? WHERE {key} = ?", (text, name))
    check_journal(PoolFolder(pool))
    rows.close()


@pytest.mark.parametrize("value", [b"not text", None, 7])
def test_a_value_of_another_type_is_said_in_one_sentence(tmp_path, value):
    pool = make_pool(tmp_path / "pool")
    rows = sqlite3.connect(pool / "pool.sqlite", isolation_level=None)
    rows.execute("UPDATE jobs SET job = ? WHERE id = 'late'", (value,))
    rows.close()
    with pytest.raises(RunError, match="is damaged: job late"):
        check_journal(PoolFolder(pool))


def test_words_of_a_journals_own_that_are_no_text_are_said_in_one_sentence(tmp_path):
    pool = make_pool(tmp_path / "pool")
    path = pool / "pool.sqlite"
    path.write_bytes(path.read_bytes().replace(b"tablejobsjobs", b"table\xf4obsjobs"))
    with pytest.raises(RunError, match="cannot be used"):
        check_journal(PoolFolder(pool))


def test_a_job_that_is_gone_from_a_journal_is_missed_and_rows_of_earlier_versions_are_read(
    tmp_path, capsys
):
    pool = make_pool(tmp_path / "pool")
    with_rows(pool, "UPDATE jobs SET job = substr(job, 1, length(job) - 9)")
    assert {*PoolFolder(pool).state().jobs} == {"done", "busy", "late"}
    with_rows(pool, "DELETE FROM jobs WHERE id = 'late'")
    assert main(["list", "--pool", str(pool)]) == 6
    assert "it has 2 jobs, and had 3" in capsys.readouterr().err
    (pool / "pool.sqlite").write_bytes(b"")
    for suffix in ("-wal", "-shm"):
        (pool / f"pool.sqlite{suffix}").unlink(missing_ok=True)
    for words in (["list", "--pool", str(pool)], ["pool", "--pool", str(pool), "start"]):
        assert main(words) == 6
        assert "is empty, so what it had is lost" in capsys.readouterr().err


def test_the_end_of_a_command_is_written_once_there_is_room(tmp_path, monkeypatch):
    tries = []

    def full_at_first(path, said, **more):
        tries.append(path)
        if len(tries) < 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace_plain(path, said, **more)

    monkeypatch.setattr(running, "replace_plain", full_at_first)
    monkeypatch.setattr(running, "ROOM_S", 0.0)
    ending = tmp_path / "a.ended"
    running._write(ending, b'{"code": 0, "seconds": 1.0}')
    assert running.ending_of(ending) == running.CommandEnding(0, 1.0)


class Starts:
    """Hands that only start."""

    def __init__(self):
        self.started = []

    def look(self, job):
        return JobSight(job.id in self.started, job.target)

    def start(self, job):
        self.started.append(job.id)

    def scale(self, job):
        return "scaled"

    def stop(self, job):
        raise AssertionError(job)


def test_a_scheduler_whose_disk_is_full_waits_says_so_and_goes_on(tmp_path, capsys):
    pool = PoolFolder(tmp_path / "pool")
    pool.make(PoolSpec(cores=2))
    journal, notice, hands = PoolJournal(pool.folder, write=True), None, Starts()
    try:
        notice = SchedulerNotice(pool.folder)
        scheduler = PoolScheduler(pool.empty, journal, hands)
        assert turn(pool, scheduler, notice, 1.0)
        (pages,) = journal._rows.execute("PRAGMA page_count").fetchone()
        journal._rows.execute(f"PRAGMA max_page_count = {pages}")
        large = PoolJob(id="a", share="x", at_least=1, at_most=1, command=("x" * 9000,))
        ask(pool.folder, JobSubmitted(large))
        for _ in range(2):
            assert not turn(pool, scheduler, notice, 2.0)
            assert (scheduler.state.jobs, hands.started) == ({}, [])
            assert "disk is full" in notice_in(pool.folder)
        assert capsys.readouterr().err.count("tries again") == 1
        assert len([*pending(pool.folder)]) == 1
        journal._rows.execute("PRAGMA max_page_count = 100000")
        assert turn(pool, scheduler, notice, 3.0)
        assert hands.started == ["a"]
        assert notice_in(pool.folder) == ""
        assert not [*pending(pool.folder)]
        notice.say("it waits")
        assert "it waits" in notice_in(pool.folder)
    finally:
        journal.close()
        if notice is not None:
            notice.close()
    assert notice_in(pool.folder) == ""


COMMAND = """
import sys
from pathlib import Path
from instep.pool.commands.running import run_command
from instep.pool.jobs import PoolJob
words = ("sh", "-c", "setsid sh -c 'echo $$ > left; sleep 600; true' & sleep 600; true")
job = PoolJob(id="a", share="a", at_least=1, at_most=1, command=words, folder=sys.argv[1])
run_command(job, Path(sys.argv[1], "ending"))
"""


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody adopts orphans")
@pytest.mark.parametrize("keeper", [False, True])
def test_nothing_is_left_of_a_command_whose_waiting_process_or_keeper_is_killed(tmp_path, keeper):
    running = subprocess.Popen([sys.executable, "-c", COMMAND, str(tmp_path)])
    left = tmp_path / "left"
    while not (left.exists() and left.read_text().strip()):
        assert running.poll() is None
        time.sleep(0.01)
    victim = running.pid
    if keeper:
        children = f"/proc/{running.pid}/task/{running.pid}/children"
        with open(children) as file:
            (victim,) = map(int, file.read().split())
    os.kill(victim, signal.SIGKILL)
    running.wait()
    while not has_ended(int(left.read_text())):
        time.sleep(0.01)
    assert not (tmp_path / "ending").exists()


@pytest.fixture
def job_file(tmp_path):
    (tmp_path / "recipe.py").touch()
    path = tmp_path / "job.toml"
    path.write_text('recipe = "recipe.py:recipe"\n')
    return path


def test_a_job_that_says_nothing_of_checkpoints_is_saved_every_half_minute(
    tmp_path, job_file, capsys
):
    pool = PoolFolder(tmp_path / "pool")
    pool.make(PoolSpec(cores=2))
    words = ["submit", "--pool", str(pool.folder), str(job_file)]
    assert main(words) == 0
    assert "saves   every 30s" in capsys.readouterr().out
    assert main([*words, "--set", "checkpoint.every=7", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["saves"] is None
    every = {path.stem: load(path).checkpoint.every for path in pool.jobs.glob("*.toml")}
    assert every.pop(said["job"]) == 7
    ((other, theirs),) = every.items()
    assert theirs == "30s"
    assert main(["explain", other, "--pool", str(pool.folder)]) == 0
    assert "saves   every 30s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("submit --pool {0}/pool --share a\nb {0}/job.toml", r"--share 'a\nb': a share's name"),
        ("submit --pool {0}/pool {0}/flow.toml", "[job.train] at_least = 99: this job can have 1"),
        ("submit --pool {0}/pool {0}/share.toml", r"share = 'a\nb': has a line break"),
        ("pool --pool {0}/other start {0}/pool.toml", r"share 'a\nb': has a line break"),
        ("search {0}/job.toml --workers-file {0}/none", "No such file"),
        ("search {0}/job.toml --workers-file {0}/recipe.py", "a whole number from 1 on"),
        ("search {0}/found --trials 3", "search.trials = 3: this search has 5 trials"),
        ("plan {0}/job.toml --machine {0}/empty.json", "it says no 'hosts'"),
        ("plan {0}/job.toml --machine {0}/none.json", "it is not what `instep plan"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(
    tmp_path, job_file, capsys, monkeypatch, words, says
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    PoolFolder(tmp_path / "pool").make(PoolSpec(cores=2))
    if "found" in words:
        make_search(tmp_path / "found")
    (tmp_path / "flow.toml").write_text('[job.train]\nfile = "job.toml"\nat_least = 99\n')
    (tmp_path / "share.toml").write_text('[job.a]\ncommand = ["true"]\nshare = "a\\nb"\n')
    (tmp_path / "pool.toml").write_text('[shares]\n"a\\nb" = 2\n')
    (tmp_path / "empty.json").write_text("{}")
    (tmp_path / "none.json").write_text('{"hosts": 0, "host_cores": 2}')
    assert main([word.format(tmp_path) for word in words.split(" ")]) in (2, 6)
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1, said
