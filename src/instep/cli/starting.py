"""The commands that help to begin: a first recipe, and completion of words in a shell."""

from __future__ import annotations

import argparse
import json
import shlex
from importlib.util import find_spec
from pathlib import Path

from instep.cli.parsing import Parser, make_parser
from instep.cli.saying import say
from instep.errors import SpecError
from instep.words import next_lines


def init(args: argparse.Namespace) -> int:
    """Write a first recipe and job, which train in seconds, to begin your own with."""
    from instep.client.first import KINDS, NEEDS, write

    if args.list or args.kind is None:
        if args.kind is not None:
            raise SpecError(f"--list shows what there is; leave {args.kind!r} out.")
        if args.json:
            print(json.dumps(KINDS))
            return 0
        for kind, text in KINDS.items():
            say(f"{kind:14}{text}")
        say("next    instep init vision")
        return 0
    files = write(args.kind, Path(args.folder or args.kind))
    job = files[-1]
    words = ["instep", "run", str(job), *(["--workers", "2"] if job.suffix == ".py" else [])]
    if args.json:
        print(json.dumps({"files": [*map(str, files)], "next": words}))
        return 0
    for file in files:
        say(f"wrote   {file}")
    package = NEEDS.get(args.kind)
    missing = package is not None and find_spec(package) is None
    for line in next_lines([*([f"pip install {package}"] if missing else []), shlex.join(words)]):
        say(line)
    return 0


def init_options(parser: Parser) -> None:
    """Options of `instep init`."""
    add = parser.add_argument
    add("kind", nargs="?", help="what to begin with (default: list what there is)")
    text = "folder to write into; what is there is never replaced (default: the kind's name)"
    add("folder", nargs="?", metavar="DIR", help=text)
    add("--list", action="store_true", help="list what there is, and write nothing")


def completion(args: argparse.Namespace) -> int:
    """Print a script that has bash or zsh complete commands, options and keys of a job."""
    from instep.cli import GROUPS
    from instep.cli.completion import script

    text = script(args.shell, make_parser(GROUPS))
    print(json.dumps({"script": text}) if args.json else text, end="")
    return 0


def completion_options(parser: Parser) -> None:
    """Options of `instep completion`."""
    add = parser.add_argument
    add("shell", choices=["bash", "zsh"], help="its startup file is to have: source <(...)")
    parser.epilog = (
        "For every new shell: echo 'source <(instep completion bash)' >> ~/.bashrc; for zsh the "
        "same in ~/.zshrc, after compinit."
    )
