"""Emulated hosts: what is sent arrives or silently does not, and nothing is left after them."""

import contextlib
import json
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from instep.lab import netlab
from instep.lab.namespaces import NetworkError
from instep.lab.netlab import Network
from instep.system.processes import wait_readable

TOOL = ["-m", "instep", "netlab"]
TIMEOUT_S = 600.0
NO = netlab.why_not()
pytestmark = [pytest.mark.process, pytest.mark.skipif(NO is not None, reason=str(NO))]


@pytest.fixture
def network() -> Iterator[Network]:
    with Network(3) as made:
        yield made


@contextlib.contextmanager
def connection(network: Network, one: str, other: str) -> Iterator[tuple[socket.socket, ...]]:
    """Two connected TCP sockets of this process, each in its host."""
    with network.socket(one) as listening, network.socket(other) as mine:
        listening.bind((network.address(one), 0))
        listening.listen()
        mine.settimeout(TIMEOUT_S)
        mine.connect(listening.getsockname())
        theirs, _ = listening.accept()
        with theirs:
            theirs.settimeout(TIMEOUT_S)
            yield theirs, mine


def hears(socket_: socket.socket, seconds: float) -> bool:
    return bool(wait_readable([socket_.fileno()], seconds))


class Traces:
    """What there is of a network: namespaces by its name, its link by a number never used twice."""

    def __init__(self, name: str) -> None:
        self.name, self.link = name, socket.if_nametoindex(f"netlab{name.split('-')[1]}")
        assert not self.are_gone()

    def are_gone(self) -> bool:
        spaces = any(path.name.startswith(self.name) for path in Path("/run/netns").iterdir())
        return not spaces and self.link not in dict(socket.if_nameindex())


def test_a_command_in_a_host_reaches_another_host_and_this_machine(network):
    greet = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2]))).close()"
    for goal in ("h1", netlab.OUTSIDE):
        with network.socket(goal) as listening:
            listening.bind((network.address(goal), 0))
            listening.listen()
            listening.settimeout(TIMEOUT_S)
            place = [network.address(goal), str(listening.getsockname()[1])]
            program = network.run("h2", [sys.executable, "-c", greet, *place])
            theirs, whence = listening.accept()
            theirs.close()
            assert whence[0] == network.address("h2")
            assert program.wait(TIMEOUT_S) == 0


def test_a_host_has_only_its_own_interface(network):
    program = network.run("h3", ["ip", "-j", "addr"], stdout=subprocess.PIPE)
    links = json.loads(program.communicate(timeout=TIMEOUT_S)[0])
    assert [link["ifname"] for link in links] == ["lo", "eth0"]
    assert [a["local"] for a in links[1]["addr_info"]] == [network.address("h3")]


def test_a_partition_is_silent_and_healing_restores_the_same_connection(network):
    with connection(network, "h1", "h3") as (one, three), connection(network, "h1", "h2") as near:
        network.partition(["h1", "h2"], ["h3", netlab.OUTSIDE])
        one.sendall(b"lost")
        three.sendall(b"lost too")
        near[0].sendall(b"near")
        assert near[1].recv(9) == b"near"
        assert not hears(three, 0.5)
        assert not hears(one, 0)
        for end in (one, three):
            assert end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0
        network.heal()
        assert three.recv(9) == b"lost"
        assert one.recv(9) == b"lost too"


def test_to_connect_into_a_partition_is_not_refused(network):
    network.partition(["h1"])
    with network.socket("h2") as mine:
        mine.settimeout(0.5)
        with pytest.raises(TimeoutError):
            mine.connect((network.address("h1"), 9))


def test_hosts_are_permanent_neighbours_so_that_no_connection_is_unreachable(network):
    known = network.run("h1", ["ip", "-j", "neigh"], stdout=subprocess.PIPE)
    neighbours = json.loads(known.communicate(timeout=TIMEOUT_S)[0])
    others = [network.address(host) for host in ("h2", "h3", netlab.OUTSIDE)]
    permanent = {each["dst"] for each in neighbours if each["state"] == ["PERMANENT"]}
    assert permanent == set(others)


def test_links_stay_up_in_a_partition(network):
    network.partition(["h1"], ["h2"])
    for host in network.hosts:
        shown = network.run(host, ["ip", "-j", "link", "show", "eth0"], stdout=subprocess.PIPE)
        (link,) = json.loads(shown.communicate(timeout=TIMEOUT_S)[0])
        assert "LOWER_UP" in link["flags"]


def test_disconnecting_a_host_leaves_the_others_connected(network):
    with (
        connection(network, "h1", "h2") as (one, two),
        connection(network, "h3", "h2") as (
            three,
            _,
        ),
    ):
        network.cut("h3")
        three.sendall(b"lost")
        one.sendall(b"here")
        assert two.recv(9) == b"here"
        network.cut("h1")
        two.sendall(b"lost")
        assert not hears(one, 0.5)
        network.heal()
        assert one.recv(9) == b"lost"


def test_the_kernel_counts_every_byte_of_a_host(network):
    sent = 200_000
    before = network.traffic("h1")
    with connection(network, "h1", "h2") as (one, two):
        one.sendall(bytes(sent))
        received = 0
        while received < sent:
            received += len(two.recv(1 << 16))
        (again,) = struct.unpack_from(
            "I", one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), 100
        )
        now = network.traffic("h1")
    assert network.not_set == []
    packets = now.sent_packets - before.sent_packets
    assert sent / 1460 <= packets
    counted = now.sent_bytes - before.sent_bytes  # a header has 54 bytes, with all options 94
    assert sent + 54 * packets <= counted <= sent + 94 * packets + 1460 * again
    assert network.traffic("h3").received_bytes < sent / 10


@pytest.mark.timed
@pytest.mark.parametrize("rate", [10e6, 100e6])
def test_a_link_has_the_rate_that_was_set(network, rate):
    network.slow("h1", rate)
    with connection(network, "h1", "h2") as (one, two):
        one.settimeout(None)
        ended = threading.Event()

        def send() -> None:
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    one.sendall(bytes(1 << 16))

        thread = threading.Thread(target=send)
        thread.start()
        try:
            begin = stop = time.monotonic()
            first = last = 0
            while stop - begin < 3:
                assert two.recv(1 << 16)
                stop = time.monotonic()
                last = network.traffic("h2").received_bytes
                if not first and stop - begin > 0.5:  # past what the link lets through at once
                    first, begin = last, stop
        finally:
            ended.set()
            two.close()
            thread.join()
    assert (last - first) * 8 / (stop - begin) == pytest.approx(rate, rel=0.1)


def test_the_kernel_sends_nothing_of_its_own():
    """No link has an address of IPv6: it would be announced, and counted as traffic of a host."""
    with Network(2) as network:
        for place in (*network.hosts, "switch"):
            command = [
                "ip",
                "-netns",
                f"{network.name}-{place}",
                "-6",
                "-json",
                "addr",
                "show",
                "up",
            ]
            said = subprocess.run(command, check=True, capture_output=True).stdout
            assert {link["ifname"] for link in json.loads(said) if link} <= {"lo"}


def test_processes_in_the_hosts_end_with_the_network():
    with Network(2) as network:
        inner = "import os, time; os.fork(); os.write(1, b'%d\\n' % os.getpid()); time.sleep(1000)"
        program = network.run("h1", [sys.executable, "-c", inner], stdout=subprocess.PIPE)
        assert program.stdout is not None
        with program.stdout as said:
            pids = [int(said.readline()) for _ in range(2)]
        traces = Traces(network.name)
    assert traces.are_gone()
    assert program.returncode == -signal.SIGKILL
    deadline = time.monotonic() + TIMEOUT_S
    while any(Path(f"/proc/{pid}").exists() for pid in pids):  # its parent reaps the second
        assert time.monotonic() < deadline
        time.sleep(0.01)
    network.remove()


def test_a_network_that_is_removed_twice_takes_no_other_with_it():
    """As two processes do that clean up after a third: meanwhile its number may be another's."""
    with Network(1) as network:
        number = network.name.split("-")[1]
        netlab.remove(f"netlab-{number}-99999999-1")  # whose creator has ended
        links = subprocess.run(["ip", "link"], capture_output=True, text=True, check=True)
        assert f"netlab{number}@" in links.stdout


def test_nothing_is_left_when_building_fails(monkeypatch):
    built: list[Traces] = []

    def fails(network: Network, *_: object) -> None:
        built.append(Traces(network.name))
        raise NetworkError("on purpose")

    monkeypatch.setattr(Network, "slow", fails)
    with pytest.raises(NetworkError, match="on purpose"):
        Network(2, rate="1mbit")
    assert built[0].are_gone()


def test_a_network_is_steered_from_elsewhere_and_cleaned_up_when_its_creator_was_killed():
    tool = [sys.executable, *TOOL]
    creator = subprocess.Popen([*tool, "up", "--hosts", "2"], stdout=subprocess.PIPE, text=True)
    try:
        assert creator.stdout is not None
        with creator.stdout as said:
            lines = [said.readline() for _ in range(4)]
        name = lines[-1].split()[0]
        here = ["--network", name.split("-")[1]]
        found, traces = Network.find(int(here[1])), Traces(name)
        assert found.hosts == ["h1", "h2"]
        with connection(found, "h1", "h2") as (one, two):
            subprocess.run([*tool, *here, "cut", "h1"], check=True)
            one.sendall(b"later")
            assert not hears(two, 0.3)
            subprocess.run([*tool, *here, "heal"], check=True)
            assert two.recv(9) == b"later"
        said = subprocess.run([*tool, "--json", *here, "traffic"], check=True, capture_output=True)
        counted = json.loads(said.stdout)["traffic"]["h1"]
        assert counted == found.traffic("h1")._asdict()
        exits = [*tool, *here, "run", "h1", "--", sys.executable, "-c", "raise SystemExit(7)"]
        assert subprocess.run(exits).returncode == 7
        inside = found.run("h2", ["sleep", "1000"])
        assert name not in netlab.clean()
        assert inside.poll() is None
        creator.kill()
        creator.wait()
        assert name in netlab.clean()
        assert inside.wait(TIMEOUT_S) == -signal.SIGKILL
        assert traces.are_gone()
    finally:
        creator.kill()
        creator.wait()
        netlab.clean()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_up_and_takes_the_network_away(number):
    ours = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = [sys.executable, *TOOL, "up", "--hosts", "1"]
    creator = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, ours)
    try:
        assert creator.stdout is not None
        with creator.stdout as said:
            traces = Traces([said.readline() for _ in range(3)][-1].split()[0])
        creator.send_signal(number)
        assert creator.wait(TIMEOUT_S) == 0
        assert traces.are_gone()
    finally:
        creator.kill()
        creator.wait()


def test_without_permission_the_error_is_one_sentence():
    ask = "import os; from instep.lab import netlab; os.setuid(65534); print(netlab.why_not())"
    done = subprocess.run(
        [sys.executable, "-c", ask],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("no emulated hosts here; they need Linux")
    assert "not permitted" in done.stdout
    assert done.stdout.count("\n") == 1


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Network(0), "0 hosts: a network has 1 to 200"),
        (lambda: Network(1, rate="fast"), "rate 'fast'"),
        (lambda: Network.find(999), "one network is wanted"),
    ],
)
def test_the_error_for_a_mistake_is_one_sentence(call, words):
    with pytest.raises(NetworkError, match=words):
        call()


def test_a_host_that_is_not_there_is_named_with_those_that_are(network):
    with pytest.raises(NetworkError, match=r"no host is called 'h9'. Known: h1, h2, h3, outside"):
        network.cut("h9")
    with pytest.raises(NetworkError, match="in one group only"):
        network.partition(["h1"], ["h1", "h2"])
