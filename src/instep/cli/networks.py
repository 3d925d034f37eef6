"""The command that emulates hosts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

from instep.cli.parsing import Parser


def netlab(args: argparse.Namespace) -> int:
    """Emulate hosts on this machine: a network with links to slow, cut and heal (Linux, root)."""
    from instep.lab.netlab_shell import ACTIONS

    answer = ACTIONS[args.action](args)
    if isinstance(answer, int):
        return answer
    if args.json:
        print(json.dumps(answer))
    return 0


def netlab_options(parser: Parser) -> None:
    """Options of `instep netlab`."""
    text = "number K of the network, if there are several (netlab-K-...)"
    parser.add_argument("--network", type=int, metavar="K", help=text)
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, text: str, example: str = "") -> Callable[..., Any]:
        made: Parser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.example = f"netlab {name} {example}".rstrip()
        made.set_defaults(parser=made)
        return made.add_argument

    add = action("up", "make a network, and keep it until Ctrl-C", "--hosts 3 --rate 100mbit")
    add("--hosts", type=int, default=3, metavar="N", help="how many (default: %(default)s)")
    add("--rate", metavar="RATE", help="of each link, each way, such as 100mbit")
    add = action("run", "run a command in a host", "h1 -- ping -c 1 h2")
    add("host", help="h1, h2, ... or outside")
    add("words", nargs="+", metavar="COMMAND", help="after --, with its arguments")
    add = action("partition", "let packets pass only inside groups of hosts", "h1,h2 h3,outside")
    add("groups", nargs="+", metavar="HOST,HOST", help="such as h1,h2 h3,outside")
    action("cut", "cut hosts off from all others", "h3")("hosts", nargs="+", metavar="HOST")
    action("heal", "undo partitions and cuts")
    add = action("slow", "set the rate of a host's link", "h2 10mbit")
    add("host", help="h1, h2, ... or outside")
    add("rate", help="such as 10mbit; none: no limit")
    action("traffic", "what each host has sent and received")
    action("list", "the networks on this machine")
    add = action("clean", "remove networks whose creator has ended, and the processes in them")
    add("--living", action="store_true", help="also those of living creators")
