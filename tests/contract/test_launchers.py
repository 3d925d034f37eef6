"""Every launcher keeps the promises of `launch/base.py`, with a real fork server."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from instep.comm.protocol.channel import Address, listen
from instep.comm.protocol.endpoint import Endpoint
from instep.job.file import build
from instep.launch import LAUNCHERS
from instep.launch.base import Elastic
from instep.launch.join_folder import JoinFolder
from instep.launch.pooled.launcher import Placed
from instep.launch.ray.cluster import connect

pytestmark = pytest.mark.process

TIMEOUT_S = 600.0
"""Against hangs alone, however busy the machine."""

LAUNCH = {
    "hosts": {"hosts": ["env"]},
    "ray": {"nodes": 1, "options": {"wait_s": TIMEOUT_S}},
    "pool": {"address": "127.0.0.1"},
}
"""What a launcher needs in `[launch]`, for one host."""


def each(*slow):
    """The launchers, as parameters; some of them are slow tests."""
    return [pytest.param(n, marks=pytest.mark.slow) if n in slow else n for n in LAUNCHERS]


@pytest.fixture(scope="module")
def ray_cluster():
    """A Ray cluster of one node, which is there before a host."""
    pytest.importorskip("ray")
    ray, _ = connect("local", 4)
    yield
    ray.shutdown()


@pytest.fixture
def launched(tmp_path, request, monkeypatch):
    """By name: a launcher that has started its one fork server, and what it has started."""
    master, made, place = listen(), [], ExitStack()

    def launch(name):
        more = {}
        if name == "by_hand":
            more = {"cluster": cluster(tmp_path)}
            place.enter_context(machine(**more["cluster"]))
        if name == "ray":
            request.getfixturevalue("ray_cluster")
        if name == "slurm":
            allocation = request.getfixturevalue("slurm").allocation(1)
            for key, value in place.enter_context(allocation).items():
                monkeypatch.setenv(key, value)
        before = children()
        table = {"recipe": "a.py:a", "network": "private", "launch": LAUNCH.get(name, {})}
        if name == "pool":
            table["launch"] = {**table["launch"], "options": places(tmp_path)}
        job = build({**table, "launch": {**table["launch"], "on": name}, **more}, source="a test")
        made.append(LAUNCHERS[name].of(job))
        made[0].settled(job.launch)  # waits for machines that come by themselves
        if name == "pool":
            options = job.launch.options
            gate = Path(options["gate"]).read_text()
            place.enter_context(machine(gate, options["certificates"]))
            until(lambda: made[0].ended() is None and not made[0]._machines._gate.missing)
            before = children()
        made[0].start(Endpoint(Address(*master.getsockname()), "secret", 0), tmp_path)
        return made[0], lambda: children() - before

    yield launch
    for each in made:
        each.stop()
    place.close()
    master.close()


def cluster(folder):
    """One of one machine, which joins on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    certificates = str(folder / "certificates")
    master = f"127.0.0.1:{port}"
    return {"master": master, "workers": ["127.0.0.1:1"], "certificates": certificates}


def places(folder):
    """The options of a job of a pool of one host, with places for two workers."""
    Placed(["here"], [2]).write(folder / "placed")
    JoinFolder(folder / "certificates").prepare(1)
    return {key: str(folder / key) for key in ("certificates", "placed", "gate")}


@contextlib.contextmanager
def machine(master, certificates, **_):
    """One that joins; what counts as started is what the launcher starts on it."""
    words = ["host", "--join", master, "--token-file", f"{certificates}/host-0.token"]
    joined = subprocess.Popen([sys.executable, "-P", "-m", "instep", *words])
    yield
    joined.kill()
    joined.wait()


def children():
    """Living processes that came of this one; those of other tests too."""
    found = psutil.Process().children(recursive=True)
    return {process for process in found if _is_of_a_host(process)}


def _is_of_a_host(process):
    """Whether it lives, and is no process that Ray keeps for whatever comes."""
    with contextlib.suppress(psutil.NoSuchProcess):
        words = " ".join(process.cmdline())
        in_stock = "ray::IDLE" in words or "default_worker.py" in words
        return process.status() != psutil.STATUS_ZOMBIE and not in_stock
    return False


def _is_copy(process, started):
    """Whether it has no program of its own yet: stopped now, it would hold up who started it."""
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = process.parent()
        return parent not in started and process.cmdline() == parent.cmdline()
    return False


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("name", each("slurm", "pool"))
def test_a_host_runs_until_it_is_told_to_stop_and_nothing_is_left(launched, name):
    launcher, started = launched(name)
    until(started)
    assert launcher.ended() is None
    assert not any("secret" in word for process in started() for word in process.cmdline())
    launcher.stop()
    launcher.stop()
    assert started() == set()


@pytest.mark.parametrize("name", each("pool"))
def test_a_host_that_was_stopped_is_killed_and_one_that_runs_is_not(launched, name):
    launcher, started = launched(name)
    until(started)
    until(lambda: not any(_is_copy(each, started()) for each in started()))
    launcher.end_if_stopped()
    assert launcher.ended() is None

    def all_stopped():
        for process in started():
            process.send_signal(signal.SIGSTOP)  # again, as srun starts another of its own
        return all(process.status() == psutil.STATUS_STOPPED for process in started())

    until(all_stopped)
    launcher.end_if_stopped()
    until(lambda: launcher.ended() is not None)
    assert launcher.ended() == -signal.SIGKILL


@pytest.mark.tail
@pytest.mark.parametrize("name", ["ray", pytest.param("pool", marks=pytest.mark.slow)])
def test_a_host_that_is_given_back_is_gone_at_once_and_may_be_given_back_again(launched, name):
    launcher, started = launched(name)
    assert isinstance(launcher, Elastic)
    until(started)
    assert list(launcher.leaving()) == []
    for _ in range(2):  # a spare of it may have been there for a moment
        launcher.give_back(0)
    assert launcher.ended() == -signal.SIGKILL
    until(lambda: not started())
