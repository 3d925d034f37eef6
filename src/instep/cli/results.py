"""The commands that look at what a run did, and try whether it holds."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_changes, overrides_of, safetensors_file, say_left_out
from instep.cli.saying import say, say_aside
from instep.errors import RunError, SpecError

if TYPE_CHECKING:
    from instep.lab.chaos.verdict import Verdict


def report(args: argparse.Namespace) -> int:
    """Write the report of a run again, or compare two runs."""
    from instep.report.figures.summary import summarise
    from instep.report.page.page import write_report
    from instep.report.terminal.closing import closing_lines
    from instep.state.export.export import check_page, writing_to
    from instep.store.run_folder import RunFolder

    folder = RunFolder(Path(args.run))
    other = RunFolder(Path(args.other)) if args.other else None
    for each in (folder, other):
        if each is not None and not each.last_step and not each.members.failures:
            raise RunError(
                f"{each.path} has nothing to report: no step was committed, and the run is "
                f"{each.outcome}. Its logs are in {each.path / 'logs'}."
            )
    name = f"report-with-{Path(args.other).name}.html" if args.other else "report.html"
    path = Path(args.to) if args.to else Path(args.run) / name
    if args.to:
        check_page(path, folder.path)
    with writing_to(path):
        write_report(folder, path, other)
    summary = summarise(folder)
    if args.json:
        print(json.dumps({**summary, "report": str(path)}))
        return 0
    for line in closing_lines(summary, folder):
        say(line)
    if path.name != "report.html" or args.to:
        say(f"report  {path}")
    return 0


def report_options(parser: Parser) -> None:
    """Options of `instep report`."""
    add = parser.add_argument
    add("run", help="run folder")
    add("other", nargs="?", help="a second run folder, to compare with the first")
    add("--to", metavar="FILE.html", help="file to write (default: in the run folder)")


def compare(args: argparse.Namespace) -> int:
    """Run a job and alternatives to it in turns, and say which pays, by how much."""
    from instep.lab.alternatives import alternatives_of
    from instep.lab.compare import Hosts, compare

    found = compare(
        alternatives_of(Path(args.job), overrides_of(args), args.changes),
        Path(args.runs),
        say_aside,
        repeats=args.repeats,
        hosts=Hosts(args.hosts, args.rate),
    )
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        say(line)
    return found.exit_code


def compare_options(parser: Parser) -> None:
    """Options of `instep compare`."""
    add = parser.add_argument
    add("job", help="job file, TOML")
    text = "one alternative: what it changes, with commas between; may be repeated"
    form = "SECTION.KEY=VALUE,..."
    add("--with", dest="changes", action="append", default=[], metavar=form, help=text)
    text = "turns in which each runs once (default: 3 to 8, until the spread is small enough)"
    add("--repeats", type=int, metavar="N", help=text)
    text = "emulated hosts to run on (needs root on Linux)"
    add("--hosts", type=int, default=0, metavar="N", help=text)
    add("--rate", metavar="RATE", help="of each host's link, each way, such as 100mbit")
    text = "folder in which the folder of the comparison is made (default: %(default)s)"
    add("--runs", default="runs", help=text)
    add_changes(parser)


def audit(args: argparse.Namespace) -> int:
    """Check in a run's ledger that every sample was used exactly once in every epoch."""
    from instep.report.figures.proof import prove, prove_private
    from instep.store.run_folder import RunFolder

    run = RunFolder(Path(args.run))
    proof, contents, private = prove(run), None, None
    if args.privacy:
        private = prove_private(run)
    if args.content is not None:
        from instep.lab.contents import compare

        contents = compare(run, _how_many(args.content))
    if args.json:
        more = {"content": contents.as_table()} if contents else {}
        more |= {"privacy": private.as_table()} if private else {}
        print(json.dumps({**proof.as_table(), **more}))
    else:
        *lines, next_ = proof.lines()
        for beside in (contents, private):
            lines += beside.lines() if beside else []
        for line in [*lines, next_]:
            say(line)
    for each in (proof, contents, private):
        if each is not None and not each.exact:
            raise RunError(each.fault)
    return 0


def audit_options(parser: Parser) -> None:
    """Options of `instep audit`."""
    add = parser.add_argument
    add("run", help="run folder; the run may still be running")
    add(
        "--content",
        nargs="?",
        const="all",
        metavar="N",
        help="also compare samples as training got them with a plain read of the dataset: N of "
        "the recorded ones, or all",
    )
    text = "also compare the records of a private run with its secret, and compute epsilon anew"
    add("--privacy", action="store_true", help=text)


def _how_many(given: str) -> int | None:
    if given == "all":
        return None
    if not given.isdecimal() or int(given) < 1:
        raise SpecError(f"--content {given}: needs a number of samples above 0, or 'all'.")
    return int(given)


def replay(args: argparse.Namespace) -> int:
    """Compute a recorded step again on one process, or one replica, and compare the results."""
    from instep.lab.replay import replay as again
    from instep.store.run_folder import RunFolder

    to = safetensors_file(args.to) if args.to is not None else None
    run = RunFolder(Path(args.run))
    found = again(run, args.step, say_aside, to=to)
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        say(line)
    if not found.same:
        raise RunError(found.fault)
    return 0


def replay_options(parser: Parser) -> None:
    """Options of `instep replay`."""
    add = parser.add_argument
    add("run", help="run folder; the run may still be running")
    add("--step", type=int, required=True, metavar="N", help="the step; counts from 1")
    add("--to", metavar="FILE.safetensors", help="write the model after that step")


def chaos(args: argparse.Namespace) -> int:
    """Break a run on purpose, and check that its result is the same."""
    from instep.errors import WorkerError

    found = _broken(args, say_aside)
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        say(line)
    if not found.holds:
        raise WorkerError(f"{found.run.path} does not hold: {'; '.join(found.faults)}.")
    return 0


def chaos_options(parser: Parser) -> None:
    """Options of `instep chaos`."""
    add = parser.add_argument
    add("target", help="job file, which is run twice; or a run folder")
    for option, default, text in (
        ("--kills", 10, "processes to kill"),
        ("--hangs", 0, "processes to stop (SIGSTOP), as if they hung"),
        ("--partitions", 0, "network partitions; puts each worker on an emulated host"),
        ("--seed", 0, "seed of the choice of what to break, and when"),
    ):
        add(option, type=int, default=default, help=f"{text} (default: {default})")
    add("--roles", help="roles of the processes, such as worker,loader (default: all)")
    add(
        "--over",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="spread the injections over so much time, rather than over the steps of the run",
    )
    add("--runs", help="folder of run folders (default: runs, or where the run is)")
    add_changes(parser)


def _broken(args: argparse.Namespace, say: Callable[[str], None]) -> Verdict:
    """Break a job that is run twice, a run that is repeated, or a run that is running."""
    from instep.job import file as spec_file
    from instep.lab.chaos.breaker import Plan
    from instep.lab.chaos.chaos import break_again, break_job, break_running
    from instep.lab.chaos.injections import check_numbers, check_roles
    from instep.store.folder import is_running
    from instep.store.run_folder import RunFolder

    check_numbers(args.kills, args.hangs, args.partitions, args.over)
    roles = tuple(args.roles.split(",")) if args.roles else ()
    check_roles(roles)
    plan = Plan(
        kills=args.kills,
        hangs=args.hangs,
        partitions=args.partitions,
        seed=args.seed,
        roles=roles,
        over_s=args.over,
    )
    target, runs = Path(args.target), Path(args.runs) if args.runs else None
    overrides = overrides_of(args)
    if not target.is_dir():
        job = spec_file.load(target, overrides, say=say_left_out)
        return break_job(job, runs or Path("runs"), plan, say)
    run = RunFolder(target)
    if overrides:
        raise SpecError(
            f"{overrides[0]}: the job of the run {target} cannot change. Give a job file instead."
        )
    if is_running(target):
        return break_running(run, plan, say)
    return break_again(run, runs or target.resolve().parent, plan, say)
