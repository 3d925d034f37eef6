"""The command that says which way of training a job pays, before anything starts."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_job, number, overrides_of, say_left_out
from instep.cli.saying import say, say_aside
from instep.errors import SpecError

if TYPE_CHECKING:
    from instep.job.spec import JobSpec


def plan(args: argparse.Namespace) -> int:
    """Say which way of training a job is fastest, how long it takes, and whether it pays."""
    from instep.lab.plan.plan import Question, plan_job
    from instep.plan.lines import plan_lines

    job = _job(args)
    machine = Path(args.machine) if args.machine is not None else None
    asked = args.hosts, args.rate, args.emulated, args.most, args.seconds, 0, machine
    question = Question(*asked, Path(args.runs), meshes=args.meshes)
    table = plan_job(job, question, _tell_doing).as_table()
    table["next"] = [_with_job(command, args) for command in table["next"]]
    for line in plan_lines(table):
        say(line, aside=args.json)
    if args.json:
        print(json.dumps(table))
    return 0


def _job(args: argparse.Namespace) -> JobSpec:
    """The job of a file, or of a script that calls `instep.join`."""
    from instep.client.join.script import load_script
    from instep.job import file as spec_file

    path, overrides = Path(args.job), overrides_of(args)
    if path.suffix == ".py":
        return load_script(path, args.argv, overrides, say_left_out)
    if args.argv:
        raise SpecError(
            f"{args.argv[0]!r}: a job file takes no arguments after --; they go to a script. Use "
            "--set arguments.key=value."
        )
    return spec_file.load(path, overrides, say=say_left_out, planned=True)


def _tell_doing(text: str) -> None:
    """Show on a terminal what is being done."""
    if sys.stderr.isatty():
        say_aside(f"plan       {text} ...")


def _with_job(command: str, args: argparse.Namespace) -> str:
    """A command for this job, with what this command changed in it."""
    words = [shlex.quote(word) for change in args.set for word in ("--set", change)]
    words += ["--", *(shlex.quote(word) for word in args.argv)] if args.argv else []
    return " ".join([command.replace(" JOB ", f" {shlex.quote(args.job)} "), *words])


_count = number("a whole number from 1 on", 1, math.inf, int)
_seconds = number("a number of seconds, such as 30", 0, math.inf)


def plan_options(parser: Parser) -> None:
    """Options of `instep plan`."""
    parser.epilog = (
        "Nothing is started but processes that take a few steps and are thrown away; no file is "
        "left. Exit code 0 also if nothing pays."
    )
    add = parser.add_argument
    add_job(parser)
    add("--hosts", type=_count, default=0, metavar="N", help="so many hosts like this one")
    add("--rate", metavar="RATE", help="of each host's link, each way, such as 1gbit")
    text = "the hosts share the cores of this machine, as with `instep compare --hosts`"
    add("--emulated", action="store_true", help=text)
    text = "the most workers to look at (default: the hosts; on one, twice its cores)"
    add("--most", type=_count, default=0, metavar="N", help=text)
    text = "look at meshes too: shard, tensor and stages of the model, each with two processes"
    add("--meshes", action="store_true", help=text)
    text = "hosts and link of an earlier plan: a file with what its --json printed"
    add("--machine", metavar="FILE", help=text)
    text = (
        "folder of run folders: earlier runs of the recipe correct the plan (default: %(default)s)"
    )
    add("--runs", default="runs", help=text)
    text = "after so many seconds no further way is probed (default: %(default)s)"
    add("--seconds", type=_seconds, default=30.0, metavar="S", help=text)
