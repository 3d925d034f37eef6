"""Emulated hosts on one Linux machine: network namespaces on a switch that can be broken.

    with Network(3, rate="100mbit") as network:
        server = network.run("h1", [sys.executable, "server.py", network.address("h1")])
        network.partition(["h1"], ["h2", "h3"])

Each host is a namespace with one interface, `eth0`; this machine itself is the
host `outside`. All are joined by a bridge in a namespace of its own, so that no
firewall of this machine looks at them. A partition moves ports to other
bridges: links stay up, neighbours stay known, packets vanish and no error is reported.
The kernel holds everything about a network, so another process can find and change it.
File system, clock, CPU and process ids are shared: this emulates a network, not
machines. It knows nothing of runs. `netlab_shell.py` is its command line. Way in: `Network`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from instep.lab.namespaces import (
    NEEDS,
    NetworkError,
    batch,
    call,
    creator_lives,
    inside,
    link_up,
    loose_end,
    namespaces,
    networks,
    processes_in,
    started_at,
    switch_off_offloads,
    take_a_number,
    without_others,
)

OUTSIDE = "outside"
"""This machine, as a host of the network."""

MOST_HOSTS = 200
_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


class Traffic(NamedTuple):
    """Counters of one host's interface since it was made, Ethernet headers included."""

    sent_bytes: int
    received_bytes: int
    sent_packets: int
    received_packets: int


def bits_per_s(rate: str | float) -> float:
    """A rate as tc writes it ("100mbit", "2.5gbit"), or bits per second as a number."""
    match = re.fullmatch(r"([\d.]+)([kmg]?bit)?", str(rate))
    value = float(match[1]) * _UNITS[match[2] or "bit"] if match else 0.0
    if value < 8000:
        raise NetworkError(f"rate {rate!r}: a rate is at least 8kbit, such as 100mbit or 2.5gbit.")
    return value


class Network:
    """Hosts h1, h2, ... with the addresses 198.18.K.1, 198.18.K.2, ...; `outside` is 198.18.K.254.

    K is the first number that no other network on this machine has. The addresses are
    reserved for benchmarks (RFC 2544), so they hide no real host.

    Args:
        hosts: how many, 1 to 200.
        rate: of each host's link, each way: "100mbit", or bits per second; None for no limit.

    Raises:
        NetworkError: this user or this machine cannot make namespaces; nothing is left behind.
    """

    def __init__(self, hosts: int, *, rate: str | float | None = None) -> None:
        if not 1 <= hosts <= MOST_HOSTS:
            raise NetworkError(f"{hosts} hosts: a network has 1 to {MOST_HOSTS}.")
        limit = None if rate is None else bits_per_s(rate)
        self.hosts = [f"h{number}" for number in range(1, hosts + 1)]
        self.not_set: list[str] = []
        """Offloads that could not be switched off; the counters then miss some headers."""
        self._programs: list[subprocess.Popen[Any]] = []
        self._number = take_a_number()
        pid = os.getpid()
        self.name = f"netlab-{self._number}-{pid}-{started_at(pid)}"
        try:
            self._build()
            for host in self.hosts if limit else ():
                self.slow(host, limit)
        except NetworkError as error:
            self.remove()
            raise NetworkError(f"no emulated hosts here; they need {NEEDS}: {error}") from error
        except BaseException:
            self.remove()
            raise

    @classmethod
    def find(cls, number: int | None = None) -> Network:
        """A network that another process made; `number` K chooses among several."""
        names = [n for n in networks() if number is None or n.split("-")[1] == str(number)]
        if len(names) != 1:
            known = ", ".join(networks()) or "none"
            raise NetworkError(f"one network is wanted (--network K), but there is: {known}.")
        found = cls.__new__(cls)
        found.name, found._number = names[0], int(names[0].split("-")[1])
        hosts = (m[5] for m in namespaces() if m[1] == found.name and m[5] != "switch")
        found.hosts = sorted(hosts, key=lambda host: int(host[1:]))
        found.not_set, found._programs = [], []
        return found

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    # ---- using it

    def address(self, host: str) -> str:
        """The IPv4 address of a host, or of `outside`."""
        return f"198.18.{self._number}.{self._index(host)}"

    def run(self, host: str, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command in a host; removing the network kills it.

        Args:
            host: `outside` starts the command on this machine itself.
            command: the process returned is the command itself, not a shell around it.
            options: of `subprocess.Popen`.
        """
        self._index(host)
        enter = [] if host == OUTSIDE else ["ip", "netns", "exec", self._space(host)]
        program = subprocess.Popen([*enter, *command], **options)
        self._programs.append(program)
        return program

    def socket(self, host: str, kind: int = socket.SOCK_STREAM) -> socket.socket:
        """A new IPv4 socket of this process in a host's namespace."""
        self._index(host)
        space = None if host == OUTSIDE else self._space(host)
        return inside(space, lambda: socket.socket(socket.AF_INET, kind))

    def traffic(self, host: str) -> Traffic:
        """The counters of a host's interface; packets that a partition drops count as sent."""
        link = self._root_link if host == OUTSIDE else "eth0"
        self._index(host)
        shown = call("ip", *self._at(host), "-j", "-s", "link", "show", link)
        counted = json.loads(shown)[0]["stats64"]
        sent, received = counted["tx"], counted["rx"]
        return Traffic(sent["bytes"], received["bytes"], sent["packets"], received["packets"])

    # ---- breaking it

    def partition(self, *groups: Iterable[str]) -> None:
        """From now on packets pass only inside a group; others vanish, both ways.

        Args:
            groups: hosts, and perhaps `outside`; the hosts not named form one more group. Ends a
                former partition or cut. A packet that already waits in a slow link's queue (up
                to 50 ms) still arrives.
        """
        given = [list(group) for group in groups]
        named = [host for group in given for host in group]
        for host in named:
            self._index(host)
        if len(set(named)) < len(named):
            raise NetworkError(f"a host can be in one group only, but the groups are {given}.")
        rest = [host for host in [*self.hosts, OUTSIDE] if host not in named]
        self._plug([rest, *given])

    def cut(self, *hosts: str) -> None:
        """Cut each of these hosts off from all others, until `heal`; the others do not change."""
        for host in hosts:
            self._index(host)
        bridges = [f"alone-{host}" for host in hosts]
        self._move(zip(hosts, bridges, strict=True))

    def heal(self) -> None:
        """Undo partitions and cuts; rates stay."""
        self._plug([[*self.hosts, OUTSIDE]])

    def slow(self, host: str, rate: str | float | None) -> None:
        """Set the rate of a host's link, each way; None removes the limit."""
        index, limit = self._index(host), None if rate is None else bits_per_s(rate)
        own = self._root_link if host == OUTSIDE else "eth0"
        for at, link in ((self._at(host), own), (self._at("switch"), f"port{index}")):
            if limit is None:
                call("tc", *at, "qdisc", "del", "dev", link, "root", may_fail=True)
                continue
            burst = int(max(4 * 1514, limit / 8 * 0.002))  # 2 ms, and some whole packets
            what = f"tbf rate {limit:.0f}bit burst {burst} latency 50ms"
            call("tc", *at, "qdisc", "replace", "dev", link, "root", *what.split())

    # ---- removing it

    def remove(self) -> None:
        """End every process in the hosts and remove the network; safe to call twice."""
        remove(self.name)
        for program in self._programs:
            if program.poll() is None:
                program.kill()
            program.wait()
        self._programs.clear()

    # ---- how it is built

    @property
    def _root_link(self) -> str:
        return f"netlab{self._number}"

    def _index(self, host: str) -> int:
        if host != OUTSIDE and host not in self.hosts:
            known = ", ".join([*self.hosts, OUTSIDE])
            raise NetworkError(f"no host is called {host!r}. Known: {known}.")
        return 254 if host == OUTSIDE else int(host[1:])

    def _space(self, host: str) -> str:
        return f"{self.name}-{host}"

    def _at(self, host: str) -> list[str]:
        return [] if host == OUTSIDE else ["-n", self._space(host)]

    def _build(self) -> None:
        for host in ["switch", *self.hosts]:
            call("ip", "netns", "add", self._space(host))
        switch = self._space("switch")
        places = [OUTSIDE, *self.hosts]
        lines = [f"link set {loose_end(self._number, os.getpid())} netns {switch} name port254"]
        for host in self.hosts:
            port, own = f"port{self._index(host)}", self._space(host)
            lines.append(f"link add {port} netns {switch} type veth peer name eth0 netns {own}")
        batch([], lines)
        for host in places:
            self._set_up(host)
        ports = [f"port{self._index(host)}" for host in places]
        batch(self._at("switch"), [line for port in ports for line in link_up(port)])
        self.heal()

    def _set_up(self, host: str) -> None:
        """Set up an interface; fixed neighbour entries, so that a partition gives no ARP errors."""
        link = self._root_link if host == OUTSIDE else "eth0"
        others = [each for each in [*self.hosts, OUTSIDE] if each != host]
        lines = [] if host == OUTSIDE else ["link set lo up"]
        lines += [f"link set {link} address {self._hardware(host)}", *link_up(link)]
        lines += [f"addr add {self.address(host)}/24 dev {link}"]
        for other in others:
            known = f"{self.address(other)} lladdr {self._hardware(other)}"
            lines.append(f"neigh replace {known} nud permanent dev {link}")
        batch(self._at(host), lines)
        for at, name in ((host, link), ("switch", f"port{self._index(host)}")):
            space = None if at == OUTSIDE else self._space(at)
            self.not_set += [f"{what} of {at}" for what in switch_off_offloads(space, name)]

    def _hardware(self, host: str) -> str:
        return f"02:77:00:00:{self._number:02x}:{self._index(host):02x}"

    def _plug(self, groups: Iterable[Iterable[str]]) -> None:
        self._move((h, f"group{number}") for number, group in enumerate(groups) for h in group)

    def _move(self, places: Iterable[tuple[str, str]]) -> None:
        """Put the port of each host on the bridge of this name, made if it does not exist."""
        wanted = [(f"port{self._index(host)}", bridge) for host, bridge in places]
        at = self._at("switch")
        there = {link["ifname"]: link.get("master") for link in json.loads(
            call("ip", *at, "-j", "link")
        )}  # fmt: skip
        new = dict.fromkeys(bridge for _, bridge in wanted if bridge not in there)
        lines = [f"link add {b} type bridge mcast_snooping 0" for b in new]
        lines += [line for bridge in new for line in link_up(bridge)]
        lines += [f"link set {port} master {b}" for port, b in wanted if there[port] != b]
        batch(at, lines)


def remove(name: str) -> None:
    """End every process in a network's hosts, and remove the network."""
    spaces = [match[0] for match in namespaces() if match[1] == name]
    deadline = time.monotonic() + 10
    while pids := [pid for space in spaces for pid in processes_in(space)]:
        if time.monotonic() > deadline:
            raise NetworkError(f"processes {pids} in {name} do not end, though killed.")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    number, creator = map(int, name.split("-")[1:3])
    with (
        without_others()
    ):  # else another one who removes it has freed the number, and somebody taken it
        spaces = [match[0] for match in namespaces() if match[1] == name]
        link = f"netlab{number}" if spaces else loose_end(number, creator)
        call("ip", "link", "del", link, may_fail=True)
        for space in spaces:
            call("ip", "netns", "del", space, may_fail=True)


def clean(*, living: bool = False) -> list[str]:
    """Remove the networks whose creator has ended, or with `living` all; returns their names."""
    removed = [name for name in networks() if living or not creator_lives(name)]
    for name in removed:
        remove(name)
    for link in json.loads(call("ip", "-j", "link")):  # its creator died before it named it
        loose = re.fullmatch(r"nl\d+-(\d+)", link["ifname"])
        if loose and not Path(f"/proc/{loose[1]}").exists():
            call("ip", "link", "del", link["ifname"], may_fail=True)
    return removed


def why_not() -> str | None:
    """Why this process cannot have a network, in a sentence; None if it can."""
    try:
        Network(1, rate="1mbit").remove()
    except NetworkError as error:
        return str(error)
    return None
