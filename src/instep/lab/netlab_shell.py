"""What `instep netlab` does: emulated hosts that are made, found and changed from a shell.

A network lives as long as `up` does. Every other action finds it in the kernel. `netlab.py` is
what makes them. Way in: `ACTIONS`.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from collections.abc import Callable
from typing import Any

from instep.lab.namespaces import creator_lives, networks
from instep.lab.netlab import OUTSIDE, Network, clean

Answer = dict[str, Any]
"""What `--json` prints."""


def up(args: argparse.Namespace) -> Answer:
    """Make a network, and keep it until Ctrl-C."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    made: Answer = {}
    with contextlib.suppress(KeyboardInterrupt), Network(args.hosts, rate=args.rate) as network:
        places = {host: network.address(host) for host in [*network.hosts, OUTSIDE]}
        made = {"network": network.name, "addresses": places}
        out = sys.stderr if args.json else sys.stdout
        for host, address in places.items():
            print(f"{host}\t{address}", file=out)
        if network.not_set:
            print(f"could not be switched off: {', '.join(network.not_set)}", file=out)
        print(f"{network.name} is up; Ctrl-C removes it", file=out, flush=True)
        signal.pause()
    return made


def run(args: argparse.Namespace) -> int:
    """Run a command in a host; its exit code is that of the command."""
    network = Network.find(args.network)
    return network.run(args.host, args.words).wait()


def partition(args: argparse.Namespace) -> Answer:
    """Let packets pass only inside groups of hosts: h1,h2 h3,outside."""
    return _changed(args, lambda network: network.partition(*(g.split(",") for g in args.groups)))


def cut(args: argparse.Namespace) -> Answer:
    """Cut hosts off from all others, until heal."""
    return _changed(args, lambda network: network.cut(*args.hosts))


def heal(args: argparse.Namespace) -> Answer:
    """Undo partitions and cuts."""
    return _changed(args, lambda network: network.heal())


def slow(args: argparse.Namespace) -> Answer:
    """Set the rate of a host's link, each way: 10mbit, or none for no limit."""
    rate = None if args.rate == "none" else args.rate
    return _changed(args, lambda network: network.slow(args.host, rate))


def traffic(args: argparse.Namespace) -> Answer:
    """What each host has sent and received, Ethernet headers included."""
    network = Network.find(args.network)
    counted = {host: network.traffic(host)._asdict() for host in [*network.hosts, OUTSIDE]}
    for host, counts in {} if args.json else counted.items():
        print(f"{host}\tsent {counts['sent_bytes']} B\treceived {counts['received_bytes']} B")
    return {"network": network.name, "traffic": counted}


def show(args: argparse.Namespace) -> Answer:
    """The networks on this machine."""
    there = {name: creator_lives(name) for name in networks()}
    for name, lives in {} if args.json else there.items():
        print(name if lives else f"{name}  (its creator has ended)")
    return {"networks": list(there)}


def remove(args: argparse.Namespace) -> Answer:
    """Remove networks whose creator has ended, and every process in them."""
    removed = clean(living=args.living)
    for name in () if args.json else removed:
        print(f"removed {name}")
    return {"removed": removed}


def _changed(args: argparse.Namespace, change: Callable[[Network], None]) -> Answer:
    network = Network.find(args.network)
    change(network)
    return {"network": network.name}


ACTIONS: dict[str, Callable[[argparse.Namespace], Answer | int]] = {
    "up": up,
    "run": run,
    "partition": partition,
    "cut": cut,
    "heal": heal,
    "slow": slow,
    "traffic": traffic,
    "list": show,
    "clean": remove,
}
