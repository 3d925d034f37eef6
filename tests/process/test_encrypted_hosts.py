"""Runs on emulated hosts over encrypted links: the same bits, and no plain byte crosses a link."""

import json
import socket
import struct
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started, kill, newest_pids
from test_partitions import begin, lost_hosts, needs_hosts
from test_recovery import check_same_result
from test_recovery import undisturbed as longer
from test_survival import reach

import instep
from instep.cli import main
from instep.lab import netlab
from instep.system.processes import FORWARDER

pytestmark = [pytest.mark.process, needs_hosts]

__all__ = ["longer"]  # the fixture

STEPS = 60
TRAIN = {"steps": STEPS, "global_batch": 16, "determinism": "bits"}

CAPTURE = """
import socket, struct, sys
packets = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))  # of any protocol
packets.setsockopt(socket.SOL_SOCKET, 33, 1 << 26)  # SO_RCVBUFFORCE
packets.bind(("eth0", 0))
with open(sys.argv[1], "wb", buffering=0) as file:
    print("ready", flush=True)
    while True:
        packet = packets.recv(1 << 16)
        file.write(struct.pack("=I", len(packet)) + packet)
"""


class Capture:
    """What crosses the links of some hosts, byte for byte, until the network is removed."""

    def __init__(self, network: netlab.Network, folder: Path) -> None:
        self._files = [folder / f"{host}.packets" for host in network.hosts]
        for host, file in zip(network.hosts, self._files, strict=True):
            command = [sys.executable, "-c", CAPTURE, str(file)]
            started = network.run(host, command, stdout=subprocess.PIPE)
            assert started.stdout is not None
            assert started.stdout.readline() == b"ready\n"
            started.stdout.close()

    def streams(self, ports: Collection[int] = ()) -> list[bytes]:
        """What each TCP connection carried, each way, from its first byte to the first gap.

        Args:
            ports: connections from or to these are left out.
        """
        parts: dict[bytes, dict[int, bytes]] = defaultdict(dict)
        begins: dict[bytes, int] = {}
        for file in self._files:
            for packet in packets(file.read_bytes()):
                if packet[12:14] != b"\x08\x00" or packet[23] != socket.IPPROTO_TCP:
                    continue
                segment = packet[
                    14 + 4 * (packet[14] & 15) : 14 + struct.unpack_from("!H", packet, 16)[0]
                ]
                key = packet[26:34] + segment[:4]  # addresses and ports
                if not set(struct.unpack("!HH", segment[:4])).isdisjoint(ports):
                    continue
                (number,) = struct.unpack_from("!I", segment, 4)
                if segment[13] & 2:  # it begins the connection
                    begins[key] = number + 1
                parts[key][number] = segment[4 * (segment[12] >> 4) :]
        return [joined(parts[key], begin) for key, begin in begins.items()]


def packets(data: bytes) -> Iterator[bytes]:
    at = 0
    while at + 4 <= len(data):
        (length,) = struct.unpack_from("=I", data, at)
        yield data[at + 4 : at + 4 + length]
        at += 4 + length


def joined(parts: dict[int, bytes], begin: int) -> bytes:
    """Segments in their order; those that were sent again count once."""
    whole = bytearray()
    for number in sorted(parts, key=lambda number: (number - begin) % (1 << 32)):
        at = (number - begin) % (1 << 32)
        if at > len(whole):
            break
        whole[at:] = parts[number] if at + len(parts[number]) > len(whole) else whole[at:]
    return bytes(whole)


def is_tls(stream: bytes) -> bool:
    """Whether it is records of TLS from the first byte to the last, which may be cut off."""
    at = 0
    while at + 5 <= len(stream):
        kind, version, length = struct.unpack_from("!BHH", stream, at)
        if kind not in (20, 22, 23) or version not in (0x301, 0x303) or length > 16640:
            return False
        at += 5 + length
    return True


def run_on(
    start: Start,
    folder: Path,
    network: netlab.Network,
    workers: int,
    *,
    recipe: str = "tiny.py",
    top: str = "",
    rest: str = "",
    **train: object,
) -> Started:
    hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
    job = folder / "job.toml"
    job.write_text(
        f'name = "encrypted"\nrecipe = "{RECIPES / recipe}:recipe"\nworkers = {workers}\nseed = 5\n'
        f"{top}\n[train]\n"
        + "".join(f"{name} = {json.dumps(value)}\n" for name, value in {**TRAIN, **train}.items())
        + f"[launch]\nhosts = {json.dumps(hosts)}\n"
        f'address = "{network.address(netlab.OUTSIDE)}"\n{rest}\n'
    )
    return start("-m", "instep", "run", job)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The hash of one worker on this machine."""
    return on_this_machine(tmp_path_factory.mktemp("undisturbed"), 1)


def on_this_machine(runs: Path, workers: int, **sections: dict[str, int]) -> str:
    """The hash of the same job."""
    run = instep.train(
        f"{RECIPES}/tiny.py:recipe",
        runs=runs,
        workers=workers,
        seed=5,
        quiet=True,
        train=TRAIN,
        **sections,
    )
    return str(run.summary["parameters_sha256"])


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "rest"),
    [
        (2, ""),
        pytest.param(3, "", marks=pytest.mark.slow),
        pytest.param(2, '[sync]\nname = "server_sync"\nservers = 1', marks=pytest.mark.slow),
    ],
    ids=["two workers", "three workers", "a server"],
)
def test_encrypted_links_carry_no_plain_byte_and_the_result_is_that_of_one_machine(
    start: Start, tmp_path: Path, undisturbed: str, workers: int, rest: str
) -> None:
    check_encrypted(start, tmp_path, undisturbed, workers, rest)


@pytest.mark.slow
def test_processes_of_a_replica_on_two_hosts_carry_no_plain_byte_either(
    start: Start, tmp_path: Path
) -> None:
    whole = on_this_machine(tmp_path, 4, mesh={"shard": 4})
    check_encrypted(start, tmp_path, whole, 4, "[mesh]\nshard = 4")


def check_encrypted(
    start: Start, tmp_path: Path, undisturbed: str, workers: int, rest: str
) -> None:
    with netlab.Network(2) as network:
        capture = Capture(network, tmp_path)
        program = run_on(start, tmp_path, network, workers, rest=rest)
        assert program.end() == 0, program.stderr
        streams = [stream for stream in capture.streams() if stream]
    assert program.summary["parameters_sha256"] == undisturbed
    assert program.events("run_started")[0]["encrypted"] is True
    assert "Traffic between hosts was encrypted" in (program.run / "report.html").read_text()
    assert len(streams) > 2 * (2 + 1)  # of each fork server, worker, and between workers
    assert sum(map(len, streams)) > 100 * STEPS
    assert all(map(is_tls, streams))
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_server_that_leases_is_reached_over_encrypted_links_too(
    start: Start, tmp_path: Path
) -> None:
    rest = '[sync]\nname = "bounded_stale"'
    with netlab.Network(2) as network:
        capture = Capture(network, tmp_path)
        program = run_on(start, tmp_path, network, 2, rest=rest, determinism="order")
        assert program.end() == 0, program.stderr
        streams = [stream for stream in capture.streams() if stream]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert sum(map(len, streams)) > 4 * 500 * STEPS  # parameters and gradients
    assert all(map(is_tls, streams))
    program.check_no_process_is_left()


@pytest.mark.slow
def test_what_finds_plain_bytes_finds_them_where_nothing_is_encrypted(
    start: Start, tmp_path: Path, undisturbed: str
) -> None:
    with netlab.Network(2) as network:
        capture = Capture(network, tmp_path)
        program = run_on(start, tmp_path, network, 2, top='network = "private"')
        assert program.end() == 0, program.stderr
        streams = [stream for stream in capture.streams() if stream]
    assert program.summary["parameters_sha256"] == undisturbed
    assert program.events("run_started")[0]["encrypted"] is False
    assert "was not encrypted" in (program.run / "report.html").read_text()
    assert not any(map(is_tls, streams))
    assert any(b"Heartbeat" in stream for stream in streams)


def forwarders(program: Started) -> dict[int, psutil.Process]:
    """By pid of its worker."""
    found = {}
    for process in program.processes():
        try:
            if (
                process.name() == FORWARDER
                or "instep.comm.encryption.forwarding" in process.cmdline()
            ):
                found[process.ppid()] = process
        except psutil.Error:
            pass
    return found


def forwarder_of(program: Started, worker: int) -> psutil.Process:
    """That of a worker that may just have been replaced."""
    program.until(lambda: newest_pids(program)[worker] in forwarders(program), "a forwarder")
    return forwarders(program)[newest_pids(program)[worker]]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["worker", "forwarder", "host", "master", "stopped forwarder"])
def test_a_killed_process_of_an_encrypted_run_is_replaced(
    start: Start, tmp_path: Path, undisturbed: str, what: str
) -> None:
    with netlab.Network(2) as network:
        program = run_on(start, tmp_path, network, 2, recipe="slow_tiny.py")
        program.until(program.is_training, "training")
        if what == "worker":
            assert kill(newest_pids(program)[1])
        elif what == "forwarder":
            forwarder_of(program, 1).kill()
        elif what == "stopped forwarder":
            forwarder_of(program, 1).suspend()
        elif what == "host":
            assert kill(program.events("host_joined")[0]["pid"])
        else:
            assert kill(program.events("master_started")[0]["pid"])
        assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == undisturbed
    program.check_no_process_is_left()


@pytest.mark.slow
def test_an_encrypted_host_that_is_cut_off_comes_back_and_the_result_does_not_show(
    start: Start, tmp_path: Path, longer: Path
) -> None:
    with netlab.Network(3) as network:
        hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
        address = network.address(netlab.OUTSIDE)
        program = begin(start, tmp_path, hosts, address, 3, "network=loopback")
        program.until(program.is_training, "training")
        reach(program, 40)
        network.partition(["h3"])
        program.until(lambda: len(program.events("generation_started")) > 1, "going on without it")
        network.heal()
        program.until(lambda: len(program.events("host_joined")) >= 4, "whole again")
        assert program.end() == 0, program.stderr
    assert 2 in lost_hosts(program)
    assert program.events("run_started")[0]["encrypted"] is True
    assert program.events("went_back") == []
    check_same_result(program, longer)
    program.check_no_process_is_left()


@pytest.mark.slow
def test_scale_reaches_the_master_of_an_encrypted_run(
    start: Start, tmp_path: Path, undisturbed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with netlab.Network(2) as network:
        program = run_on(start, tmp_path, network, 2, recipe="slow_tiny.py")
        program.until(program.is_training, "training")
        assert main(["scale", str(program.run), "--workers", "3"]) == 0
        assert "3 workers" in capsys.readouterr().out
        assert program.end() == 0, program.stderr
    assert program.events("generation_started")[-1]["members"] == [0, 1, 2]
    assert program.summary["parameters_sha256"] == undisturbed
    assert not (program.run / "endpoint.json").exists()
    program.check_no_process_is_left()
