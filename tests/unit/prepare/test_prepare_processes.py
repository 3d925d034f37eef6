"""Workers of a preparation are processes: killed, stopped or many, they make the same shards."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from instep.data.shards.manifest import read_manifest
from instep.prepare.prepare import prepare
from marks import tail
from unit.prepare.test_prepare import FUNCTIONS, ask

pytestmark = pytest.mark.process

SLOW = """
import pathlib, time

def record(raw):
    gate = pathlib.Path("gate")
    while raw["id"] == 40_000 and gate.exists():
        time.sleep(0.01)
    return {"id": raw["id"], "x": raw["id"] / 3}
"""

COUNTING = """
import os, signal, time

def record(raw):
    with open("mapped", "ab") as file:
        file.write(b"%7d%8d\\n" % (raw["id"], os.getpid()))
        late = file.tell() >= 16 * LATE and not os.path.exists("killed")
    while late and not os.path.exists("alive"):
        time.sleep(0.01)
    if late:
        os.close(os.open("killed", os.O_CREAT))
        os.kill(int(open("alive").read()), signal.SIGKILL)
    return {"id": raw["id"]}
"""


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """A folder with a raw file of several pieces."""
    monkeypatch.chdir(tmp_path)
    Path("clean.py").write_text(FUNCTIONS)
    Path("slow.py").write_text(SLOW)
    lines = [json.dumps({"id": i, "name": "x" * 40}) for i in range(60_000)]
    Path("a.jsonl").write_text("\n".join(lines))
    return tmp_path


@pytest.mark.parametrize("every", [(1, 3), tail((1, 2, 7))])
def test_any_number_of_workers_make_the_same(raw, every):
    found = []
    for workers in every:
        asked = ask(sources=["a.jsonl"], map="clean.py:drawn", to=f"{workers}", shard_bytes=1 << 20)
        made = prepare(asked, lambda _: None, workers=workers).manifest
        shards = [[shard.samples, shard.bytes, shard.crc32] for shard in made.shards]
        found.append([made.sha256, made.samples, shards, json.dumps(made.statistics)])
    assert all(each == found[0] for each in found)  # statistics to the last digit


def start(*more: str) -> subprocess.Popen:
    """The command, with two workers."""
    words = ["prepare", "a.jsonl", "--to", "out", "--map", "slow.py:record", "--workers", "2"]
    command = [sys.executable, "-m", "instep", *words, "--json", *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def until(what) -> None:
    """Wait until something is so."""
    while not what():
        time.sleep(0.02)


def done():
    """Tasks whose results count: no record of theirs is still to be tried again."""
    results = Path("out/.preparing").glob("*.done")
    return sum(not path.with_suffix(".again").exists() for path in results)


def workers_of(command: subprocess.Popen) -> list[psutil.Process]:
    """Those that are themselves: to stop a fork before its exec would stop the command with it."""
    found = []
    for child in psutil.Process(command.pid).children():
        with contextlib.suppress(psutil.Error):
            if "instep.prepare.workers.process" in child.cmdline():
                found.append(child)
    return found


def test_workers_that_are_killed_or_stopped_are_replaced(raw):
    Path("gate").touch()  # somebody waits at the record in the middle
    command = start()
    until(lambda: done() >= 2)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        until(lambda: workers_of(command))
        before = {child.pid for child in workers_of(command)}
        for child in workers_of(command):
            os.kill(child.pid, number)
        until(lambda before=before: not before & {c.pid for c in workers_of(command)})
    Path("gate").unlink()
    out, err = command.communicate()
    assert command.returncode == 0, err.decode()
    summary = json.loads(out.splitlines()[-1])
    assert summary["workers_lost"] >= 2
    assert_undisturbed(summary["sha256"])


@pytest.mark.tail
def test_a_command_that_is_killed_is_continued_by_the_same_command(raw):
    Path("gate").touch()
    command = start()
    until(lambda: done() >= 2)
    children = workers_of(command)
    command.kill()
    command.communicate()
    psutil.wait_procs(children)
    before = done()
    Path("gate").unlink()
    out, _ = start().communicate()
    summary = json.loads(out.splitlines()[-1])
    assert summary["done_before"] == before
    assert_undisturbed(summary["sha256"])


def test_a_signal_keeps_what_is_done_and_leaves_no_process(raw):
    Path("gate").touch()
    command = start()
    until(lambda: list(Path("out/.preparing").glob("*.done")))
    children = workers_of(command)
    command.send_signal(signal.SIGTERM)  # SIGINT may be ignored, as by what nohup has started
    out, _ = command.communicate()
    assert command.returncode == 130
    assert json.loads(out.splitlines()[-1])["interrupted"]
    assert not any(child.is_running() for child in children)
    assert list(Path("out/.preparing").glob("*.done"))


def assert_undisturbed(sha256: str) -> None:
    """The folder has what a plain loop gives, and no more files than a whole one."""
    manifest = read_manifest(Path("out"))
    assert manifest.sha256 == sha256
    asked = ask(sources=["a.jsonl"], map="slow.py:record", to="plain", shard_bytes=32 << 20)
    assert prepare(asked, lambda _: None, workers=1).manifest.sha256 == sha256
    assert not [path for path in Path("out").iterdir() if path.name.startswith(".")]


def mapped():
    """Number and process of each record that was mapped."""
    return [tuple(map(int, line.split())) for line in Path("mapped").read_text().splitlines()]


@pytest.mark.tail
def test_after_a_kill_at_nine_tenths_at_most_a_twentieth_is_done_again(tmp_path, monkeypatch):
    """Each worker has one task, and there are as many as there are megabytes, up to 128."""
    monkeypatch.chdir(tmp_path)
    count, size = 10_000, 10_000  # 100 MB
    Path("slow.py").write_text(COUNTING.replace("LATE", str(count * 9 // 10)))
    with open("a.jsonl", "w") as file:
        file.writelines(json.dumps({"id": i, "name": "x" * size}) + "\n" for i in range(count))
    command = start()
    Path("alive.new").write_text(str(command.pid))
    os.replace("alive.new", "alive")
    command.communicate()
    assert command.returncode == -signal.SIGKILL
    before, ended = {number for number, _ in mapped()}, {pid for _, pid in mapped()}
    command = start()
    command.communicate()
    assert command.returncode == 0
    anew = [(number, pid) for number, pid in mapped() if pid not in ended]
    workers = [pid for pid, _ in Counter(pid for _, pid in anew).most_common(2)]
    # others have a record or two of each task, to see that they come out alike
    again = {number for number, pid in anew if pid in workers} & before
    assert len(again) <= count / 20
    assert read_manifest(Path("out")).samples == count
