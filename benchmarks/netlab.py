"""Emulated hosts on one Linux machine, from the shell; `instep/lab/netlab.py` is what makes them.

python benchmarks/netlab.py up --hosts 3 --rate 100mbit     until Ctrl-C; then, elsewhere:
python benchmarks/netlab.py run h1 -- COMMAND               also: partition, cut, heal, slow
python benchmarks/netlab.py clean                           what a killed creator left
"""

import argparse
import contextlib
import signal
import sys
from collections.abc import Sequence

from instep.lab.netlab import OUTSIDE, Network, NetworkError, clean, creator_lives, networks


def _up(args: argparse.Namespace) -> None:
    """make a network and keep it until Ctrl-C"""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.suppress(KeyboardInterrupt), Network(args.hosts, rate=args.rate) as network:
        for host in [*network.hosts, OUTSIDE]:
            print(f"{host}\t{network.address(host)}")
        if network.not_set:
            print(f"could not be switched off: {', '.join(network.not_set)}")
        print(f"{network.name} is up; Ctrl-C removes it", flush=True)
        signal.pause()


def _run(args: argparse.Namespace) -> int:
    """run a command in a host"""
    return Network.find(args.network).run(args.host, args.command).wait()


def _partition(args: argparse.Namespace) -> None:
    """let packets pass only inside groups: h1,h2 h3,outside"""
    Network.find(args.network).partition(*(group.split(",") for group in args.groups))


def _cut(args: argparse.Namespace) -> None:
    """cut hosts off"""
    Network.find(args.network).cut(*args.hosts)


def _heal(args: argparse.Namespace) -> None:
    """undo partition and cut"""
    Network.find(args.network).heal()


def _slow(args: argparse.Namespace) -> None:
    """set the rate of a host's link: 10mbit, or none"""
    Network.find(args.network).slow(args.host, None if args.rate == "none" else args.rate)


def _traffic(args: argparse.Namespace) -> None:
    """what each host has sent and received"""
    network = Network.find(args.network)
    for host in [*network.hosts, OUTSIDE]:
        counted = network.traffic(host)
        print(f"{host}\tsent {counted.sent_bytes} B\treceived {counted.received_bytes} B")


def _list(args: argparse.Namespace) -> None:
    """the networks on this machine"""
    for name in networks():
        print(name if creator_lives(name) else f"{name}  (its creator has ended)")


def _clean(args: argparse.Namespace) -> None:
    """remove networks whose creator has ended, and every process in them"""
    for name in clean(living=args.living):
        print(f"removed {name}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--network", type=int, metavar="K", help="which one, if there are several")
    commands = parser.add_subparsers(required=True)
    made = {}
    for call in (_up, _run, _partition, _cut, _heal, _slow, _traffic, _list, _clean):
        name = call.__name__.removeprefix("_")
        made[name] = commands.add_parser(name, help=call.__doc__, description=call.__doc__)
        made[name].set_defaults(call=call)
    made["up"].add_argument("--hosts", type=int, default=3)
    made["up"].add_argument("--rate", help="of each link, each way, such as 100mbit")
    for name in ("run", "slow"):
        made[name].add_argument("host")
    made["run"].add_argument("command", nargs="+")
    made["partition"].add_argument("groups", nargs="+")
    made["cut"].add_argument("hosts", nargs="+")
    made["slow"].add_argument("rate")
    made["clean"].add_argument("--living", action="store_true", help="also of living creators")
    args = parser.parse_args(arguments)
    try:
        return args.call(args) or 0
    except NetworkError as error:
        print(f"netlab: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
