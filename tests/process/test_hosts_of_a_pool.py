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
from typing import Any

import pytest
from started import RECIPES, TIMEOUT_S
from test_partitions import needs_hosts

from instep.detached import lives, pid_of
from instep.events import read_events
from instep.lab.netlab import OUTSIDE, Network
from instep.pool.hosts.free_places import places_taken
from instep.pool.jobs import PoolJob
from instep.pool.pool_file import PoolFolder
from instep.search.begin import found_in
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
    """A pool over hosts of this machine, each with its own `instep host`.

    The scheduler starts that of a host whose name is `third`, as through ssh, and those that have
    lines of their own.
    """

    def __init__(
        self,
        folder: Path,
        hosts: dict[str, int],
        network: Network | None = None,
        lines: dict[str, str] | None = None,
    ) -> None:
        self.folder = PoolFolder(folder / "pool")
        self._path, self._network = folder, network
        address = "127.0.0.1" if network is None else network.address(OUTSIDE)
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
        start = {"third": 'start = "env"\n', **(lines or {})}
        tables = (
            f"[hosts.{name}]\ncores = {cores}\n{start.get(name, '')}"
            for name, cores in hosts.items()
        )
        text = f'listen = "{address}:{port}"\n{"".join(tables)}'
        (folder / "pool.toml").write_text(text)
        self.names = [*hosts]
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        self.call("pool", *self.where, "start", folder / "pool.toml")
        for name in self.folder.joining():
            self.start_agent(name)

    @property
    def where(self) -> tuple[str, Path]:
        return "--pool", self.folder.folder

    def call(self, *words: object) -> str:
        command = [sys.executable, "-m", "instep", *map(str, words)]
        return subprocess.run(command, capture_output=True, check=True, text=True).stdout

    def start_agent(self, name: str) -> None:
        command = [sys.executable, "-m", "instep", *self.folder.joining()[name].split()[1:]]
        if self._network is not None:
            command = ["ip", "netns", "exec", f"{self._network.name}-{name}", *command]
        with open(self._path / f"{name}.said", "ab") as log:
            self.agents[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill_agent(self, name: str) -> None:
        self.agents[name].kill()
        self.agents[name].wait()

    def submit(self, steps: int, pause_s: float, *words: object) -> str:
        path = self._path / f"steps-{steps}.toml"
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

    def away(self, name: str) -> bool:
        return self.folder.state().hosts[name].away is not None

    def check_result(self, name: str, steps: int) -> None:
        """One session, no sample twice or missing, and the bits of one worker without a pool."""
        run = RunFolder(self.folder.runs / name)
        assert len(run.times.sessions) == 1, "it was started twice"
        self.check_bits(name, steps)

    def status(self) -> str:
        return self.call("pool", *self.where, "status")

    def check_bits(self, name: str, steps: int) -> None:
        """No sample twice or missing, and the bits of one worker without a pool."""
        run = RunFolder(self.folder.runs / name)
        assert run.outcome == "completed"
        assert (run.audit.repeated + run.audit.stray, run.audit.missing) == (0, 0)
        path, alone = self._path / f"steps-{steps}.toml", self._path / "alone"
        self.call("run", path, "--runs", alone, "--name", name)
        assert sha256(run.path) == sha256(alone / name)

    def close(self) -> None:
        agents = (self.folder.folder / "hosts").glob("*.lock")
        locks = [self.folder.lock, *self.folder.jobs.glob("*.lock"), *agents]
        pids = [pid_of(lock) for lock in locks]
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
def make(tmp_path: Path) -> Iterator[Callable[..., HostedPool]]:
    made: list[HostedPool] = []

    def start(hosts: dict[str, int], network: Network | None = None, **more: Any) -> HostedPool:
        made.append(HostedPool(tmp_path, hosts, network, **more))
        return made[-1]

    yield start
    for pool in made:
        pool.close()


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def sha256(run: Path) -> str:
    return str(RunFolder(run).last("model_saved")["parameters_sha256"])


@pytest.mark.slow
def test_a_job_across_hosts_survives_a_drain_and_a_killed_agent_to_the_same_bits(
    make: Callable[..., HostedPool],
) -> None:
    pool = make({"one": 2, "two": 1, "third": 1})
    name = pool.submit(400, 0.01, "--at-least", 2, "--at-most", 3)
    until(lambda: sum(pool.taken(name).values()) == 3 and pool.steps(name) > 5)
    first = pool.taken(name)
    assert len(first) == 2, "not on few hosts"
    (other,) = {"two", "third"} & first.keys()
    pool.call("pool", *pool.where, "drain", other)
    until(lambda: other not in pool.taken(name))
    assert sum(pool.taken(name).values()) == 3, "moved to the host that was free"
    assert f"{other}: 0 of 1 cores busy, drained" in pool.call("pool", *pool.where, "status")
    moved_at = pool.steps(name)
    until(lambda: pool.steps(name) > moved_at)

    pool.kill_agent("one")
    until(lambda: pool.away("one"))
    assert "out of reach since" in pool.call("pool", *pool.where, "status")
    killed_at = pool.steps(name)
    until(lambda: pool.steps(name) > killed_at + 5)  # the run does not notice
    scheduler = pid_of(pool.folder.lock)
    assert scheduler is not None
    os.kill(scheduler, signal.SIGKILL)
    pool.call("pool", *pool.where, "start")
    pool.start_agent("one")
    until(lambda: not pool.away("one"))
    until(lambda: bool(pool.job(name).outcome))
    assert pool.job(name).outcome == "completed"
    events = [e["event"] for e in read_events(pool.folder.runs / name / "events.jsonl")]
    assert "host_lost" not in events
    assert "host_given_back" in events
    until(lambda: not pool.taken(name))
    pool.check_result(name, 400)


FLOW = """
[job.prepare]
command = ["sh", "-c", "echo prepared > said"]
[job.mesh]
file = "mesh.toml"
after = ["prepare"]
"""

SEARCH = """
[search]
trials = 3
width = 2
metric = "accuracy"
sampler = "random"
[search.space]
"train.max_grad_norm" = [0.5, 1.0, 2.0]
"""


@pytest.mark.slow
def test_a_search_a_command_and_a_mesh_run_on_the_machine_of_the_scheduler_beside_others(
    tmp_path: Path, make: Callable[..., HostedPool]
) -> None:
    pytest.importorskip("optuna")
    pool = make({"one": 1, "third": 2})
    (tmp_path / "mesh.toml").write_text(f"{JOB.format(steps=20, pause_s=0.0)}[mesh]\nstages = 2\n")
    (tmp_path / "search.toml").write_text(JOB.format(steps=60, pause_s=0.01) + SEARCH)
    (tmp_path / "flow.toml").write_text(FLOW)
    job = json.loads(pool.call("submit", tmp_path / "search.toml", *pool.where, "--json"))["job"]
    name = pool.submit(100, 0.01)
    until(lambda: pool.taken(job) == {"third": 2} and pool.taken(name) == {"one": 1})
    pool.call("submit", tmp_path / "flow.toml", *pool.where, "--priority", 5)
    until(lambda: all(bool(each.outcome) for each in pool.folder.state().jobs.values()))
    assert {each.outcome for each in pool.folder.state().jobs.values()} == {"completed"}
    assert (tmp_path / "said").read_text() == "prepared\n"
    (agent,) = (pool.folder.folder / "hosts").glob("*.lock")
    assert lives(agent)
    pool.call("pool", *pool.where, "stop")
    assert not lives(agent), "what the pool has started on a host stays"
    pool.check_result(name, 100)
    pool.call("search", tmp_path / "search.toml", "--runs", tmp_path / "alone", "--name", job)
    found = [found_in(folder / job).told for folder in (pool.folder.runs, tmp_path / "alone")]
    hashes = [[each.result.parameters_sha256 for each in told.values()] for told in found]
    assert hashes[0] == hashes[1]
    assert len(hashes[0]) == 3


@needs_hosts
@pytest.mark.slow
def test_a_host_that_is_cut_off_keeps_its_places_and_its_job_goes_on_and_comes_back(
    make: Callable[..., HostedPool],
) -> None:
    with Network(2) as network:
        pool = make({"h1": 1, "h2": 1}, network)
        name = pool.submit(400, 0.01)
        until(lambda: len(pool.taken(name)) == 2 and pool.steps(name) > 5)
        network.partition(["h2"])
        until(lambda: pool.away("h2"))
        other = pool.submit(20, 0.0, "--at-most", 1)
        cut_off_at = pool.steps(name)
        until(lambda: pool.steps(name) > cut_off_at + 10)
        assert pool.taken(name)["h2"] == 1, "what it had may be there"
        assert "h2" not in pool.taken(other), "nothing new comes to a host out of reach"
        network.heal()
        until(lambda: not pool.away("h2"))
        until(lambda: all(bool(job.outcome) for job in pool.folder.state().jobs.values()))
        until(lambda: not pool.taken(name))
        assert pool.job(other).outcome == "completed"
        assert RunFolder(pool.folder.runs / name).named("run_started")[0]["encrypted"] is True
        pool.check_result(name, 400)
        pool.close()
