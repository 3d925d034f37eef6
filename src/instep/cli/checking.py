"""The command that says before anything starts whether a job would."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.cli.parsing import Parser, add_job, overrides_of, say_left_out
from instep.cli.saying import say, say_aside
from instep.errors import SpecError


def check(args: argparse.Namespace) -> int:
    """Say whether a job would start, what it needs, and everything that refuses it."""
    from instep.job.every_refusal import CheckedTables, load_all
    from instep.lab.check.check import check_job
    from instep.report.terminal.job_check import check_lines

    overrides = overrides_of(args)
    if args.strict:
        overrides.append("check.strict=true")
    path = Path(args.job)
    if path.suffix == ".py":
        from instep.client.join.script import load_script

        refused = CheckedTables(
            load_script(path, args.argv, overrides, say_left_out), [], frozenset()
        )
    elif args.argv:
        raise SpecError(
            f"{args.argv[0]!r}: a job file takes no arguments after --; they go to a script. Use "
            "--set arguments.key=value."
        )
    else:
        refused = load_all(path, overrides, say=say_left_out)
    with _no_byte_code():
        found = check_job(refused, _tell_doing)
    table = found.as_table()
    for line in check_lines(args.job, table):
        say(line, aside=args.json)
    if table["starts"]:
        say(f"next       {_next(args)}", aside=args.json)
    if args.json:
        print(json.dumps(table))
    return found.exit_code


@contextmanager
def _no_byte_code() -> Iterator[None]:
    """In this context, leave no byte code beside modules that the recipe imports."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _tell_doing(text: str) -> None:
    """Show on a terminal what is being done."""
    if sys.stderr.isatty():
        say_aside(f"check      {text} ...")


def _next(args: argparse.Namespace) -> str:
    """The command that starts what was checked."""
    words = ["instep", "run", args.job]
    if args.workers is not None:
        words += ["--workers", args.workers]
    if args.on is not None:
        words += ["--on", args.on]
    if args.ray_address is not None:
        words += ["--ray-address", args.ray_address]
    for change in args.set:
        words += ["--set", change]
    words += ["--strict"] if args.strict else []
    words += ["--", *args.argv] if args.argv else []
    return shlex.join(words)


def check_options(parser: Parser) -> None:
    """Options of `instep check`."""
    parser.epilog = (
        "No process and no run folder is made. Exit code 0 if the job would start, else that of "
        "`instep run`: 2 the job, 3 the recipe, 4 the data, 5 an error of your code."
    )
    add_job(parser)
    add = parser.add_argument
    text = "refuse the job unless its result is known to be that of one machine"
    add("--strict", action="store_true", help=text)
