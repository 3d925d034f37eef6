"""The commands for folders of runs: which there are, where one is, what it printed, cleaning."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from instep.cli.parsing import Parser
from instep.cli.saying import say, say_aside
from instep.errors import RunError, SpecError, near_miss


def list_runs(args: argparse.Namespace) -> int:
    """List the runs of a folder: how each is or ended, and what it reached."""
    if args.pool is not None:
        from instep.cli.pooling import list_jobs

        return list_jobs(args)
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
    pool = "the jobs of the pool in this folder instead (default: pool)"
    parser.add_argument("--pool", nargs="?", const="pool", metavar="FOLDER", help=pool)
    parser.add_argument("--where", action="append", default=[], metavar="CONDITION", help=text)


def clean(args: argparse.Namespace) -> int:
    """Remove what runs that are over have left, after a question; never of a running run."""
    from instep.store.cleaning import Kinds, Removal, removals, remove
    from instep.units import readable_bytes

    if args.json and not (args.yes or args.dry_run):
        raise SpecError("--json asks no question: add --yes, or --dry-run.")
    kinds = Kinds(args.checkpoints, args.failed)
    found, alone = removals(Path(args.runs), kinds)

    def told(removed: list[Removal]) -> str:
        size = readable_bytes(sum(each.size_bytes for each in removed))
        return f"{len(removed)} {'path' if len(removed) == 1 else 'paths'}, {size}"

    if not args.json:
        for each in found:
            say(f"{readable_bytes(each.size_bytes):>9}   {each.path}   {each.why}")
    gone = list[Removal]()
    if found and not args.dry_run and (args.yes or _agreed(f"remove {told(found)}?")):
        gone, not_removed = remove(found, kinds)
        alone += not_removed
    for line in alone:
        say_aside(f"note    {line}")
    if args.json:
        print(json.dumps({"found": _plain(found), "removed": _plain(gone), "left_alone": alone}))
    elif args.dry_run or not found:
        say(f"would remove {told(found)}" if found else "nothing to remove")
    else:
        say(f"removed {told(gone)}" if gone else "nothing was removed")
    return 0


def _agreed(question: str) -> bool:
    """Whether the user says yes.

    Raises:
        SpecError: nobody can be asked.
    """
    if not sys.stdin.isatty():
        raise SpecError(f"{question} Standard input is no terminal: add --yes, or --dry-run.")
    say(f"{question} [y/N] ", aside=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _plain(removed: Sequence[Any]) -> list[dict[str, Any]]:
    return [{**each._asdict(), "run": str(each.run), "path": str(each.path)} for each in removed]


def clean_options(parser: Parser) -> None:
    """Options of `instep clean`."""
    add = parser.add_argument
    add("runs", nargs="?", default="runs", help="folder of run folders (default: %(default)s)")
    add("--dry-run", action="store_true", help="say what would be removed, and remove nothing")
    add("--yes", action="store_true", help="remove it without a question")
    text = "also checkpoints of runs that ended well and have their model"
    add("--checkpoints", action="store_true", help=text)
    text = "also whole folders of runs that failed and have no checkpoint"
    add("--failed", action="store_true", help=text)


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


def dashboard(args: argparse.Namespace) -> int:
    """Show runs in the browser as they train; prints a link, and serves until Ctrl-C."""
    from instep.dashboard.pools import is_pool, runs_of
    from instep.dashboard.serve import check_installed, listen, serve

    check_installed()
    runs, pool = Path(args.runs), Path(args.pool) if args.pool else None
    if pool is not None and not is_pool(pool):
        raise RunError(f"there is no pool in {pool}. Start one: instep pool start")
    if pool is None and is_pool(runs):
        runs, pool = runs_of(runs), runs
    if not runs.is_dir():
        raise RunError(f"there is no folder {runs}. Give the folder that has the run folders.")
    certificates = Path(args.certificates) if args.certificates else None
    if certificates is not None and not certificates.is_dir():
        raise SpecError(
            f"--certificates {certificates}: there is no such folder. Make one: "
            f"instep certificates {certificates} --hosts 1"
        )
    listening = listen(args.port, args.address, encrypted=certificates is not None)

    def show(link: str) -> None:
        print(json.dumps({"link": link}) if args.json else f"open    {link}", flush=True)

    return serve(runs, listening, say=show, certificates=certificates, pool=pool)


def dashboard_options(parser: Parser) -> None:
    """Options of `instep dashboard`."""
    parser.epilog = (
        "The link works once; then another one is printed, for another browser. Whoever has a link "
        "reads all runs there; nobody can change anything."
    )
    add = parser.add_argument
    text = "folder of run folders, one run folder, or that of a pool (default: %(default)s)"
    add("runs", nargs="?", default="runs", help=text)
    add("--port", type=int, default=0, help="port (default: the first free one from 8600)")
    add("--address", default="", help="address to listen on (default: 127.0.0.1)")
    text = "show this pool too (default: the folder `pool` beside, if the runs are its)"
    add("--pool", metavar="FOLDER", help=text)
    text = "folder of `instep certificates`: serve HTTPS, needed to be reached from other machines"
    add("--certificates", metavar="FOLDER", help=text)


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
