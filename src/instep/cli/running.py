"""The commands that train a job, and change a running one."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from instep.cli.parsing import Parser, add_changes, add_job, number, overrides_of, say_left_out
from instep.cli.saying import say, say_aside
from instep.errors import RecipeError, SpecError

if TYPE_CHECKING:
    from instep.client.submit import Run
    from instep.job.spec import JobSpec


def run(args: argparse.Namespace) -> int:
    """Train a job on worker processes, and write a report."""
    from instep.client.submit import run_job
    from instep.job import file as spec_file
    from instep.job.planned import AUTO
    from instep.system.processes import started_at

    auto = args.workers == AUTO
    if auto:
        args.workers = None
    overrides = overrides_of(args)
    if args.name is not None:
        overrides.append(f'name="{args.name}"')
    if args.strict:
        overrides.append("check.strict=true")
    if args.folds is not None:
        overrides.append(f"data.folds={args.folds}")
    elif args.resume:
        raise SpecError("--resume is for --folds. To continue one run: instep resume RUN")
    if Path(args.job).suffix == ".py":
        from instep.client.join.script import load_script

        job = load_script(Path(args.job), args.argv, overrides, say_left_out)
    elif args.argv:
        raise SpecError(
            f"{args.argv[0]!r}: a job file takes no arguments after --; they go to a script. Use "
            "--set arguments.key=value."
        )
    else:
        auto = auto or spec_file.asks_for_plan(Path(args.job), overrides)
        job = spec_file.load(Path(args.job), overrides, say=say_left_out, planned=auto)
    if auto:
        return _run_planned(job, args)
    if args.check_determinism:
        return _check_determinism(job, args)
    if job.launch.launcher == "slurm":
        from instep.launch.slurm_cluster import allocation

        if not allocation():
            return _submit(job, args)
    with _shown(args):
        if args.folds is not None:
            return _run_folds(job, args)
        done = run_job(
            job,
            Path(args.runs),
            named=args.name is not None,
            started=started_at(),
            json_output=args.json,
        )
    return _print_ending(done, args)


@contextmanager
def _shown(args: argparse.Namespace) -> Iterator[None]:
    """With --dashboard, show the runs in the browser for as long as the context lasts."""
    if not args.dashboard:
        yield
        return
    from instep.dashboard.serve import beside

    with beside(Path(args.runs), lambda link: say_aside(f"open    {link}")):
        yield


def _run_planned(job: JobSpec, args: argparse.Namespace) -> int:
    """Plan, and train on the workers that are fastest."""
    import msgspec

    from instep.client.results import as_planned
    from instep.client.submit import run_job
    from instep.lab.plan.auto import planned_workers
    from instep.lab.plan.plan import Question

    if args.folds is not None or args.check_determinism or Path(args.job).suffix == ".py":
        raise SpecError(
            "workers = 'auto' is for one run of a recipe. Give the number of workers, which "
            "`instep plan` finds."
        )
    found = planned_workers(
        job, Question(runs=Path(args.runs)), lambda text: say_aside(f"plan    {text} ...")
    )
    say_aside(f"plan    {found.text}")
    job = msgspec.structs.replace(job, workers=found.workers)
    with _shown(args), as_planned(found.planned):
        done = run_job(job, Path(args.runs), named=args.name is not None, json_output=args.json)
    return _print_ending(done, args)


def run_options(parser: Parser) -> None:
    """Options of `instep run`."""
    parser.epilog = (
        "With --on slurm outside an allocation, the job is submitted and followed. Ctrl-C stops "
        "following and leaves it alone; scancel cancels it."
    )
    add_job(parser)
    add = parser.add_argument
    add(
        "--check-determinism",
        action="store_true",
        help="only train a few steps on two numbers of workers, and compare the bits",
    )
    add(
        "--strict",
        action="store_true",
        help="refuse to train unless the result is known to be that of one machine",
    )
    text = "train N folds of data.split in turn, and print mean and deviation of their metrics"
    add("--folds", type=int, metavar="N", help=text)
    add("--resume", action="store_true", help="with --folds: continue those that were interrupted")
    add("--name", help="name of the run and its folder (default: the job's, numbered)")
    add("--runs", default="runs", help="folder of run folders (default: %(default)s)")
    add("--dashboard", action="store_true", help="show it in the browser too; prints a link")


def _submit(job: JobSpec, args: argparse.Namespace) -> int:
    """Have Slurm run a job, and show how it goes."""
    if args.folds is not None:
        raise SpecError(
            "--folds with --on slurm needs an allocation: run the same command inside one (salloc, "
            "or a batch script of yours)."
        )
    from instep.client.batch import follow, submit

    def say(text: str) -> None:
        say_aside(text)

    runs = Path(args.runs)
    return follow(
        submit(job, runs, named=args.name is not None, json_output=args.json, say=say), say
    )


def _run_folds(job: JobSpec, args: argparse.Namespace) -> int:
    """Train each fold, and print what came of them."""
    from instep.client.folds import run_folds

    done = run_folds(
        job,
        Path(args.runs),
        say_aside,
        named=args.name is not None,
        resume=args.resume,
        json_output=args.json,
    )
    for line in done.lines():
        say(line, aside=args.json)
    if args.json:
        print(json.dumps(done.as_table()))
    return done.exit_code


def _check_determinism(job: JobSpec, args: argparse.Namespace) -> int:
    """Print whether the job gives the same bits on two numbers of workers."""
    from instep.lab.determinism import check_determinism, lines

    compared = check_determinism(job, say_aside)
    for line in lines(compared):
        say(line, aside=args.json)
    if args.json:
        found = compared.difference
        answer = {**compared._asdict(), "difference": found._asdict() if found else None}
        print(json.dumps({"deterministic": found is None, **answer}))
    return 0 if compared.difference is None else RecipeError.exit_code


def _print_ending(done: Run, args: argparse.Namespace) -> int:
    """Print how a run ended, and return its exit code."""
    from instep.report.terminal.closing import closing_lines
    from instep.store.run_folder import RunFolder

    for line in closing_lines(done.summary, RunFolder(done.path)):
        say(line, aside=args.json)
    if args.json:
        print(json.dumps(done.summary))
    return done.exit_code


def resume(args: argparse.Namespace) -> int:
    """Continue a stopped or failed run from its newest checkpoint, on any number of workers."""
    from instep.client.copying import folder_of
    from instep.client.submit import resume_run
    from instep.system.processes import started_at

    done = resume_run(
        folder_of(args.run, args.to, lambda text: say_aside(f"copies  {text}")),
        overrides_of(args),
        started=started_at(),
        json_output=args.json,
        say=say_left_out,
    )
    return _print_ending(done, args)


def resume_options(parser: Parser) -> None:
    """Options of `instep resume`."""
    add = parser.add_argument
    add("run", help="run folder; or the URL or folder of the copies of its checkpoints")
    add("--to", metavar="FOLDER", help="restore copies into this folder (default: runs/NAME)")
    add_changes(parser)


def scale(args: argparse.Namespace) -> int:
    """Change the number of workers of a running job."""
    from instep.client.running import scale
    from instep.store.run_folder import RunFolder
    from instep.words import plural

    scale(Path(args.run), args.workers)
    if args.json:
        print(json.dumps({"run": args.run, "workers": args.workers}))
    else:
        servers = RunFolder(Path(args.run)).members.servers_at_the_end
        stay = f"; the {plural(servers, 'server')} stay" if servers else ""
        say(f"{plural(args.workers, 'worker')} from one of the next steps on{stay}")
        say(f"next    instep report {args.run}")
    return 0


def scale_options(parser: Parser) -> None:
    """Options of `instep scale`."""
    add = parser.add_argument
    add("run", help="folder of a running job")
    add("--workers", type=int, required=True, metavar="N", help="new number of workers")


def join_run(args: argparse.Namespace) -> int:
    """Add the nodes of this Slurm job to a running job of another one."""
    from instep.client.join_run import join_run

    hosts = join_run(
        Path(args.run),
        args.workers,
        lambda text: say_aside(f"join    {text}"),
    )
    if args.json:
        print(json.dumps({"run": args.run, "hosts": hosts}))
    return 0


def join_run_options(parser: Parser) -> None:
    """Options of `instep join-run`."""
    add = parser.add_argument
    add("run", help="folder of a running job that is on Slurm")
    text = "how many more workers the run has meanwhile (default: one for each task of this job)"
    add("--workers", type=int, metavar="N", help=text)


def host(args: argparse.Namespace) -> int:
    """Let this machine join a run whose job file has [cluster], or a pool, and work for it."""
    from instep.comm.protocol.channel import Address
    from instep.detached.warm import WarmStarts
    from instep.launch.joining import Machine
    from instep.pool.hosts.attending import Attendance
    from instep.system.processes import interrupt, on_signals
    from instep.units import host_and_port

    try:
        master = Address(*host_and_port(args.join))
    except ValueError:
        raise SpecError(f"--join {args.join!r}: needs machine:port, as node1:2220.") from None
    token_file = Path(args.token_file).absolute()
    attends = Attendance(token_file, WarmStarts)

    def tell(text: str) -> None:
        say_aside(f"host    {text}")

    machine = Machine(master, token_file, tell, attends if args.stay else None, args.wait)
    if args.stay:
        attends.listen()
    with closing(attends), on_signals(interrupt):
        runs = machine.serve(stay=args.stay)
    if args.json:
        print(json.dumps({"runs": runs}))
    else:
        ended = f"the run is over; its report is on {master.host}"
        say(f"host    {ended if runs else 'it ended before anything began'}")
    return 0


def host_options(parser: Parser) -> None:
    """Options of `instep host`."""
    add = parser.add_argument
    text = "where it listens: cluster.master of the job, or listen of the pool"
    add("--join", required=True, metavar="ADDRESS", help=text)
    text = "its token, as the run, the pool or `instep certificates` wrote it; works once"
    add("--token-file", required=True, metavar="FILE", help=text)
    text = "stay for the next run, until it is interrupted; needed in a pool"
    add("--stay", action="store_true", help=text)
    text, whole = "end if there is no run after so many seconds (default: wait)", float("inf")
    add("--wait", type=number("seconds", 0, whole), default=whole, metavar="S", help=text)


def certificates(args: argparse.Namespace) -> int:
    """Make a run's own authority, and a token for each machine that is to join."""
    from instep.launch.join_folder import JoinFolder
    from instep.units import seconds_in

    if args.hosts < 1:
        raise SpecError(f"--hosts {args.hosts}: needs at least one machine.")
    for host in args.renew:
        if not 0 <= host < args.hosts:
            known = f"hosts are counted from 0, and --hosts is {args.hosts}"
            raise SpecError(f"--renew {host}: {known}.")
    try:
        lasts_s = seconds_in(args.lasts)
    except ValueError as error:
        raise SpecError(f"--lasts: {error}. Give one, such as 24h.") from None
    folder = JoinFolder(Path(args.folder))
    made = [str(folder.token_file(n)) for n in folder.prepare(args.hosts, lasts_s, args.renew)]
    if args.json:
        print(json.dumps({"folder": args.folder, "tokens": made}))
        return 0
    for file in made:
        say(f"token   {file}")
    if not made:
        say("token   none is needed; --renew makes another")
    say(f'next    [cluster] certificates = "{args.folder}", and instep run JOB')
    return 0


def certificates_options(parser: Parser) -> None:
    """Options of `instep certificates`."""
    add = parser.add_argument
    add("folder", help="cluster.certificates of the job; made if it is not there")
    add("--hosts", type=int, required=True, metavar="N", help="how many machines are to join")
    add("--lasts", default="24h", metavar="TIME", help="of new tokens (default: %(default)s)")
    text = "a new token for this host; shuts out what joined with the one before"
    add("--renew", type=int, action="append", default=[], metavar="HOST", help=text)
