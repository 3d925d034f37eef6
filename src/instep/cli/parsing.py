"""What a command of the command line is, and how words become its arguments."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from instep import __version__
from instep.cli.saying import say_aside
from instep.errors import SpecError, near_miss


class Parser(argparse.ArgumentParser):
    """Answers a wrong word with the nearest one, and with our own error and exit code."""

    example = ""

    def format_help(self) -> str:
        """The example first."""
        example = f"Example: instep {self.example}\n\n" if self.example else ""
        return example + super().format_help()

    def error(self, message: str) -> NoReturn:
        """Raise it as ours."""
        wrong = re.match(r"argument (\S+): invalid choice: '(.*?)' \(choose", message)
        if wrong:
            name, given = wrong.groups()
            (known,) = (a.choices for a in actions_of(self) if name in (a.metavar, a.dest))
            raise SpecError(f"there is no {name} {given!r}. {near_miss(given, known or ())}")
        raise SpecError(f"{message}. See {self.prog} --help.")


def number(wanted: str, low: float, high: float, kind: type = float) -> Callable[[str], Any]:
    """Make the type of an option that is a number.

    Args:
        wanted: words for such a number.
        low, high: the least and the greatest.
        kind: of number.
    """

    def read(typed: str) -> Any:
        with suppress(ValueError):
            if low <= (found := kind(typed)) <= high:
                return found
        raise argparse.ArgumentTypeError(f"{typed!r}: wanted is {wanted}")

    return read


class Command(NamedTuple):
    """`instep NAME ...`."""

    call: Callable[[argparse.Namespace], int]
    """Does it, and returns the exit code; its docstring is the help."""
    declare: Callable[[Parser], None]
    """Adds its options to a parser."""
    example: str
    """Words after `instep`, with which the help begins."""


class _Grouped(argparse.HelpFormatter):
    """Writes the heading of a group of commands above the first of them."""

    def __init__(self, *args: Any, headings: Mapping[str, str], **named: Any) -> None:
        super().__init__(*args, **named)
        self._headings = headings

    def _format_action(self, action: argparse.Action) -> str:
        heading = self._headings.get(action.dest)
        return f"\n  {heading}:\n" * bool(heading) + super()._format_action(action)


def make_parser(groups: Mapping[str, Mapping[str, Command]]) -> Parser:
    """One that knows these commands, which its help has by their groups."""
    first = {next(iter(group)): heading for heading, group in groups.items()}
    parser = Parser(
        prog="instep",
        allow_abbrev=False,
        formatter_class=partial(_Grouped, headings=first),
        description="Train any PyTorch model across whatever machines there are, "
        "with the result of one machine.",
        epilog="Exit codes: 0 done, 2 wrong job or command, 3 recipe, 4 data, 5 a worker failed, "
        "6 run folder, 7 checkpoint, 8 the loss was no finite number, 9 a machine may not join, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"instep {__version__}")
    parser.example = "run job.toml --workers 4"
    every = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, command in (each for group in groups.values() for each in group.items()):
        text = command.call.__doc__
        own: Parser = every.add_parser(name, help=text, description=text, allow_abbrev=False)
        text = "print one JSON object as the last line of standard output"
        own.add_argument("--json", action="store_true", help=text)
        own.example = command.example
        own.set_defaults(call=command.call, parser=own)
        command.declare(own)
    return parser


_ready: list[tuple[object, Parser]] = []
"""The parser of commands that a process has made before it was forked, and those."""


def make_ready(groups: Mapping[str, Mapping[str, Command]]) -> None:
    """Make the parser of these commands now, for this process and its forks."""
    _ready[:] = [(groups, make_parser(groups))]


def parsed(argv: Sequence[str], groups: Mapping[str, Mapping[str, Command]]) -> argparse.Namespace:
    """The arguments of a command line; those after `--` of a script as `argv`."""
    passed: list[str] = []
    if argv[:1] in (["run"], ["check"], ["plan"]) and "--" in argv:  # what follows is the script's
        at = argv.index("--")
        argv, passed = argv[:at], [*argv[at + 1 :]]
    parser = next((each for of, each in _ready if of is groups), None) or make_parser(groups)
    _check_options(argv, parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    args.argv = passed
    return args


def actions_of(parser: argparse.ArgumentParser) -> Sequence[argparse.Action]:
    """The arguments of a parser, in the order in which they were added."""
    return parser._actions


def commands_of(parser: argparse.ArgumentParser) -> Mapping[str, Parser]:
    """The parsers of the commands within one, by name."""
    for action in actions_of(parser):
        if isinstance(action, argparse._SubParsersAction):
            return action.choices
    return {}


def _check_options(argv: Sequence[str], parser: Parser) -> None:
    """Refuse an option that its command does not have, before anything else is found wrong.

    Raises:
        SpecError: it says what the command has.
    """
    for word in argv:
        if word == "--":
            return
        parser = commands_of(parser).get(word, parser)
        given = word.partition("=")[0]
        if not re.match(r"-[^\d.]", given):
            continue
        if given not in parser._option_string_actions:
            raise SpecError(_no_such_option(word, argv, parser))


def _no_such_option(word: str, argv: Sequence[str], parser: Parser) -> str:
    """What to write instead: an option of this command, or a key of the job file."""
    from instep.job.sentences import keys_by_name

    given, _, value = word.partition("=")
    options = sorted(o for o in parser._option_string_actions if o.startswith("--"))
    meant = {option: option for option in options}
    if "--set" in meant:
        after = argv[list(argv).index(word) + 1 :]
        value = value or next((v for v in after[:1] if not v.startswith("--")), "...")
        for name, key in keys_by_name().items():
            meant.setdefault(f"--{name.replace('_', '-')}", f"--set {key}={value}")
    close = get_close_matches(given.replace("_", "-"), meant, n=1, cutoff=0.75)
    if len(given) == 2:  # such as -w
        close = [option for option in options if option.startswith(f"-{given}")]
    guess = f"Did you mean '{meant[close[0]]}'? " if close else ""
    return f"there is no option {given}. {guess}Known to {parser.prog}: {', '.join(options)}."


def add_changes(parser: Parser) -> None:
    """The options that change values of a job file."""
    add = parser.add_argument
    add("--workers", help="number of worker processes; `auto` of `instep run` plans it")
    text = "what starts the processes: local, hosts, or a cluster (default: as the job says)"
    add("--on", metavar="LAUNCHER", help=text)
    text = "head node of the Ray cluster, with --on ray (default: RAY_ADDRESS, or start one)"
    add("--ray-address", metavar="HOST:PORT", help=text)
    add_set(parser)


def add_set(parser: Parser) -> None:
    """The option that changes any value of a job file."""
    text = "change a value of the job; may be repeated"
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text
    )


def add_job(parser: Parser) -> None:
    """The job, or a script that has one, and what changes it."""
    parser.add_argument("job", help="job file, TOML; or a script that calls instep.join")
    add_changes(parser)


def overrides_of(args: argparse.Namespace) -> list[str]:
    """What these options change, as `SECTION.KEY=VALUE`."""
    workers = [] if args.workers is None else [f"workers={args.workers}"]
    on = [] if args.on is None else [f'launch.on="{args.on}"']
    address = args.ray_address
    ray = [] if address is None else [f'launch.options.ray_address="{address}"']
    return [*args.set, *workers, *on, *ray]


def say_left_out(text: str) -> None:
    """Print, beside the result, that a value of the job went away with another."""
    say_aside(f"note    {text}")


def safetensors_file(name: str) -> Path:
    """A file to write, by its name."""
    if not name.endswith(".safetensors"):
        raise SpecError(f"--to {name!r}: the file's name needs to end in .safetensors.")
    return Path(name)
