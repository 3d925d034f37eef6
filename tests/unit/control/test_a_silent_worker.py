"""A master whose workers nobody can replace ends the run with one that is silent."""

import json
import os
import signal
import subprocess
import threading
import time
from unittest.mock import patch

import pytest

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.control import watch
from instep.control.decisions import endings
from instep.control.master import Master
from instep.control.processes import liveness
from instep.engine.member import Member
from instep.errors import PeerError
from instep.job import file as spec_file
from instep.system.limits import FLOOR_S
from instep.system.processes import machine

TIMEOUT_S = 600.0


class Run:
    """A master as under `instep.join`, in a thread; or one whose workers a host has started."""

    def __init__(self, folder, workers=2, *, hosted=False, hosts=()):
        self.folder, self.board = folder, Switchboard()
        table = {"recipe": "a.py:f", "workers": workers, "launch": {"hosts": list(hosts)}}
        job = spec_file.build(table, source="a test")
        (folder / "job.toml").write_text(spec_file.dump(job))
        about = {"hosted": hosted, "started": time.time(), "about": {}}
        self.master = Master(job, folder, self.board, views=[], **about)
        self.outcome = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        self.outcome = self.master.serve()

    def end(self):
        self._thread.join(TIMEOUT_S)
        return self.outcome

    def events(self, name):
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.master.interrupt("test")
        self.master.interrupt("test")
        self._thread.join()
        self.board.close()


@pytest.fixture
def sleeper():
    """A process of this machine that was stopped."""
    process = subprocess.Popen(["sleep", "1000"])
    process.send_signal(signal.SIGSTOP)
    yield process
    process.kill()
    process.wait()


def introduce(run, number, pid, role="worker", host=0):
    """A worker or a host that calls, and then says nothing."""
    endpoint = run.board.endpoint
    channel = Channel.connect(endpoint.address)
    own = {"pid": pid, "machine": machine(), "node": "node4", "host": host}
    channel.send(m.Hello(token=endpoint.token, role=role, number=number, **own))
    channel.wait_for(m.Welcome)
    return channel


def test_a_stopped_worker_ends_the_run_and_is_killed_last(tmp_path, sleeper):
    with patch.object(watch, "SILENT_S", 0.5), Run(tmp_path) as run:
        member = Member(run.board.endpoint, 0)
        member.show_itself()
        silent = introduce(run, 1, sleeper.pid)
        outcome = run.end()
        assert outcome is not None
        word = outcome.blame.failed
        assert (outcome.finish.outcome, outcome.finish.exit_code) == ("failed", 5)
        assert (outcome.blame.worker, word.kind) == (1, "silent")
        assert f"(pid {sleeper.pid} on node4) gave no sign of life for " in word.cause
        assert "while others did: it was stopped" in word.cause
        assert [event["worker"] for event in run.events("worker_failed")] == [1]
        with pytest.raises(PeerError) as told:
            member.wait_for_group()
        assert "the run has ended: worker 1 failed: its process" in str(told.value)
        assert sleeper.poll() is None
        run.master.stale.signal(signal.SIGKILL)
        assert sleeper.wait(TIMEOUT_S) == -signal.SIGKILL
        member.close()
        silent.close()


def test_where_groups_cannot_form_again_all_workers_of_a_host_end_with_the_silent_one(
    tmp_path, sleeper
):
    """As on GPUs: the master may kill all of them."""
    living = subprocess.Popen(["sleep", "1000"])
    short = patch.object(endings, "EXIT_S", 0.2)  # no host is there to tell of their ends
    with short, patch.object(watch, "SILENT_S", 0.5), Run(tmp_path, hosted=True) as run:
        channels = [introduce(run, 0, living.pid), introduce(run, 1, sleeper.pid)]
        for channel in channels:
            channel.send(m.Built(recovers=False))
        while living.poll() is None:
            channels[0].send(m.Heartbeat(phase="exchange"))
            run._thread.join(0.1)
        assert living.wait(TIMEOUT_S) == sleeper.wait(TIMEOUT_S) == -signal.SIGKILL
        run.end()
        assert (run.outcome.blame.worker, run.outcome.finish.exit_code) == (1, 5)
        assert run.outcome.blame.failed.cause.endswith("It cannot be replaced on GPUs.")
        for channel in channels:
            channel.close()


def test_workers_that_send_heartbeats_are_left_alone(tmp_path):
    with patch.object(watch, "SILENT_S", 0.5), Run(tmp_path) as run:
        members = [Member(run.board.endpoint, number) for number in (0, 1)]
        for member in members:
            member.show_itself()
        deadline = time.monotonic() + FLOOR_S + 1.0
        while time.monotonic() < deadline:
            assert run.outcome is None
            assert run._thread.is_alive()
            run._thread.join(0.05)
        for member in members:
            member.close()


def test_workers_that_are_all_silent_get_a_longer_timeout_and_are_not_killed(tmp_path, sleeper):
    short = {"SILENT_S": 3.0, "ALL_SILENT_S": 6.0}  # the second is introduced within the first
    with patch.multiple(watch, **short), Run(tmp_path) as run:
        silent = [introduce(run, number, sleeper.pid) for number in (0, 1)]
        began = time.monotonic()
        word = run.end().blame.failed
        assert time.monotonic() - began > 3.0
        assert "nor did any other worker" in word.cause
        assert run.master.stale is None
        for channel in silent:
            channel.close()


def test_a_single_worker_may_be_silent_without_limit(tmp_path, sleeper):
    short = {"SILENT_S": 0.1, "ALL_SILENT_S": 0.1}
    with patch.multiple(watch, **short), Run(tmp_path, workers=1) as run:
        silent = introduce(run, 0, sleeper.pid)
        run._thread.join(FLOOR_S + 0.5)
        assert run.outcome is None
        silent.close()


def test_the_end_of_a_worker_counts_at_once_where_its_own_host_is_lost(tmp_path):
    """Another host, which is there, would never report it."""
    never = patch.object(liveness, "REPORT_S", 10 * TIMEOUT_S)
    with never, Run(tmp_path, hosted=True, hosts=["a", "b"]) as run:
        hosts = [introduce(run, number, os.getpid(), "host") for number in (0, 1)]
        process = subprocess.Popen(["sleep", "1000"])
        worker = introduce(run, 0, process.pid, host=1)
        hosts[1].close()
        process.kill()
        process.wait()
        began = time.monotonic()
        while not run.events("process_ended") and time.monotonic() - began < TIMEOUT_S:
            run._thread.join(0.02)
        assert run.events("process_ended")
        worker.close()
        hosts[0].close()
