"""Machines that join by hand: in any order, again after they were killed, and nobody else."""

import json
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from started import EXECUTE, RECIPES, Start, Started, kill
from test_encrypted_hosts import Capture, is_tls
from test_recovery import check_same_result, undisturbed
from test_survival import STEPS_OF_A_RUN, reach

from instep.cli import main
from instep.errors import JoinError
from instep.lab import netlab
from instep.launch.join_folder import JoinFolder

NO = netlab.why_not()
needs_hosts = pytest.mark.skipif(NO is not None, reason=str(NO))
pytestmark = pytest.mark.process

__all__ = ["undisturbed"]  # the fixture

FIRST, SECOND = "127.0.0.2:1", "127.0.0.3:1"


class Cluster:
    """Machines that are addresses of loopback, and the run that they join."""

    def __init__(
        self,
        start: Start,
        folder: Path,
        workers: list[str],
        *,
        servers: Sequence[str] = (),
        sync: str = "",
        address: str = "127.0.0.1",
    ) -> None:
        with socket.create_server((address, 0)) as free:
            self.master = f"{address}:{free.getsockname()[1]}"
        self._start, self.certificates = start, folder / "certificates"
        self._places = [*workers, *servers]
        self._job = folder / "job.toml"
        self._job.write_text(
            f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 2\n'
            f"seed = 5\n[train]\nsteps = {STEPS_OF_A_RUN}\nglobal_batch = 16\n"
            f'determinism = "bits"\nvalidate_every = 40\n[checkpoint]\nevery = 25\n{sync}'
            f'[cluster]\nmaster = "{self.master}"\nworkers = {json.dumps(workers)}\n'
            f"servers = {json.dumps(servers)}\n"
            "[arguments]\npause_s = 0.004\n"
        )

    def run(self, *settings: str) -> Started:
        sets = [word for setting in settings for word in ("--set", setting)]
        return self._start("-m", "instep", "run", self._job, *sets)

    def token_file(self, place: str) -> Path:
        return self.certificates / f"host-{self._places.index(place)}.token"

    def machine(self, place: str, *more: object, token_file: Path | None = None) -> Started:
        file = token_file or self.token_file(place)
        return self._start(
            "-m", "instep", "host", "--join", self.master, "--token-file", file, *more
        )

    def emulated(self, place: str, space: str) -> Started:
        """A machine with an address of its own."""
        words = ("host", "--join", self.master, "--token-file", self.token_file(place))
        there = ("ip", "netns", "exec", space, sys.executable, "-m", "instep", *words)
        return self._start("-c", EXECUTE, *there)


def check_nothing_is_left(*programs: Started) -> None:
    for program in programs:
        program.check_no_process_is_left()
        program.check_no_file_is_left()


def hosts_of(program: Started) -> set[int]:
    return {int(e["host"]) for e in program.events("worker_joined")}


@pytest.mark.slow
def test_machines_join_before_and_after_the_run_begins(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    cluster = Cluster(start, tmp_path, [FIRST, SECOND])
    second = cluster.machine(SECOND)
    second.until(lambda: "no run at" in second.stderr, "waiting for a run")
    program = cluster.run()
    program.until(lambda: f"missing {FIRST}\n" in program.stderr, "waiting for one machine")
    command = f"instep host --join {cluster.master} --token-file {cluster.token_file(FIRST)}"
    assert f"{FIRST}: {command}\n" in program.stderr
    assert cluster.token_file(FIRST).stat().st_mode & 0o777 == 0o600
    first = cluster.machine(FIRST)
    assert program.end() == first.end() == second.end() == 0, program.stderr
    check_same_result(program, undisturbed)
    assert hosts_of(program) == {0, 1}
    check_nothing_is_left(program, first, second)


@pytest.mark.slow
def test_a_machine_that_is_killed_and_started_again_takes_its_place(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    cluster = Cluster(start, tmp_path, [FIRST, SECOND])
    program, first, second = cluster.run(), cluster.machine(FIRST), cluster.machine(SECOND)
    reach(program, 10)
    kill(second.process.pid)
    check_nothing_is_left(second)
    again = cluster.machine(SECOND)
    again.until(lambda: "joined" in again.stderr, "joined again")
    program.until(lambda: len(program.events("host_joined")) > 2, "whole again")
    assert program.end() == first.end() == again.end() == 0, program.stderr
    check_same_result(program, undisturbed)
    assert [e["host"] for e in program.events("host_lost")] == [1]
    check_nothing_is_left(program, first, again)


@pytest.mark.slow
def test_machines_of_a_client_that_is_killed_end_what_they_started_and_wait_for_the_next_run(
    start: Start, tmp_path: Path
) -> None:
    cluster = Cluster(start, tmp_path, [FIRST])
    stays = cluster.machine(FIRST, "--stay")
    program = cluster.run()
    reach(program, 5)
    kill(program.process.pid)
    stays.until(lambda: len(stays.processes()) == 1, "left with nothing but itself")
    short = cluster.run("train.steps=5")
    assert short.end() == 0, short.stderr
    stays.until(lambda: "waiting for the next one" in stays.stderr, "waiting for the next run")
    stays.process.send_signal(signal.SIGINT)
    assert stays.end() == 130
    check_nothing_is_left(program, stays, short)


def test_whoever_is_not_expected_is_refused_in_a_sentence(start: Start, tmp_path: Path) -> None:
    cluster = Cluster(start, tmp_path, [FIRST, SECOND])
    program, first = cluster.run(), cluster.machine(FIRST)
    program.until(lambda: f"missing {SECOND}\n" in program.stderr, "waiting for one machine")
    first.until(lambda: "joined" in first.stderr, "joined")
    folder, another = JoinFolder(cluster.certificates), JoinFolder(tmp_path / "another")
    folder.prepare(3)
    another.prepare(1)
    used = tmp_path / "used.token"
    used.write_text(cluster.token_file(FIRST).read_text())
    used.chmod(0o600)
    third, second_one = folder.token_file(2), cluster.machine(FIRST)
    stranger = cluster.machine("", token_file=third)
    thief = cluster.machine("", token_file=used)
    wrong = cluster.machine("", token_file=another.token_file(0))
    for refused, text in [
        (stranger, "the run expects 2 machines, and this is host 2"),
        (second_one, f"{FIRST} has joined already (process {first.process.pid} of "),
        (thief, "refused this machine: its token is wrong or used, or has run out"),
        (wrong, f"is not the run that {another.token_file(0)} is for, and was told nothing"),
    ]:
        assert refused.end() == JoinError.exit_code
        assert text in refused.error
        assert refused.error.count("\n") == 1
    assert "was refused: the token of host 0 is used already" in program.stderr
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert first.end() == 0
    check_nothing_is_left(program, first, stranger, second_one, thief, wrong)


@pytest.mark.slow
def test_servers_start_on_the_machines_that_are_theirs_with_tokens_that_were_there_before(
    start: Start, tmp_path: Path
) -> None:
    sync = '[sync]\nname = "server_sync"\n'
    cluster = Cluster(start, tmp_path, [FIRST], servers=[SECOND], sync=sync)
    assert main(["certificates", str(cluster.certificates), "--hosts", "2"]) == 0
    tokens = [cluster.token_file(place).read_bytes() for place in (FIRST, SECOND)]
    machines = [cluster.machine(place) for place in (SECOND, FIRST)]
    program = cluster.run("train.steps=20")
    assert program.end() == 0, program.stderr
    joined = program.events("worker_joined")
    assert {(e["role"], e["host"]) for e in joined} == {("worker", 0), ("server", 1)}
    assert len(joined) == 3
    assert [each.end() for each in machines] == [0, 0]
    assert [cluster.token_file(place).read_bytes() for place in (FIRST, SECOND)] == tokens
    check_nothing_is_left(program, *machines)


def emulated(cluster: Cluster, network: netlab.Network, places: list[str]) -> list[Started]:
    spaces = [f"{network.name}-{host}" for host in network.hosts]
    return [cluster.emulated(*each) for each in zip(places, spaces, strict=True)]


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("setting", ["", "network=private"])
def test_between_several_addresses_no_byte_is_plain_unless_the_job_says_so(
    start: Start, tmp_path: Path, undisturbed: Path, setting: str
) -> None:
    with netlab.Network(2) as network:
        capture = Capture(network, tmp_path)
        places = [f"{network.address(host)}:2222" for host in network.hosts]
        cluster = Cluster(start, tmp_path, places, address=network.address(netlab.OUTSIDE))
        program = cluster.run(*([setting] if setting else []))
        machines = emulated(cluster, network, places)
        assert program.end() == 0, program.stderr
        assert [each.end() for each in machines] == [0, 0]
        streams = [stream for stream in capture.streams() if stream]
    check_same_result(program, undisturbed)
    assert program.events("run_started")[0]["encrypted"] is not bool(setting)
    word = "was not encrypted" if setting else "Traffic between hosts was encrypted"
    assert word in (program.run / "report.html").read_text()
    assert len(streams) > 2 * (2 + 2 + 1)  # of each machine, fork server, worker; between workers
    secrets = [cluster.token_file(place).read_text().split()[0] for place in places]
    assert not any(secret.encode() in stream for secret in secrets for stream in streams)
    if setting:  # then too, who joins is known by a certificate
        assert sum(map(is_tls, streams)) >= 2 * 2
        assert any(b"Heartbeat" in stream for stream in streams)
    else:
        assert all(map(is_tls, streams))
    check_nothing_is_left(program, *machines)


@needs_hosts
@pytest.mark.slow
def test_a_machine_that_is_disconnected_and_comes_back_keeps_its_place(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    with netlab.Network(2) as network:
        places = [f"{network.address(host)}:2222" for host in network.hosts]
        cluster = Cluster(start, tmp_path, places, address=network.address(netlab.OUTSIDE))
        program = cluster.run()
        machines = emulated(cluster, network, places)
        reach(program, 40)
        for place, each in zip(places, machines, strict=True):
            assert f"as {place}\n" in each.stderr
        network.partition(["h2"])
        program.until(lambda: len(program.events("generation_started")) > 1, "going on without it")
        network.heal()
        program.until(lambda: len(program.events("host_joined")) > 2, "whole again")
        assert program.end() == 0, program.stderr
        assert [each.end() for each in machines] == [0, 0]
        check_same_result(program, undisturbed)
        assert program.events("went_back") == []
        assert all(each.stderr.count("joined") == 1 for each in machines)
        check_nothing_is_left(program, *machines)
