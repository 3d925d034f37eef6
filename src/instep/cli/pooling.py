"""The commands for many jobs on a pool: start it, submit, cancel, explain."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_set, overrides_of
from instep.cli.saying import say, say_aside
from instep.errors import RunError, SpecError, near_miss

if TYPE_CHECKING:
    from instep.pool.pool_file import PoolFolder

START_S = 20.0
"""A scheduler that says nothing for so long has not started."""


def pool(args: argparse.Namespace) -> int:
    """Share the cores of this machine, or of several, among many jobs: start, look, drain, stop."""
    from instep.pool.pool_file import PoolFolder

    return int(_ACTIONS[args.action](args, PoolFolder(Path(args.pool))))


def pool_options(parser: Parser) -> None:
    """Options of `instep pool`."""
    parser.epilog = "Jobs go on without a scheduler; the next one finds them again."
    text = "folder of the pool (default: %(default)s)"
    parser.add_argument("--pool", default="pool", metavar="FOLDER", help=text)
    actions = parser.add_subparsers(dest="action", metavar="action", required=True)
    for name, text, example in (
        ("start", "start the scheduler of a pool, in the background", "pool.toml"),
        ("status", "show the cores, hosts and shares of a pool, and its jobs", ""),
        ("drain", "move all workers of a host to others, and start nothing there", "node2"),
        ("stop", "stop the scheduler; jobs that run go on", ""),
        ("serve", "be the scheduler, until Ctrl-C", ""),
        ("command", "run the command of a job; the scheduler starts this", "nightly-prepare"),
    ):
        made: Parser = actions.add_parser(name, help=text, description=text, allow_abbrev=False)
        made.example = f"pool {name} {example}".rstrip()
        made.set_defaults(parser=made)
        text = "print the result as JSON, as before the action"
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=text)
        if name == "command":
            made.add_argument("job", help="job of the pool")
        if name == "drain":
            made.add_argument("host", help="host of the pool, as its file names it")
            made.add_argument("--undo", action="store_true", help="have it work again")
        if name == "start":
            text = "file of the pool, TOML (default: all cores, equal shares)"
            made.add_argument("file", nargs="?", help=text)


def submit(args: argparse.Namespace) -> int:
    """Give a job to a pool, which starts it when there is room, and go home."""
    from instep.pool.flow_file import is_flow
    from instep.pool.pool_file import PoolFolder
    from instep.pool.submit import submit

    pool = PoolFolder(Path(args.pool))
    if is_flow(Path(args.job)):
        return _submit_flow(args, pool)
    if args.again:
        raise SpecError(
            f"--again: {args.job} is no flow. To resume its run: instep resume RUN; to run the job "
            "anew: submit it once more."
        )
    name, new, saves = submit(
        pool,
        Path(args.job),
        overrides_of(args),
        priority=args.priority,
        at_least=args.at_least,
        at_most=args.at_most,
        share=args.share or "",
        key=args.key or "",
        memory=_bytes(args.memory) if args.memory else 0,
    )
    if not pool.scheduled:
        say_aside(f"note    the pool has no scheduler: instep pool --pool {args.pool} start")
    if args.json:
        table = {"job": name, "run": str(pool.runs / name), "new": new, "saves": saves or None}
        print(json.dumps(table))
        return 0
    say(f"job     {name}{'' if new else ' was submitted before'}   {pool.runs / name}")
    if saves and new:
        say(f"saves   every {saves}, as the job has no checkpoint.every")
    say(f"next    instep explain {name}{_where(args)}")
    return 0


def _submit_flow(args: argparse.Namespace, pool: PoolFolder) -> int:
    """Give a flow to a pool, or what has failed of it once more."""
    from instep.pool.flow_submit import run_again, submit_flow

    for option in ("at_least", "at_most", "memory", "set"):
        if getattr(args, option):
            name = option.replace("_", "-")
            raise SpecError(
                f"--{name}: {args.job} is a flow. Write {option} into the [job.NAME] that is meant."
            )
    path, key = Path(args.job), args.key or ""
    if args.again:
        sent = run_again(pool, path, key=key)
    else:
        sent = submit_flow(pool, path, priority=args.priority, share=args.share or "", key=key)
    if args.json:
        print(json.dumps({"flow": sent.name, "jobs": list(sent.jobs), "new": sent.new}))
        return 0
    known = "" if sent.new or args.again else " was submitted before"
    say(f"flow    {sent.name}{known}: {', '.join(sent.jobs)}{' run again' if args.again else ''}")
    say(f"next    instep list --pool {'' if args.pool == 'pool' else args.pool}".rstrip())
    return 0


def _bytes(text: str) -> int:
    from instep.units import bytes_in

    try:
        return bytes_in(text)
    except ValueError as error:
        raise SpecError(f"--memory: {error}.") from None


def submit_options(parser: Parser) -> None:
    """Options of `instep submit`."""
    add = parser.add_argument
    add("job", help="job file, or the file of a flow of several jobs, TOML")
    _add_pool(parser)
    add("--priority", type=int, default=0, metavar="N", help="larger comes first in its share")
    text = "workers without which it does not run (default: one replica)"
    add("--at-least", type=int, metavar="N", help=text)
    text = "workers that it may have (default: as many as there is work for)"
    add("--at-most", type=int, metavar="N", help=text)
    text = "memory that a worker needs, on a pool whose hosts say theirs, such as 4GB"
    add("--memory", metavar="SIZE", help=text)
    add("--share", help="whose share of the pool it uses (default: your name)")
    add("--key", help="the same key twice is one job, or one flow")
    text = "of the newest flow of this file, run only what has not completed"
    add("--again", action="store_true", help=text)
    add_set(parser)
    parser.set_defaults(workers=None, on=None, ray_address=None)


def cancel(args: argparse.Namespace) -> int:
    """Stop a job of a pool for good: at its next commit, saved."""
    from instep.pool.pool_file import PoolFolder
    from instep.pool.submit import cancel
    from instep.pool.view import how_it_ends

    job = cancel(PoolFolder(Path(args.pool)), args.job)
    if args.json:
        print(json.dumps({"job": args.job}))
    else:
        say(f"cancel  {args.job} {how_it_ends(job)}")
    return 0


def cancel_options(parser: Parser) -> None:
    """Options of `instep cancel`."""
    parser.add_argument("job", help="job of the pool, as `instep list --pool` names it")
    _add_pool(parser)


def explain(args: argparse.Namespace) -> int:
    """Say why a job of a pool waits, and until when."""
    from instep.pool.pool_file import PoolFolder
    from instep.pool.view import explanation

    state = PoolFolder(Path(args.pool)).state()
    if args.job not in state.jobs:
        raise RunError(f"the pool has no job {args.job!r}. {near_miss(args.job, state.jobs)}")
    lines = explanation(state, state.jobs[args.job])
    if args.json:
        print(json.dumps({"job": args.job, "explanation": lines}))
        return 0
    for line in lines:
        say(line)
    return 0


explain_options = cancel_options


def list_jobs(args: argparse.Namespace) -> int:
    """The jobs of a pool."""
    from instep.pool.notice import notice_in
    from instep.pool.pool_file import PoolFolder
    from instep.pool.view import as_tables, host_lines, job_lines, pool_lines

    pool = PoolFolder(Path(args.pool))
    state, notice = pool.state(), notice_in(pool.folder)
    if args.json:
        if pool.scheduled and notice:
            say_aside(f"note    {notice}")
        print(json.dumps(as_tables(state)))
        return 0
    above = [*pool_lines(state, pool.scheduled, notice), *host_lines(state)]
    for line in [*above, *job_lines(state)]:
        say(line)
    return 0


def _add_pool(parser: Parser) -> None:
    text = "folder of the pool (default: %(default)s)"
    parser.add_argument(
        "--pool", nargs="?", const="pool", default="pool", metavar="FOLDER", help=text
    )


def _where(args: argparse.Namespace) -> str:
    return "" if args.pool == "pool" else f" --pool {args.pool}"


def _start(args: argparse.Namespace, pool: object) -> int:
    from instep import detached
    from instep.pool.jobs import PoolSpec
    from instep.pool.pool_file import SPEC, PoolFolder, pool_of
    from instep.pool.pool_journal import FILE
    from instep.pool.serve import check_journal, check_listening

    assert isinstance(pool, PoolFolder)
    if pool.scheduled:
        raise _scheduled(pool)
    if args.file is not None:
        pool.make(pool_of(Path(args.file)))
    elif not (pool.folder / SPEC).exists():
        pool.make(PoolSpec())
    journal = pool.folder / FILE
    if journal.exists():
        check_journal(pool)
        check_listening(pool)
    words = ["pool", "--pool", str(pool.folder.resolve()), "serve"]
    started = detached.start(words, pool.lock, pool.log)
    deadline = time.monotonic() + START_S
    while started is not None and not journal.exists() and time.monotonic() < deadline:
        if started.poll() is not None:
            raise RunError(f"the scheduler has ended: {detached.last_words(pool.log)}")
        time.sleep(0.02)
    if args.json:
        print(json.dumps({"pool": str(pool.folder), "cores": pool.empty.cores}))
    else:
        say(f"pool    {pool.folder}: {pool.empty.cores} cores, runs in {pool.runs}")
        for name, command in pool.joining().items():
            say(f"host    {name}: {command}")
        say("next    instep submit job.toml")
    return 0


def _status(args: argparse.Namespace, pool: object) -> int:
    from instep.pool.notice import notice_in
    from instep.pool.pool_file import PoolFolder
    from instep.pool.view import status_table

    assert isinstance(pool, PoolFolder)
    if not args.json:
        return list_jobs(args)
    scheduled = pool.scheduled
    table = status_table(pool.state(), scheduled, notice_in(pool.folder) if scheduled else "")
    print(json.dumps(table))
    return 0


def _drain(args: argparse.Namespace, pool: object) -> int:
    from instep.pool.jobs import DrainAsked
    from instep.pool.pool_file import PoolFolder
    from instep.pool.requests import ask

    assert isinstance(pool, PoolFolder)
    hosts = pool.state().hosts
    if args.host not in hosts:
        what = near_miss(args.host, hosts) if hosts else "It has the cores of this machine alone."
        raise RunError(f"the pool has no host {args.host!r}. {what}")
    ask(pool.folder, DrainAsked(args.host, not args.undo))
    if args.json:
        print(json.dumps({"host": args.host, "drained": not args.undo}))
    else:
        after = "works again" if args.undo else "gives its workers to others, at commits"
        say(f"drain   {args.host} {after}")
        say("next    instep pool status")
    return 0


def _scheduled(pool: PoolFolder) -> RunError:
    return RunError(f"the pool in {pool.folder} has a scheduler already: instep pool status")


def _stop(args: argparse.Namespace, pool: object) -> int:
    from instep import detached
    from instep.pool.pool_file import PoolFolder

    assert isinstance(pool, PoolFolder)
    held = pool.state().held
    detached.interrupt_it(pool.lock)
    deadline = time.monotonic() + START_S
    while pool.scheduled and time.monotonic() < deadline:
        time.sleep(0.02)
    if pool.scheduled:
        raise RunError(f"the scheduler does not end: see {pool.log}")
    if args.json:
        print(json.dumps({"pool": str(pool.folder), "held": held}))
    else:
        say(f"pool    has no scheduler now; runs with {held} workers go on")
    return 0


def _serve(args: argparse.Namespace, pool: object) -> int:
    from instep import detached
    from instep.pool.pool_file import PoolFolder
    from instep.pool.serve import serve

    assert isinstance(pool, PoolFolder)
    _ = pool.spec  # refuses a folder that is no pool
    with detached.holding(pool.lock) as alone:
        if not alone:
            raise _scheduled(pool)
        serve(pool)
    return 0


def _command(args: argparse.Namespace, pool: object) -> int:
    from instep.pool.commands.running import run_command
    from instep.pool.local_runs import LocalRuns
    from instep.pool.pool_file import PoolFolder

    assert isinstance(pool, PoolFolder)
    job = pool.state().jobs.get(args.job)
    if job is None or not job.command:
        raise RunError(f"the pool has no command {args.job!r}.")
    return run_command(job, LocalRuns(pool.jobs, pool.runs).ending(job))


_ACTIONS = {
    "start": _start,
    "status": _status,
    "drain": _drain,
    "stop": _stop,
    "serve": _serve,
    "command": _command,
}
