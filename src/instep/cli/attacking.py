"""The command that attacks what a job promises."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from instep.cli.parsing import Parser, add_job, overrides_of, say_left_out
from instep.cli.saying import say
from instep.errors import RunError


def lab(args: argparse.Namespace) -> int:
    """Attack what a job promises: `privacy` its private step, by canaries."""
    from instep.job import file as spec_file
    from instep.lab.privacy.attack import attack_job

    job = spec_file.load(Path(args.job), overrides_of(args), say=say_left_out)
    found = attack_job(job, args.canaries, args.runs)
    if args.json:
        print(json.dumps(found.as_table()))
    else:
        for line in found.lines():
            say(line)
    if not found.exact:
        raise RunError(found.fault)
    return 0


def lab_options(parser: Parser) -> None:
    """Options of `instep lab`."""
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    text = "attack the private step of a job, and test what its epsilon rests on"
    made: Parser = actions.add_parser("privacy", help=text, description=text, allow_abbrev=False)
    made.example = "lab privacy job.toml --canaries 1000"
    made.set_defaults(parser=made)
    add_job(made)
    text = "how many; more prove more (default: %(default)s)"
    made.add_argument("--canaries", type=int, default=1000, metavar="N", help=text)
    text = "take the steps so often, with new secrets; more prove more (default: %(default)s)"
    made.add_argument("--runs", type=int, default=1, metavar="N", help=text)
