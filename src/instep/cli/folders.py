"""The commands that look into folders of runs: which there are, where one is, what it printed."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path

from instep.cli.parsing import Parser
from instep.cli.saying import say, say_aside
from instep.errors import SpecError, near_miss


def list_runs(args: argparse.Namespace) -> int:
    """List the runs of a folder: how each is or ended, and what it reached."""
    from instep.report.terminal.choice import RunChoice
    from instep.report.terminal.status import state_lines, states_of
    from instep.words import command

    states, unread = states_of(Path(args.runs), RunChoice(args.where, args.best))
    for line in unread:
        say_aside(f"instep: {line}")
    if args.json:
        print(json.dumps([each.as_table() for each in states]))
        return 0
    if not states and not unread:
        say(f"no run in {args.runs} is chosen by these conditions")
        return 0
    for line in state_lines(states, (args.best or "").partition(":")[0]):
        say(line)
    if states:
        last = states[0 if args.best else -1]
        say(f"next    {command('status', Path(args.runs) / last.name)}")
    return 0


def list_runs_options(parser: Parser) -> None:
    """Options of `instep list`."""
    text = "folder of run folders (default: %(default)s)"
    parser.add_argument("runs", nargs="?", default="runs", help=text)
    text = "order by the best validation, such as accuracy, loss or error:min"
    parser.add_argument("--best", metavar="METRIC", help=text)
    text = "only runs with KEY>VALUE (also >= < <= = !=): a metric, a column or a key of the job"
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION", help=text)


def status(args: argparse.Namespace) -> int:
    """Show where a run is: its step, its workers, its losses, the time left."""
    from instep.report.terminal.status import Status
    from instep.words import next_lines

    found = Status(Path(args.run))
    if args.json:
        print(json.dumps(found.as_table()))
        return 0
    columns, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding or "ascii"
    for line in [*found.lines(columns, encoding), *next_lines(found.next_commands())]:
        say(line)
    return 0


def status_options(parser: Parser) -> None:
    """Options of `instep status`."""
    parser.add_argument("run", help="run folder")


def logs(args: argparse.Namespace) -> int:
    """Print what the processes of a run printed, each line with its process, without colours."""
    from instep.store.logs import Logs
    from instep.words import printable

    there = Logs(Path(args.run))
    if args.of and args.of not in there.names():
        raise SpecError(f"{args.of!r} has no log there. {near_miss(args.of, there.names())}")
    while True:
        running = there.is_running()  # before the last look
        for name, line in there.new_lines(args.of):
            of_it = json.dumps({"of": name, "line": line})
            print(of_it if args.json else printable(f"{name:9} {line}"))
        if not (args.follow and running):
            return 0
        sys.stdout.flush()
        time.sleep(0.2)


def logs_options(parser: Parser) -> None:
    """Options of `instep logs`."""
    add = parser.add_argument
    add("run", help="run folder")
    add("of", nargs="?", help="one process, such as worker-1 or host (default: all)")
    add("--follow", action="store_true", help="go on until the run ends")
