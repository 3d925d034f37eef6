"""The command that searches for values of a job's keys."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_set
from instep.cli.saying import say, say_aside
from instep.errors import INTERRUPTED, SpecError
from instep.words import command, fit_to_print

if TYPE_CHECKING:
    from instep.search.begin import Look, SearchState, Tell
    from instep.search.results import ToldTrial
    from instep.search.search import Search

REDRAW_S = 0.5


def search(args: argparse.Namespace) -> int:
    """Train a job with many values of the keys in [search.space], and find the best."""
    from instep.search.begin import found_in, run_search

    path = Path(args.job)
    if args.export is not None:
        from instep.search.export import export

        found = found_in(path)
        export(found, Path(args.export))
        if args.json:
            print(json.dumps({"study": args.export, "trials": len(found.told)}))
        else:
            say(f"wrote   {args.export}: {len(found.told)} trials")
            say(f"next    optuna-dashboard sqlite:///{args.export}")
        return 0
    if args.workers is not None and args.workers < 1:
        raise SpecError(f"--workers {args.workers}: a search needs 1 worker or more.")
    overrides = [*args.set, *([] if args.trials is None else [f"search.trials={args.trials}"])]
    runs, capacity = Path(args.runs), args.workers
    if args.workers_file is not None:
        if args.workers is not None:
            raise SpecError("--workers and --workers-file both say how many. Leave one out.")
        capacity = Path(args.workers_file)
        _check_workers_file(capacity)
    with _shown(live=not args.json and sys.stderr.isatty()) as (tell, look):
        found = run_search(
            path, overrides, runs, name=args.name, capacity=capacity, tell=tell, look=look
        )
    return _say_found(found, args)


def _check_workers_file(path: Path) -> None:
    """Refuse a file without a number now; later it may be gone for a moment."""
    try:
        if int(path.read_text()) < 1:
            raise ValueError("it says less than 1")
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or error
        raise SpecError(
            f"--workers-file {path}: {why}. Write a whole number from 1 on into it: how many "
            "workers the trials may have."
        ) from None


@contextmanager
def _shown(*, live: bool) -> Iterator[tuple[Tell, Look]]:
    """Print a line for each trial that is over; on a terminal also a table that is redrawn."""
    if not live:
        yield _say_trial, lambda search: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    from instep.search.live import LiveTrials

    trials, drawn = LiveTrials(), 0.0
    with Live(console=Console(stderr=True), auto_refresh=False, transient=True) as screen:

        def tell(search: Search, number: int, told: ToldTrial) -> None:
            screen.console.print(Text(fit_to_print(_line(search, number, told), sys.maxsize)))

        def look(search: Search) -> None:
            nonlocal drawn
            if time.monotonic() - drawn > REDRAW_S:
                drawn = time.monotonic()
                lines = (fit_to_print(line, sys.maxsize) for line in trials.lines(search))
                text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis")
                screen.update(text, refresh=True)

        yield tell, look


def search_options(parser: Parser) -> None:
    """Options of `instep search`."""
    parser.epilog = (
        "The same command, or `instep search RUNS/NAME-search`, continues a search that was "
        "stopped or killed, with the same trials."
    )
    add = parser.add_argument
    add("job", help="job file with [search.space], TOML; or the folder of a search")
    add("--trials", type=int, metavar="N", help="how many trials (default: as the job says)")
    text = "worker processes at once, over all trials (default: the cores of this machine)"
    add("--workers", type=int, metavar="N", help=text)
    text = "a file with that number, read again and again while the search runs"
    add("--workers-file", metavar="FILE", help=text)
    add("--name", help="name of the search's folder (default: the job's, with -search)")
    add("--runs", default="runs", help="folder of run folders (default: %(default)s)")
    add_set(parser)
    text = "only write a search as a study of Optuna, for optuna-dashboard"
    add("--export", metavar="STUDY.DB", help=text)


def _say_trial(search: Search, number: int, told: ToldTrial) -> None:
    say_aside(_line(search, number, told))


def _line(search: Search, number: int, told: ToldTrial) -> str:
    from instep.search.table import trial_line

    best = "   best" if search.best == number else ""
    return f"{trial_line(number, told, search.job.stop.metric)}{best}"


def _say_found(found: SearchState, args: argparse.Namespace) -> int:
    from instep.search.results import name_of
    from instep.search.table import table_lines

    for line in table_lines(found):
        say(line, aside=args.json)
    if args.json:
        print(json.dumps(found.as_table()))
    elif found.interrupted:
        say(f"next    {command('search', found.folder)}")
    elif found.best is not None:
        say(f"next    {command('report', found.folder / name_of(found.best))}")
    return INTERRUPTED if found.interrupted else 0
