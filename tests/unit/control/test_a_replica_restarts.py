"""A real master, over sockets, whose replicas have two processes: what those that start hear."""

import shutil
import subprocess
import threading
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control.decisions import endings
from instep.control.journal import Begin, Journal
from instep.control.master import Master
from instep.job import file as spec_file
from instep.store.folder import BEGINNING
from instep.system.processes import machine

TIMEOUT_S = 600.0
JOB = spec_file.build({"recipe": "a.py:f", "workers": 4, "mesh": {"shard": 2}}, source="a test")


@contextmanager
def a_master(folder, begin=None, job=JOB):
    """Its endpoint; it continues from the journal in the folder, unless this is a beginning."""
    board, there, masters = Switchboard(), threading.Event(), []

    def serve():
        about = {"hosted": True, "started": 1.0, "about": {}, "journal": Journal(folder, begin)}
        masters.append(Master(job, folder, board, views=[], **about))
        there.set()
        masters[0].serve()

    thread = threading.Thread(target=serve)
    thread.start()
    assert there.wait(TIMEOUT_S)
    yield board.endpoint
    with patch.object(endings, "EXIT_S", 0.1):  # no client is there to hear of the end
        for _ in range(2):
            masters[0].interrupt("test")
        thread.join()
    board.close()


@pytest.fixture
def processes():
    """Start processes that wait, and end them with the test."""
    started = []

    def start():
        started.append(subprocess.Popen(["sleep", "1000"]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


def introduce(endpoint, role, number, pid, **more):
    """A process that calls; its connection, and the welcome."""
    channel = Channel.connect(endpoint.address)
    own = {"machine": machine()} if role == "worker" else {}
    channel.send(m.Hello(token=endpoint.token, role=role, number=number, pid=pid, **own, **more))
    return channel, channel.wait_for(m.Welcome)


def ask(channel, key):
    """The value of a key."""
    channel.send(m.StoreGet(key=key))
    return channel.wait_for(m.StoreValue).value


def test_a_replica_that_lost_a_process_starts_again_and_its_start_has_a_number(tmp_path, processes):
    folder, copy = tmp_path / "run", tmp_path / "copy"
    folder.mkdir()
    (folder / "job.toml").write_text(spec_file.dump(JOB))
    with a_master(folder, Begin(1.0, BEGINNING)) as endpoint:
        host, _ = introduce(endpoint, "host", 0, 1)
        started = [host.wait_for(m.StartWorker).number for _ in range(4)]
        assert started == [0, 1, 2, 3]
        old = [processes() for _ in range(4)]
        calls = [introduce(endpoint, "worker", n, old[n].pid) for n in range(4)]
        assert [welcome.restarts for _, welcome in calls] == [0] * 4
        for number, (channel, _) in enumerate(calls):
            channel.send(m.StoreSet(key=f"replica-{number // 2}-0/{number}", value=b"old"))
        assert ask(calls[3][0], "replica-1-0/2") == b"old"
        for channel, _ in calls[2:]:
            channel.send(m.Built(recovers=True))
        old[1].kill()
        host.send(m.Exited(number=1, pid=old[1].pid, code=-9))
        assert host.wait_for(m.StartWorker).number == 1
        assert old[0].wait(TIMEOUT_S) == -9, "its fellow is killed"
        new = [processes(), processes()]
        second, welcome = introduce(endpoint, "worker", 1, new[1].pid)
        assert welcome.restarts == 1
        host.send(m.Exited(number=0, pid=old[0].pid, code=-9))
        assert host.wait_for(m.StartWorker).number == 0
        first, welcome = introduce(endpoint, "worker", 0, new[0].pid)
        assert welcome.restarts == 1
        second.send(m.StoreSet(key="replica-0-1/1", value=b"new"))
        assert ask(first, "replica-0-1/1") == b"new"
        for channel in (first, second):
            channel.send(m.Built(recovers=True))
        channels = [first, second, calls[2][0], calls[3][0]]
        assert [each.wait_for(m.Form).members for each in channels] == [[0, 1, 2, 3]] * 4
        assert ask(second, "replica-0-1/1") == b"new", "a generation leaves it"
        assert ask(calls[2][0], "replica-1-0/3") == b"old", "nothing of it was lost"
        assert [each.poll() for each in (old[2], old[3])] == [None, None]
        shutil.copytree(folder, copy)  # as a master that is lost here leaves it
        known = Journal(copy)
        assert {key for key, _ in known.kept()} == {
            "replica-0-1/1",
            "replica-1-0/2",
            "replica-1-0/3",
        }
        known.close()
        with a_master(copy) as another:
            again, welcome = introduce(another, "worker", 0, new[0].pid, generation=1)
            assert welcome.restarts == 1
            assert ask(again, "replica-0-1/1") == b"new"
            again.close()
        for channel in (host, *channels, calls[0][0], calls[1][0]):
            channel.close()
