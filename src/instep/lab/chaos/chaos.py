"""Breaks a run on purpose and has it judged: `instep chaos`.

A job is run twice, once undisturbed and once broken; a run that has ended is repeated and
broken; a running job is broken as it is. `breaker.py` carries out the injections,
`verdict.py` judges. Nothing here imports torch.
Way in: `break_job`, `break_again`, `break_running`.
"""

from __future__ import annotations

import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil

from instep.client.job_checks import check_job
from instep.client.join.script import MAIN
from instep.client.submit import run_job
from instep.errors import INTERRUPTED, RunError, SpecError, WorkerError, raise_first
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.chaos.breaker import Breaker, Plan, Say
from instep.lab.chaos.injections import Injection, check_long_enough, draw
from instep.lab.chaos.partitions import check_can_partition, on_emulated_hosts
from instep.lab.chaos.run_processes import roles_of
from instep.lab.chaos.verdict import Verdict, judge
from instep.lab.replay import changes_since, stretches
from instep.lab.temporary_runs import Progress, folder_for_runs, unlogged
from instep.privacy.refusals import repeated
from instep.store.folder import is_running, numbered
from instep.store.run_folder import RunFolder
from instep.system.processes import on_signals

STUCK_S = 120.0
"""Seconds without a step after which a run hangs, unless the undisturbed one took longer."""

GRACE_S = 15.0
"""How long a run may take to stop after each signal, before the next one; the last is SIGKILL."""

SUFFIXES = ("undisturbed", "disturbed")
"""Suffixes of the names of the two runs of a job."""


def break_job(job: JobSpec, runs: Path, plan: Plan, say: Say) -> Verdict:
    """Run a job undisturbed, then disturbed, and judge.

    Args:
        job: to run twice.
        runs: folder of run folders.
        plan: what to break.
        say: prints a line of progress.

    Raises:
        SpecError: the job is too short for so many injections.
        InstepError: the undisturbed run failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; every process was ended.
    """
    if plan.partitions:
        check_can_partition(job)
    check_job(job)
    raise_first(repeated(job, "instep chaos"))
    if job.train.steps and not plan.over_s and not job.recipe.endswith(f":{MAIN}"):
        check_long_enough(job.train.steps, plan.injections, _longer(job, plan))
    say("running the job undisturbed")
    done = run_job(_named(job, SUFFIXES[0]), runs, named=False, quiet=True, watch=Progress(say))
    if done.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return break_again(RunFolder(done.path), runs, plan, say, name=job.name)


def break_again(
    undisturbed: RunFolder, runs: Path, plan: Plan, say: Say, *, name: str = ""
) -> Verdict:
    """Run the job of an ended run again, disturbed, and judge it by comparison with that run.

    Args:
        undisturbed: a run that has ended.
        runs, plan, say: as for `break_job`.
        name: of the disturbed run, without its suffix; default: that of the ended run.

    Raises:
        SpecError: the job is too short for so many injections, or that run cannot be repeated.
        KeyboardInterrupt: as for `break_job`.
    """
    check_can_be_repeated(undisturbed)
    job = _repeated(undisturbed)
    if plan.partitions:
        check_can_partition(job)
    if not plan.over_s:
        check_long_enough(undisturbed.last_step, plan.injections, _longer(job, plan))
    for text in changes_since(undisturbed, undisturbed.last_step):
        say(f"note: {text}")
    injections = _drawn(plan, undisturbed)
    say(f"running the job again, with {plan.injections} faults")
    with ExitStack() as stack:
        plain, network = job, None
        if plan.partitions:
            job, network = stack.enter_context(on_emulated_hosts(job))
        check_job(job)
        program = stack.enter_context(_running(_named(job, SUFFIXES[1], name), runs))
        steps, limit_s = undisturbed.last_step, max(STUCK_S, undisturbed.times.seconds)
        breaker = Breaker(program.folder, injections, plan, say, steps=steps, network=network)
        breaker.serve(lambda: program.is_running and breaker.still_s < limit_s)
        program.check_began()
        stuck_s = breaker.still_s if program.is_running else 0.0
        program.stop()
        left = _outlived(breaker)
    if network is not None:  # the emulated hosts are gone: a resumed run is to do without them
        _rewrite_job(program.folder, plain)
    return _judged(program.folder, undisturbed, breaker, left=left, stuck_s=stuck_s)


def break_running(run: RunFolder, plan: Plan, say: Say) -> Verdict:
    """Break a running job, and judge how it recovered; it continues afterwards.

    Args:
        run: the run.
        plan, say: as for `break_job`.

    Raises:
        SpecError: too few of its steps are left, others started its processes, or partitions
            are asked for.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the run continues.
    """
    check_own(run)
    if plan.partitions:
        raise SpecError(
            f"--partitions {plan.partitions}: {run.path} is running, and a run can be put on "
            "emulated hosts only from its start. Give the job file, or leave --partitions out."
        )
    last = run.plan.steps or 0
    if not last and not plan.over_s:
        raise SpecError(f"the length of {run.path} is not known yet. Give --over SECONDS.")
    if not plan.over_s:
        left = last - run.last_step
        check_long_enough(left, plan.injections, "Give --over SECONDS, or ask for fewer.")
    breaker = Breaker(run.path, _drawn(plan, run), plan, say, begin=run.last_step, steps=last)
    with folder_for_runs("instep-chaos-"):
        breaker.serve(lambda: not breaker.settled and is_running(run.path))
    return _judged(run.path, None, breaker, going_on=is_running(run.path))


def check_own(run: RunFolder) -> None:
    """Refuse runs whose processes instep did not start, or that run on another machine.

    Raises:
        SpecError: says which.
    """
    if run.joined:
        raise SpecError(
            f"the processes of {run.path} called instep.join: they are not replaced, so a kill "
            "ends the run. instep chaos breaks runs that instep run started."
        )
    there, here = (run.last("run_started").get("host") or {}).get("name"), platform.node()
    if is_running(run.path) and there not in (None, here):
        raise SpecError(
            f"{run.path} is running on {there}, and this is {here}: its processes cannot be "
            "reached. Run instep chaos there."
        )


def check_can_be_repeated(run: RunFolder) -> None:
    """Refuse runs whose result the job alone does not reproduce.

    Raises:
        SpecError: says why not.
        RunError: it has not ended, or failed.
    """
    check_own(run)
    raise_first(repeated(run.spec, "instep chaos"))
    if run.outcome not in ("completed", "stopped") or not run.last_step:
        raise RunError(
            f"{run.path} is {run.outcome}: a disturbed run is compared with a completed one. "
            f"To complete it: {run.to_resume}"
        )
    trains = [stretch.job.train for stretch in stretches(run, 0, run.last_step)]
    if len({train.steps or train.passes for train in trains}) > 1:
        raise SpecError(
            f"{run.path} was resumed with another length, which one run from the beginning cannot "
            "reproduce. Give the job file instead."
        )


def _drawn(plan: Plan, run: RunFolder) -> list[Injection]:
    """What to break in a run like this one."""
    there = roles_of(run)
    if not there:
        raise SpecError(f"{run.path} has not logged a process yet. Try again in a moment.")
    if absent := [role for role in plan.roles if role not in there]:
        raise SpecError(
            f"--roles {','.join(plan.roles)}: {run.path} has no {absent[0]} process that could be "
            f"killed. It has: {', '.join(there)}."
        )
    return draw(plan.kills, plan.hangs, plan.roles or there, plan.seed, plan.partitions)


def _repeated(run: RunFolder) -> JobSpec:
    """The job that, run from the beginning, ends where that run did."""
    train, stop = run.spec.train, msgspec.structs.replace(run.spec.stop, time_limit=None)
    if run.outcome == "stopped":
        train = msgspec.structs.replace(train, stop_after_steps=run.last_step)
    return msgspec.structs.replace(run.spec, train=train, stop=stop)


def _named(job: JobSpec, suffix: str, name: str = "") -> JobSpec:
    plain = (name or job.name).removesuffix(f"-{SUFFIXES[0]}")
    return msgspec.structs.replace(unlogged(job), name=f"{plain}-{suffix}")


def _longer(job: JobSpec, plan: Plan) -> str:
    """How to make the job long enough."""
    if job.train.steps:
        return f"Lengthen it: --set train.steps={4 * plan.injections}"
    longer = f"--set train.epochs={4 * job.train.passes}, or more"
    if job.recipe.endswith(f":{MAIN}"):
        longer += " where the script loops over session.epochs()"
    return f"Lengthen it: {longer}; or ask for fewer."


def _judged(folder: Path, undisturbed: RunFolder | None, breaker: Breaker, **more: Any) -> Verdict:
    verdict = judge(RunFolder(folder), undisturbed, breaker.injected, breaker.falls, **more)
    breaker.write(verdict.as_table())
    return verdict


def _rewrite_job(folder: Path, plain: JobSpec) -> None:
    job = msgspec.structs.replace(plain, name=RunFolder(folder).spec.name)
    (folder / "job.toml").write_text(spec_file.dump(job), encoding="utf-8")


def _outlived(breaker: Breaker) -> list[int]:
    """Pids of a run that has ended which are still alive after a moment."""
    breaker.processes.update()
    for pid in breaker.processes.alive():
        with suppress(psutil.Error):
            psutil.Process(pid).wait(5.0)
    return breaker.processes.alive()


@contextmanager
def _running(job: JobSpec, runs: Path) -> Iterator[_Program]:
    """`instep run` as a program of its own; it ends with the context."""
    name = next(name for name in numbered(job.name) if not (runs / name).exists())
    with folder_for_runs("instep-chaos-") as place:
        file, errors = place / "job.toml", place / "errors"
        file.write_text(spec_file.dump(job), encoding="utf-8")
        command = ["run", str(file), "--runs", str(runs), "--name", name, "--json"]
        with errors.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "instep", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                start_new_session=True,  # Ctrl-C reaches only us; `stop` passes it on
            )
        program = _Program(process, (runs / name).resolve(), errors)
        try:
            yield program
        finally:
            program.stop()


class _Program:
    """A run in another process."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, errors: Path) -> None:
        self._process, self.folder, self._errors = process, folder, errors

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def check_began(self) -> None:
        """Refuse to judge a run that never began."""
        if not (self.folder / "events.jsonl").exists():
            why = self._errors.read_text(errors="replace").strip().rpartition("instep: ")[2]
            raise WorkerError(f"the disturbed run did not begin: {why}")

    def stop(self) -> None:
        """End the run, if it still runs: SIGTERM, SIGTERM again, SIGKILL."""
        with on_signals(signal.SIG_IGN):  # a second Ctrl-C would leave its processes behind
            for ask in (self._process.terminate, self._process.terminate, self._process.kill):
                if not self.is_running:
                    return
                ask()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
