"""The command line: parse, call, print. `--help` answers without importing torch.

Progress goes to standard error. Standard output gets the result: a few lines,
or with `--json` one JSON object as its last line. Exit codes are those of
`errors.py`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from instep import __version__
from instep.errors import (
    INTERRUPTED,
    CheckpointError,
    InstepError,
    RecipeError,
    RunError,
    SpecError,
    near_miss,
)

if TYPE_CHECKING:
    from instep.client.submit import Run
    from instep.lab.verdict import Verdict
    from instep.spec import JobSpec
    from instep.store.run_folder import RunFolder


def run(args: argparse.Namespace) -> int:
    """Train a job on worker processes, and write a report."""
    from instep import spec_file
    from instep.client.submit import run_job
    from instep.system.processes import started_at

    overrides = _overrides(args)
    if args.name is not None:
        overrides.append(f'name="{args.name}"')
    if args.strict:
        overrides.append("check.strict=true")
    if Path(args.job).suffix == ".py":
        from instep.client.script import load_script

        job = load_script(Path(args.job), args.argv, overrides)
    elif args.argv:
        raise SpecError(
            f"{args.argv[0]!r}: a job file takes no arguments after --; they go to a script. Use "
            "--set arguments.key=value."
        )
    else:
        job = spec_file.load(Path(args.job), overrides)
    if args.check_determinism:
        return _check_determinism(job, args)
    if job.launch.launcher == "slurm":
        from instep.launch.slurm_cluster import allocation

        if not allocation():
            return _submit(job, args)
    done = run_job(
        job,
        Path(args.runs),
        named=args.name is not None,
        started=started_at(),
        json_output=args.json,
    )
    return _print_ending(done, args)


def _submit(job: JobSpec, args: argparse.Namespace) -> int:
    """Have Slurm run a job, and show how it goes."""
    from instep.client.batch import follow, submit

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    runs = Path(args.runs)
    return follow(
        submit(job, runs, named=args.name is not None, json_output=args.json, say=say), say
    )


def _overrides(args: argparse.Namespace) -> list[str]:
    workers = [] if args.workers is None else [f"workers={args.workers}"]
    on = [] if args.on is None else [f'launch.on="{args.on}"']
    address = args.ray_address
    ray = [] if address is None else [f'launch.options.ray_address="{address}"']
    return [*args.set, *workers, *on, *ray]


def _check_determinism(job: JobSpec, args: argparse.Namespace) -> int:
    """Print whether the job gives the same bits on two numbers of workers."""
    from instep.lab.determinism import check_determinism, lines

    compared = check_determinism(job, lambda text: print(text, file=sys.stderr))
    for line in lines(compared):
        print(line, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        found = compared.difference
        answer = {**compared._asdict(), "difference": found._asdict() if found else None}
        print(json.dumps({"deterministic": found is None, **answer}))
    return 0 if compared.difference is None else RecipeError.exit_code


def resume(args: argparse.Namespace) -> int:
    """Continue a stopped or failed run from its newest checkpoint, on any number of workers."""
    from instep.client.submit import resume_run
    from instep.system.processes import started_at

    done = resume_run(Path(args.run), _overrides(args), started=started_at(), json_output=args.json)
    return _print_ending(done, args)


def scale(args: argparse.Namespace) -> int:
    """Change the number of workers of a running job."""
    from instep.client.running import scale
    from instep.store.run_folder import RunFolder
    from instep.words import plural

    scale(Path(args.run), args.workers)
    if args.json:
        print(json.dumps({"run": args.run, "workers": args.workers}))
    else:
        servers = RunFolder(Path(args.run)).servers_at_the_end
        stay = f"; the {plural(servers, 'server')} stay" if servers else ""
        print(f"{plural(args.workers, 'worker')} from one of the next steps on{stay}")
        print(f"next    instep report {args.run}")
    return 0


def join_run(args: argparse.Namespace) -> int:
    """Add the nodes of this Slurm job to a running job of another one."""
    from instep.client.join_run import join_run

    hosts = join_run(
        Path(args.run),
        args.workers,
        lambda text: print(f"join    {text}", file=sys.stderr, flush=True),
    )
    if args.json:
        print(json.dumps({"run": args.run, "hosts": hosts}))
    return 0


def _print_ending(done: Run, args: argparse.Namespace) -> int:
    """Print how a run ended, and return its exit code."""
    from instep.report.terminal.closing import closing_lines
    from instep.store.run_folder import RunFolder

    for line in closing_lines(done.summary, RunFolder(done.path)):
        print(line, file=sys.stderr if args.json else sys.stdout)
    if args.json:
        print(json.dumps(done.summary))
    return done.exit_code


def host(args: argparse.Namespace) -> int:
    """Let this machine join a run whose job file has [cluster], and work for it."""
    from instep.comm.channel import Address
    from instep.launch.joining import Machine
    from instep.units import host_and_port

    try:
        master = Address(*host_and_port(args.join))
    except ValueError:
        raise SpecError(
            f"--join {args.join!r}: needs a machine and a port, such as node1:2220."
        ) from None
    machine = Machine(
        master,
        Path(args.token_file).absolute(),
        lambda text: print(f"host    {text}", file=sys.stderr, flush=True),
    )
    runs = machine.serve(stay=args.stay)
    if args.json:
        print(json.dumps({"runs": runs}))
    elif runs:
        print(f"host    the run is over; its report is on {master.host}")
    else:
        print("host    the run ended before it began")
    return 0


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
        print(f"token   {file}")
    if not made:
        print("token   none is needed; --renew makes another")
    print(f'next    [cluster] certificates = "{args.folder}", and instep run JOB')
    return 0


def report(args: argparse.Namespace) -> int:
    """Write the report of a run again, or compare two runs."""
    from instep.report.figures.summary import summarise
    from instep.report.page.page import write_report
    from instep.report.terminal.closing import closing_lines
    from instep.state.export import check_page, writing_to
    from instep.store.run_folder import RunFolder

    folder = RunFolder(Path(args.run))
    other = RunFolder(Path(args.other)) if args.other else None
    for each in (folder, other):
        if each is not None and not each.last_step and not each.failures:
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
        print(line)
    if path.name != "report.html" or args.to:
        print(f"report  {path}")
    return 0


def compare(args: argparse.Namespace) -> int:
    """Run a job and alternatives to it in turns, and say which pays, by how much."""
    from instep.lab.alternatives import alternatives_of
    from instep.lab.compare import Hosts, compare

    found = compare(
        alternatives_of(Path(args.job), _overrides(args), args.changes),
        Path(args.runs),
        lambda text: print(text, file=sys.stderr, flush=True),
        repeats=args.repeats,
        hosts=Hosts(args.hosts, args.rate),
    )
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        print(line)
    return found.exit_code


def audit(args: argparse.Namespace) -> int:
    """Check in a run's ledger that every sample was used exactly once in every epoch."""
    from instep.report.figures.proof import prove
    from instep.store.run_folder import RunFolder

    run = RunFolder(Path(args.run))
    proof, contents = prove(run), None
    if args.content is not None:
        from instep.lab.contents import compare

        contents = compare(run, _how_many(args.content))
    if args.json:
        more = {"content": contents.as_table()} if contents else {}
        print(json.dumps({**proof.as_table(), **more}))
    else:
        *lines, next_ = proof.lines()
        for line in [*lines, *(contents.lines() if contents else []), next_]:
            print(line)
    for each in (proof, contents):
        if each is not None and not each.exact:
            raise RunError(each.fault)
    return 0


def netlab(args: argparse.Namespace) -> int:
    """Emulate hosts on this machine: a network with links to slow, cut and heal (Linux, root)."""
    from instep.lab.netlab_shell import ACTIONS

    answer = ACTIONS[args.action](args)
    if isinstance(answer, int):
        return answer
    if args.json:
        print(json.dumps(answer))
    return 0


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

    to = _safetensors(args.to) if args.to is not None else None
    run = RunFolder(Path(args.run))
    found = again(run, args.step, lambda text: print(text, file=sys.stderr), to=to)
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        print(line)
    if not found.same:
        raise RunError(found.fault)
    return 0


def chaos(args: argparse.Namespace) -> int:
    """Break a run on purpose, and check that its result is the same."""
    from instep.errors import WorkerError

    found = _broken(args, lambda text: print(text, file=sys.stderr, flush=True))
    for line in [json.dumps(found.as_table())] if args.json else found.lines():
        print(line)
    if not found.holds:
        raise WorkerError(f"{found.run.path} does not hold: {'; '.join(found.faults)}.")
    return 0


def _broken(args: argparse.Namespace, say: Callable[[str], None]) -> Verdict:
    """Break a job that is run twice, a run that is repeated, or a run that is running."""
    from instep import spec_file
    from instep.lab.breaker import Plan
    from instep.lab.chaos import break_again, break_job, break_running, is_running
    from instep.lab.injections import check_numbers, check_roles
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
    overrides = _overrides(args)
    if not target.is_dir():
        return break_job(spec_file.load(target, overrides), runs or Path("runs"), plan, say)
    run = RunFolder(target)
    if overrides:
        raise SpecError(
            f"{overrides[0]}: the job of the run {target} cannot change. Give a job file instead."
        )
    if is_running(target):
        return break_running(run, plan, say)
    return break_again(run, runs or target.resolve().parent, plan, say)


def export(args: argparse.Namespace) -> int:
    """Copy the model of a run into a file or a Hugging Face folder, or its LoRA adapter."""
    from instep.state.export import check_target, choose, writing_to
    from instep.state.hugging_face import copy_config
    from instep.state.retention import Best
    from instep.store.run_folder import RunFolder

    folder, to = RunFolder(Path(args.run)), Path(args.to)
    if (args.adapter or args.merged) and not folder.spec.lora.modules:
        raise SpecError(
            f"{'--adapter' if args.adapter else '--merged'}: {args.run} was trained without LoRA. "
            "Leave it out to export the model."
        )
    a_file = args.adapter or args.to.endswith(".safetensors")
    config = None if a_file else _config(args.to, folder.path)
    target = to if config is None else to / "model.safetensors"
    check_target(target, folder.path, folder.spec.start.model)
    model = Path(args.run) / "model.safetensors"
    kept = None
    if args.best or args.step is not None:
        best = replace(Best.by(folder.spec.checkpoint), count=1)
        kept = choose(Path(args.run) / "checkpoints", step=args.step, best=best)
    elif not model.is_file():
        raise RunError(
            f"{args.run} has no model: the run is {folder.outcome}. If it kept a checkpoint, "
            "--step or --best exports its model."
        )
    with writing_to(target):
        hugging_face = config is not None
        if kept is not None:
            size = _write_model(kept / model.name, target, folder, args.adapter, hugging_face)
        else:
            size = _write_own(model, target, folder, args.adapter, hugging_face)
        if config is not None:
            copy_config(folder.path, to)
    what = "adapter" if args.adapter else "model"
    if args.json:
        source = str(kept) if kept else str(model)
        print(json.dumps({what: str(to), "size_bytes": size, "from": source}))
        return 0
    print(f"{what:6} {to}")
    if kept is not None:
        print(f"from   {kept}")
    if args.adapter:
        print(f"next   peft.PeftModel.from_pretrained(model, {str(to)!r})")
    elif config is None:
        print(f"next   safetensors.torch.load_file({str(to)!r})")
    else:
        print(f"next   transformers.{config['architectures'][0]}.from_pretrained({str(to)!r})")
    return 0


def predict(args: argparse.Namespace) -> int:
    """Predict a dataset with the model of a run or a file, each sample once and in order."""
    from instep.client.predict import predict as all_of

    done = all_of(
        Path(args.of),
        args.data,
        Path(args.out),
        lambda text: print(text, file=sys.stderr, flush=True),
        recipe=args.recipe,
        workers=args.workers,
        batch=args.batch,
        overrides=args.set,
    )
    for line in [json.dumps(done.as_table())] if args.json else done.lines():
        print(line)
    return INTERRUPTED if done.published is None else 0


def _config(name: str, run: Path) -> dict[str, Any]:
    """The configuration of a run's model, for a folder that has this name.

    Raises:
        SpecError: the run's model has none, or the name is that of a file.
    """
    from instep.state.hugging_face import kept_config

    config = kept_config(run)
    if (
        config is None
        or Path(name).suffix in (".pt", ".pth", ".bin", ".ckpt")
        or (Path(name).is_file())
    ):
        raise SpecError(
            f"--to {name!r}: the file's name needs to end in .safetensors. The name of a folder "
            "exports a Hugging Face model with its configuration, for from_pretrained."
        )
    return config


def _write_model(
    model: Path, target: Path, folder: RunFolder, adapter: bool, hugging_face: bool
) -> int:
    """Write a model of a run: copied; or of LoRA, merged or the adapter alone. Returns its size."""
    import tempfile

    from instep.state.export import copy_model, copy_own

    lora, of_checkpoint = folder.spec.lora, model.parent != folder.path
    if lora.modules:
        from instep.state.adapter import write_adapter, write_merged

        with tempfile.TemporaryDirectory(dir=target.parent) as place:
            if of_checkpoint and not model.is_file():  # ranks of a mesh have written it in parts
                whole = Path(place) / model.name
                copy_model(model.parent, whole)
                model = whole
            if adapter:
                return write_adapter(model, target, lora, folder.spec.start.model)
            return write_merged(model, target, lora, {"format": "pt"} if hugging_face else {})
    if of_checkpoint:
        return copy_model(model.parent, target, with_format=hugging_face)
    copy_own(model, target)
    return target.stat().st_size


def _write_own(
    model: Path, target: Path, folder: RunFolder, adapter: bool, hugging_face: bool
) -> int:
    """The same of a run's end; if it is damaged, name the checkpoint with the same model."""
    from instep.state.manifest import published
    from instep.words import command

    try:
        return _write_model(model, target, folder, adapter, hugging_face)
    except CheckpointError as error:
        step = folder.last("model_saved").get("step")
        if step not in [kept for kept, _ in published(folder.path / "checkpoints")]:
            raise
        option = " --adapter" if adapter else ""
        again = f"--step {step}{option} --to {shlex.quote(str(target))}"
        again = command("export", folder.path, again)
        raise CheckpointError(f"{error} Its checkpoint has the same model: {again}") from None


def _safetensors(name: str) -> Path:
    if not name.endswith(".safetensors"):
        raise SpecError(f"--to {name!r}: the file's name needs to end in .safetensors.")
    return Path(name)


class _Parser(argparse.ArgumentParser):
    """Answers a wrong word with the nearest one, and with our own error and exit code."""

    def error(self, message: str) -> NoReturn:
        prefix = "argument command: invalid choice: "
        if message.startswith(prefix):
            given = message.removeprefix(prefix).split("'")[1]
            raise SpecError(f"there is no command {given!r}. {near_miss(given, COMMANDS)}")
        raise SpecError(f"{message}. See {self.prog} --help.")


COMMANDS = {
    "run": run,
    "resume": resume,
    "scale": scale,
    "join-run": join_run,
    "host": host,
    "certificates": certificates,
    "report": report,
    "compare": compare,
    "audit": audit,
    "replay": replay,
    "chaos": chaos,
    "export": export,
    "predict": predict,
    "netlab": netlab,
}


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="instep",
        description="Train any PyTorch model across whatever machines there are, "
        "with the result of one machine.",
        epilog="Exit codes: 0 done, 2 wrong job or command, 3 recipe, 4 data, 5 a worker failed, "
        "6 run folder, 7 checkpoint, 8 the loss was no finite number, 9 a machine may not join, "
        "130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"instep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    run = _command(commands, "run")
    run.epilog = (
        "With --on slurm outside an allocation, the job is submitted and followed. Ctrl-C stops "
        "following and leaves it alone; scancel cancels it."
    )
    add = run.add_argument
    add("job", help="job file, TOML; or a script that calls instep.join")
    _add_changes(add)
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
    add("--name", help="name of the run and its folder (default: the job's, numbered)")
    add("--runs", default="runs", help="folder of run folders (default: %(default)s)")

    add = _command(commands, "resume").add_argument
    add("run", help="run folder")
    _add_changes(add)

    add = _command(commands, "scale").add_argument
    add("run", help="folder of a running job")
    add("--workers", type=int, required=True, metavar="N", help="new number of workers")

    add = _command(commands, "join-run").add_argument
    add("run", help="folder of a running job that is on Slurm")
    text = "how many more workers the run has meanwhile (default: one for each task of this job)"
    add("--workers", type=int, metavar="N", help=text)

    add = _command(commands, "host").add_argument
    text = "where the machine of `instep run` listens: cluster.master of the job"
    add("--join", required=True, metavar="ADDRESS", help=text)
    text = "its token, as `instep run` or `instep certificates` wrote it; works once"
    add("--token-file", required=True, metavar="FILE", help=text)
    add("--stay", action="store_true", help="stay for the next run, until it is interrupted")

    add = _command(commands, "certificates").add_argument
    add("folder", help="cluster.certificates of the job; made if it is not there")
    add("--hosts", type=int, required=True, metavar="N", help="how many machines are to join")
    add("--lasts", default="24h", metavar="TIME", help="of new tokens (default: %(default)s)")
    text = "a new token for this host; shuts out what joined with the one before"
    add("--renew", type=int, action="append", default=[], metavar="HOST", help=text)

    add = _command(commands, "report").add_argument
    add("run", help="run folder")
    add("other", nargs="?", help="a second run folder, to compare with the first")
    add("--to", metavar="FILE.html", help="file to write (default: in the run folder)")

    add = _command(commands, "compare").add_argument
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
    _add_changes(add)

    add = _command(commands, "audit").add_argument
    add("run", help="run folder; the run may still be running")
    add(
        "--content",
        nargs="?",
        const="all",
        metavar="N",
        help="also compare samples as training got them with a plain read of the dataset: N of "
        "the recorded ones, or all",
    )

    add = _command(commands, "replay").add_argument
    add("run", help="run folder; the run may still be running")
    add("--step", type=int, required=True, metavar="N", help="the step; counts from 1")
    add("--to", metavar="FILE.safetensors", help="write the model after that step")

    add = _command(commands, "chaos").add_argument
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
    _add_changes(add)

    export = _command(commands, "export")
    export.add_argument("run", help="run folder")
    to = "file to write; of a Hugging Face model, or with --adapter, a folder"
    export.add_argument("--to", required=True, metavar="FILE.safetensors", help=to)
    add = export.add_mutually_exclusive_group().add_argument
    merged = "of a run with LoRA: the whole model, adapters added to its weights (default)"
    add("--merged", action="store_true", help=merged)
    add("--adapter", action="store_true", help="of a run with LoRA: the adapter, for peft")
    add = export.add_mutually_exclusive_group().add_argument
    add("--best", action="store_true", help="from the kept checkpoint with the best validation")
    add("--step", type=int, metavar="N", help="from the kept checkpoint of this step")

    add = _command(commands, "predict").add_argument
    add("of", metavar="RUN|FILE", help="run folder; or model file, safetensors")
    text = "function that returns the dataset: the recipe's form of samples, or inputs alone"
    add("--data", required=True, metavar="FILE.py:FUNCTION", help=text)
    text = "recipe that builds the model; needed for a model file"
    add("--recipe", metavar="FILE.py:FUNCTION", help=text)
    text = "file to write: .safetensors, .npz or .jsonl (default: %(default)s)"
    add("--out", default="predictions.safetensors", metavar="FILE", help=text)
    text = "samples of a batch (default: as in a validation of the job)"
    add("--batch", type=int, metavar="N", help=text)
    add("--workers", type=int, metavar="N", help="number of worker processes")
    text = "change a value of the job; may be repeated"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)

    _add_netlab(commands)
    return parser


def _add_netlab(commands: argparse._SubParsersAction[_Parser]) -> None:
    netlab = _command(commands, "netlab")
    text = "number K of the network, if there are several (netlab-K-...)"
    netlab.add_argument("--network", type=int, metavar="K", help=text)
    actions = netlab.add_subparsers(dest="action", metavar="action", required=True)

    def action(name: str, text: str) -> Callable[..., Any]:
        made: _Parser = actions.add_parser(name, help=text, description=text)
        made.set_defaults(parser=made)
        return made.add_argument

    add = action("up", "make a network, and keep it until Ctrl-C")
    add("--hosts", type=int, default=3, metavar="N", help="how many (default: %(default)s)")
    add("--rate", metavar="RATE", help="of each link, each way, such as 100mbit")
    add = action("run", "run a command in a host")
    add("host", help="h1, h2, ... or outside")
    add("words", nargs="+", metavar="COMMAND", help="after --, with its arguments")
    add = action("partition", "let packets pass only inside groups of hosts")
    add("groups", nargs="+", metavar="HOST,HOST", help="such as h1,h2 h3,outside")
    action("cut", "cut hosts off from all others")("hosts", nargs="+", metavar="HOST")
    action("heal", "undo partitions and cuts")
    add = action("slow", "set the rate of a host's link")
    add("host", help="h1, h2, ... or outside")
    add("rate", help="such as 10mbit; none: no limit")
    action("traffic", "what each host has sent and received")
    action("list", "the networks on this machine")
    add = action("clean", "remove networks whose creator has ended, and the processes in them")
    add("--living", action="store_true", help="also those of living creators")


def _add_changes(add: Callable[..., Any]) -> None:
    add("--workers", help="number of worker processes")
    text = "what starts the processes: local, hosts, or a cluster (default: as the job says)"
    add("--on", metavar="LAUNCHER", help=text)
    text = "head node of the Ray cluster, with --on ray (default: RAY_ADDRESS, or start one)"
    add("--ray-address", metavar="HOST:PORT", help=text)
    text = "change a value of the job; may be repeated"
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=text)


def _command(commands: argparse._SubParsersAction[_Parser], name: str) -> _Parser:
    text = COMMANDS[name].__doc__
    command: _Parser = commands.add_parser(name, help=text, description=text)
    text = "print one JSON object as the last line of standard output"
    command.add_argument("--json", action="store_true", help=text)
    command.set_defaults(call=COMMANDS[name], parser=command)
    return command


def _parsed(argv: Sequence[str]) -> argparse.Namespace:
    passed: list[str] = []
    if argv[:1] == ["run"] and "--" in argv:  # what follows is the script's
        at = argv.index("--")
        argv, passed = argv[:at], [*argv[at + 1 :]]
    args, unknown = _parser().parse_known_args(argv)
    args.argv = passed
    options = [word for word in unknown if word.startswith("--")]
    if options:
        raise SpecError(_no_such_option(options[0], argv, args.parser))
    if unknown:
        raise SpecError(
            f"unrecognized arguments: {' '.join(unknown)}. See {args.parser.prog} --help."
        )
    return args


def _no_such_option(word: str, argv: Sequence[str], parser: argparse.ArgumentParser) -> str:
    """What to write instead: an option of this command, or a key of the job file."""
    from instep.spec_file import keys_by_name

    given, _, value = word.partition("=")
    options = sorted(o for o in parser._option_string_actions if o.startswith("--"))
    meant = {option: option for option in options}
    if "--set" in meant:
        after = argv[list(argv).index(word) + 1 :]
        value = value or next((v for v in after[:1] if not v.startswith("--")), "...")
        for name, key in keys_by_name().items():
            meant.setdefault(f"--{name.replace('_', '-')}", f"--set {key}={value}")
    close = get_close_matches(given.replace("_", "-"), meant, n=1, cutoff=0.75)
    guess = f"Did you mean '{meant[close[0]]}'? " if close else ""
    return f"there is no option {given}. {guess}Known to {parser.prog}: {', '.join(options)}."


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; our own errors print as one line."""
    try:
        args = _parsed(sys.argv[1:] if argv is None else argv)
        return int(args.call(args))
    except InstepError as error:
        from instep.words import fit_to_print

        print(f"instep: {fit_to_print(str(error))}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has stopped
        return 1
    except OSError as error:
        if _is_of_print(error):
            print(f"instep: the answer cannot be written: {error.strerror}.", file=sys.stderr)
            return 1
        what = error.filename or "a file or connection"
        print(f"instep: {what} cannot be used: {error.strerror or error}.", file=sys.stderr)
        return RunError.exit_code


def _is_of_print(error: OSError) -> bool:
    """Whether printing a result raised it, here, and not what a command did."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    here = trace is not None and trace.tb_frame.f_code.co_filename == __file__
    return here and error.filename is None


def run_main() -> NoReturn:
    """The `instep` program; Ctrl-C ends it with one line, at any moment."""
    try:
        code = main()
    except KeyboardInterrupt:
        print("instep: interrupted.", file=sys.stderr)
        code = INTERRUPTED
    sys.exit(code)
