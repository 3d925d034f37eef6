"""Every launcher keeps the same promises for a run: hosts come, are lost, come again, and all end.

`tests/contract/test_launchers.py` holds each launcher's methods against `launch/base.py`. Here each
has a run. What only one launcher promises is in a file of its own.
"""

import contextlib
import json
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest
from on_ray import cluster as ray_cluster
from on_ray import nodes_on
from started import EXECUTE, RECIPES, TIMEOUT_S, Start, Started, newest_pids
from test_partitions import needs_hosts
from test_ray import short_folder
from test_recovery import check_same_result, undisturbed
from test_survival import STEPS_OF_A_RUN, reach

import slurm
from instep.lab.netlab import OUTSIDE, Network
from instep.launch import LAUNCHERS

pytestmark = [pytest.mark.process]

__all__ = ["ray_cluster", "short_folder", "undisturbed"]  # the fixtures

PLACES = ("127.0.0.2:1", "127.0.0.3:1")
LOOPBACK = 'address = "127.0.0.1"\n'
ON = {
    "local": '[launch]\non = "local"\n',
    "hosts": f'[launch]\nhosts = ["env HOST=1", "env HOST=2"]\n{LOOPBACK}',
    "by_hand": "",
    "ray": f'[launch]\non = "ray"\nnodes = 2\n{LOOPBACK}',
    "slurm": f'[launch]\non = "slurm"\nnodes = 2\n{LOOPBACK}',
}
"""What the job file says of where the run is."""


def each(*quick: str, cannot: str = "") -> list[object]:
    """The launchers, as parameters: those that are quick, and others, which are slow tests."""
    there = [n for n in LAUNCHERS if n not in (cannot, "pool")]  # test_hosts_of_a_pool.py has it
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in there]


class Run:
    """A run on a launcher, and what was started beside it."""

    def __init__(self, program: Started, machines: list[Started]) -> None:
        self.program, self.machines = program, machines

    def host(self, number: int) -> int:
        """The newest fork server of a host, by its pid."""
        joined = self.program.events("host_joined")
        return [int(e["pid"]) for e in joined if e["host"] == number][-1]

    def processes_of(self, number: int) -> list[psutil.Process]:
        """That fork server, and all that it has started."""
        host = psutil.Process(self.host(number))
        return [host, *host.children(recursive=True)]

    def signal_host(self, number: int, what: signal.Signals) -> None:
        """Send a signal to all of them."""
        for process in self.processes_of(number):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended with another
                process.send_signal(what)

    def places(self) -> dict[int, int]:
        """The host of each worker that has not ended."""
        ended = {e["pid"] for e in self.program.events("process_ended")}
        joined = [e for e in self.program.events("worker_joined") if e["pid"] not in ended]
        return {int(e["worker"]): int(e["host"]) for e in joined}

    def trains(self, hosts: int) -> bool:
        """Whether both workers are in the group, on so many hosts."""
        if not self.program.is_training():
            return False
        formed = self.program.events("generation_started")
        places = self.places()
        members = formed[-1]["members"] if formed else []
        return len(members) == 2 and {places.get(n) for n in members} == set(range(hosts))

    def check_nothing_is_left(self) -> None:
        for each in (self.program, *self.machines):
            each.check_no_process_is_left()
            each.check_no_file_is_left()


Begin: TypeAlias = Callable[..., Run]
Apart: TypeAlias = tuple[dict[str, str], str, list[Started]]
"""The environment of a run on hosts of a network, its table, and the machines that join."""


def join(
    start: Start, folder: Path, address: str, places: Sequence[str], enter: Sequence[list[str]]
) -> tuple[str, list[Started]]:
    """The table of a cluster, and machines that join it; `enter` has the words before each."""
    with socket.create_server((address, 0)) as free:
        master = f"{address}:{free.getsockname()[1]}"
    table = f'[cluster]\nmaster = "{master}"\nworkers = {json.dumps(places)}\n'
    words = (sys.executable, "-m", "instep", "host", "--join", master, "--token-file")
    tokens = [folder / "certificates" / f"host-{n}.token" for n in range(len(places))]
    machines = zip(enter, tokens, strict=True)
    return table, [start("-c", EXECUTE, *before, *words, token) for before, token in machines]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(2) as made:
        yield made


def entering(network: Network) -> list[list[str]]:
    return [["ip", "netns", "exec", f"{network.name}-{host}"] for host in network.hosts]


@pytest.fixture
def hosts_apart(network: Network) -> Apart:
    hosts = json.dumps([" ".join(words) for words in entering(network)])
    return {}, f'[launch]\nhosts = {hosts}\naddress = "{network.address(OUTSIDE)}"\n', []


@pytest.fixture
def by_hand_apart(network: Network, start: Start, tmp_path: Path) -> Apart:
    places = [f"{network.address(host)}:1" for host in network.hosts]
    return {}, *join(start, tmp_path, network.address(OUTSIDE), places, entering(network))


@pytest.fixture
def slurm_apart(network: Network, tmp_path: Path) -> Iterator[Apart]:
    if reason := slurm.why_not():
        pytest.skip(reason)
    (folder := tmp_path / "slurm").mkdir()
    cluster = slurm.Slurm(folder, 2, network)
    table = f'[launch]\non = "slurm"\nnodes = 2\naddress = "{network.address(OUTSIDE)}"\n'
    try:
        with cluster.allocation(2) as environment:
            yield environment, table, []
    finally:
        cluster.close()


@pytest.fixture
def ray_apart(
    network: Network, short_folder: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Apart]:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # a token would be made in the home folder
    address = network.address(OUTSIDE)
    table = f'[launch]\non = "ray"\nnodes = 2\naddress = "{address}"\noptions.wait_s = 90\n'
    with nodes_on(network) as cluster:
        yield {"RAY_ADDRESS": cluster}, table, []


@pytest.fixture
def begin(start: Start, tmp_path: Path, request: pytest.FixtureRequest) -> Begin:
    """Start a run of two workers, on two hosts where the launcher has several."""

    def on(name: str, *settings: str, network: Network | None = None) -> Run:
        environment: dict[str, str] = {}
        table, machines = ON[name], []
        if network is not None:
            environment, table, machines = request.getfixturevalue(f"{name}_apart")
        elif name == "ray":
            request.getfixturevalue("short_folder")
            request.getfixturevalue("ray_cluster")
        elif name == "slurm":
            allocation = request.getfixturevalue("slurm").allocation(2)
            environment = allocation.__enter__()
            request.addfinalizer(lambda: allocation.__exit__(None, None, None))
        elif name == "by_hand":
            table, machines = join(start, tmp_path, "127.0.0.1", PLACES, [[], []])
        job = tmp_path / "job.toml"
        job.write_text(
            f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 2\n'
            f"seed = 5\n[train]\nsteps = {STEPS_OF_A_RUN}\nglobal_batch = 16\n"
            f'determinism = "bits"\nvalidate_every = 40\n[checkpoint]\nevery = 25\n{table}'
        )
        sets = [word for setting in settings for word in ("--set", setting)]
        program = start("-m", "instep", "run", job, *sets, environment=environment)
        return Run(program, machines)

    return on


def hosts_of(name: str) -> int:
    return 1 if name == "local" else 2


@pytest.mark.tail
@pytest.mark.parametrize("name", each("hosts"))
def test_hosts_come_each_has_its_workers_and_all_of_them_end(begin: Begin, name: str) -> None:
    run = begin(name, "train.steps=20")
    assert run.program.end() == 0, run.program.stderr
    assert [machine.end() for machine in run.machines] == [0] * len(run.machines)
    hosts = set(range(hosts_of(name)))
    assert {e["host"] for e in run.program.events("host_joined")} == hosts
    joined = run.program.events("worker_joined")
    assert sorted(e["host"] for e in joined) == [0, hosts_of(name) - 1]
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", each())
def test_a_host_that_is_killed_is_added_again_and_the_result_does_not_show(
    begin: Begin, undisturbed: Path, name: str
) -> None:
    run = begin(name, "arguments.pause_s=0.02")
    program, hosts = run.program, hosts_of(name)
    program.until(lambda: run.trains(hosts), "training")
    reach(program, 30)
    lost = run.host(hosts - 1)
    run.signal_host(hosts - 1, signal.SIGKILL)
    program.until(lambda: run.host(hosts - 1) != lost, "another host in its place")
    program.until(lambda: run.trains(hosts), "whole again")
    assert program.end() == 0, program.stderr
    assert bool(program.events("went_back")) == (name == "local")  # nobody had the state
    check_same_result(program, undisturbed)
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", each(cannot="local"))
def test_the_others_go_on_without_a_host_that_falls_silent(
    begin: Begin, undisturbed: Path, name: str
) -> None:
    run = begin(name, "arguments.pause_s=0.02")
    program = run.program
    program.until(lambda: run.trains(2), "training")
    reach(program, 30)
    run.signal_host(1, signal.SIGSTOP)
    program.until(lambda: len(program.events("generation_started")) > 1, "going on without it")
    assert program.end() == 0, program.stderr
    assert program.events("went_back") == []
    check_same_result(program, undisturbed)
    run.check_nothing_is_left()


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("name", ["hosts", "by_hand", "ray", "slurm"])
def test_the_others_go_on_without_a_host_that_is_cut_off_and_it_comes_back(
    begin: Begin, undisturbed: Path, network: Network, name: str
) -> None:
    run = begin(name, "arguments.pause_s=0.02", network=network)
    program = run.program
    program.until(lambda: run.trains(2), "training")
    reach(program, 30)
    before = len(program.events("generation_started"))
    network.partition(["h2"])
    program.until(lambda: len(program.events("generation_started")) > before, "going on without it")
    network.heal()
    program.until(lambda: run.trains(2), "whole again")
    assert program.end() == 0, program.stderr
    assert program.events("went_back") == []
    assert program.events("run_started")[0]["encrypted"] is True
    check_same_result(program, undisturbed)
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", each())
def test_a_worker_that_is_given_notice_hands_over_and_nothing_is_computed_twice(
    begin: Begin, undisturbed: Path, name: str
) -> None:
    run = begin(name)
    program = run.program
    program.until(lambda: run.trains(hosts_of(name)), "training")
    reach(program, 10)
    psutil.Process(newest_pids(program)[1]).terminate()
    program.until(lambda: len(program.events("generation_started")) > 1, "another in its place")
    assert program.end() == 0, program.stderr
    assert program.events("worker_leaving")[0]["worker"] == 1  # a later one moves to its host
    assert program.events("worker_lost") == program.events("went_back") == []
    check_same_result(program, undisturbed)
    run.check_nothing_is_left()


@pytest.mark.parametrize("name", each())
def test_nothing_is_left_of_a_run_whose_client_is_killed(begin: Begin, name: str) -> None:
    run = begin(name, "arguments.pause_s=0.05")
    run.program.until(lambda: run.trains(hosts_of(name)), "training")
    there = [each for number in range(hosts_of(name)) for each in run.processes_of(number)]
    run.program.process.kill()
    _, alive = psutil.wait_procs(there, timeout=TIMEOUT_S)
    assert [process.pid for process in alive] == []
    run.program.check_no_process_is_left()
    for machine in run.machines:  # they wait for the next run
        machine.process.send_signal(signal.SIGINT)
        machine.end()
        machine.check_no_process_is_left()
