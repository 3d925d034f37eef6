"""The command that searches for values of a job's keys."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_set
from instep.cli.saying import say, say_aside
from instep.errors import INTERRUPTED, SpecError
from instep.words import command

if TYPE_CHECKING:
    from instep.search.begin import SearchState
    from instep.search.results import ToldTrial
    from instep.search.search import Search


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
    found = run_search(
        path, overrides, Path(args.runs), name=args.name, capacity=args.workers, tell=_say_trial
    )
    return _say_found(found, args)


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
    add("--name", help="name of the search's folder (default: the job's, with -search)")
    add("--runs", default="runs", help="folder of run folders (default: %(default)s)")
    add_set(parser)
    text = "only write a search as a study of Optuna, for optuna-dashboard"
    add("--export", metavar="STUDY.DB", help=text)


def _say_trial(search: Search, number: int, told: ToldTrial) -> None:
    from instep.search.table import trial_line

    best = "   best" if search.best == number else ""
    say_aside(f"{trial_line(number, told, search.job.stop.metric)}{best}")


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
