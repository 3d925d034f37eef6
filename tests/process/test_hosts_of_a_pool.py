"""A job across the hosts of a pool: drained, cut off and killed, with the result of one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from started import RECIPES, TIMEOUT_S

from instep.detached import lives, pid_of
from instep.events import read_events
from instep.pool.hosts.placement import places_taken
from instep.pool.jobs import PoolJob
from instep.pool.pool_file import PoolFolder
from instep.store.run_folder import RunFolder

pytestmark = [pytest.mark.process]

JOB = f"""
recipe = "{RECIPES / "slow_tiny.py"}:recipe"
seed = 5
[train]
steps = {{steps}}
global_batch = 16
determinism = "bits"
threads = 1
[data]
loaders = 0
[arguments]
pause_s = {{pause_s}}
"""


class HostedPool:
    """A pool over hosts of this machine, each with its own `instep host`."""

    def __init__(self, folder: Path, hosts: dict[str, int]) -> None:
        self.folder = PoolFolder(folder / "pool")
        self._path = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        tables = (f"[hosts.{name}]\ncores = {cores}\n" for name, cores in hosts.items())
        text = f'listen = "127.0.0.1:{port}"\n{"".join(tables)}'
        (folder / "pool.toml").write_text(text)
        self.names = [*hosts]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.call("pool", *self.where, "start", folder / "pool.toml")
        for name in hosts:
            self.start_agent(name)

    @property
    def where(self) -> tuple[str, Path]:
        return "--pool", self.folder.folder

    def call(self, *words: object) -> str:
        command = [sys.executable, "-m", "instep", *map(str, words)]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    def start_agent(self, name: str) -> None:
        command = self.folder.joining()[name].split()[1:]
        with open(self._path / f"{name}.said", "ab") as log:
            self.agents[name] = subprocess.Popen(
                [sys.executable, "-m", "instep", *command], stdout=log, stderr=log
            )

    def kill_agent(self, name: str) -> None:
        self.agents[name].kill()
        self.agents[name].wait()

    def submit(self, steps: int, pause_s: float, *words: object) -> str:
        path = self._path / "net.toml"
        path.write_text(JOB.format(steps=steps, pause_s=pause_s))
        said = self.call("submit", path, *self.where, *words, "--json")
        return str(json.loads(said)["job"])

    def job(self, name: str) -> PoolJob:
        return self.folder.state().jobs[name]

    def taken(self, name: str) -> dict[str, int]:
        return places_taken(self.folder.state()).get(name, {})

    def steps(self, name: str) -> int:
        with suppress(Exception):
            return RunFolder(self.folder.runs / name).last_step
        return 0

    def workers_of(self, name: str, job: str) -> dict[str, int]:
        """As the host of this name sees them."""
        host = self.folder.state().hosts[name]
        return {host: n for host, n in host.workers.items() if host == job}

    def close(self) -> None:
        pids = [pid_of(lock) for lock in [self.folder.lock, *self.folder.jobs.glob("*.lock")]]
        for pid in pids:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        for name in self.agents:
            self.kill_agent(name)
        locks = [*self.folder.certificates.glob("*.runs/*.lock")]
        for pid in map(pid_of, locks):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        until(lambda: not any(map(lives, locks)))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[dict[str, int]], HostedPool]]:
    made: list[HostedPool] = []

    def start(hosts: dict[str, int]) -> HostedPool:
        made.append(HostedPool(tmp_path, hosts))
        return made[-1]

    yield start
    for pool in made:
        pool.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def undisturbed(pool: HostedPool, folder: Path) -> str:
    """The parameters' hash of the same job on one worker, without a pool."""
    pool.call("run", folder / "net.toml", "--runs", folder / "alone", "--name", "net")
    return sha256(folder / "alone" / "net")


def sha256(run: Path) -> str:
    return str(RunFolder(run).last("model_saved")["parameters_sha256"])


@pytest.mark.slow
def test_a_job_across_hosts_survives_a_drain_and_a_killed_agent_to_the_same_bits(
    tmp_path: Path, make: Callable[[dict[str, int]], HostedPool]
) -> None:
    pool = make({"one": 2, "two": 1, "three": 1})
    name = pool.submit(400, 0.01, "--at-least", 2, "--at-most", 3)
    until(lambda: sum(pool.taken(name).values()) == 3 and pool.steps(name) > 5)
    first = pool.taken(name)
    assert len(first) == 2, "not on few hosts"
    (other,) = {"two", "three"} & first.keys()
    pool.call("pool", *pool.where, "drain", other)
    until(lambda: other not in pool.taken(name))
    assert sum(pool.taken(name).values()) == 3, "moved to the host that was free"
    assert f"{other}: 0 of 1 cores busy, drained" in pool.call("pool", *pool.where, "status")
    moved_at = pool.steps(name)
    until(lambda: pool.steps(name) > moved_at)

    pool.kill_agent("one")
    until(lambda: pool.folder.state().hosts["one"].away is not None)
    assert "out of reach since" in pool.call("pool", *pool.where, "status")
    killed_at = pool.steps(name)
    until(lambda: pool.steps(name) > killed_at + 5)  # the run does not notice
    scheduler = pid_of(pool.folder.lock)
    assert scheduler is not None
    os.kill(scheduler, signal.SIGKILL)
    pool.call("pool", *pool.where, "start")
    pool.start_agent("one")
    until(lambda: pool.folder.state().hosts["one"].away is None)
    until(lambda: bool(pool.job(name).outcome))
    assert pool.job(name).outcome == "completed"
    run = RunFolder(pool.folder.runs / name)
    assert len(run.times.sessions) == 1, "it was started twice"
    assert (run.audit.repeated + run.audit.stray, run.audit.missing) == (0, 0)
    events = [e["event"] for e in read_events(run.path / "events.jsonl")]
    assert "host_lost" not in events
    assert "host_given_back" in events
    until(lambda: not pool.taken(name))
    assert sha256(run.path) == undisturbed(pool, tmp_path)
