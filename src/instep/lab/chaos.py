"""A run that is broken on purpose: who breaks it, and what is left to judge.

A job is run twice, once left alone and once broken; a run that has ended is
repeated; one that is going on is broken as it is. The breaking itself is
`breaker.py`'s, the verdict `lab/verdict.py`'s. Nothing here imports torch.
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

from instep import spec_file
from instep.client.submit import check_job, run_job
from instep.errors import INTERRUPTED, RunError, SpecError, WorkerError
from instep.lab.breaker import Breaker, Plan, Say
from instep.lab.injections import Injection, check_long_enough, draw
from instep.lab.parting import check_can_part, on_emulated_hosts
from instep.lab.replay import changes_since, stretches
from instep.lab.roster import roles_of
from instep.lab.trial import Progress, folder_for_runs
from instep.lab.verdict import Verdict, judge
from instep.spec import JobSpec
from instep.store.folder import ID, lock, numbered, unlock
from instep.store.run_folder import RunFolder
from instep.system.processes import on_signals

STUCK_S = 120.0
"""After how long without a step a run is given up, if that is longer than the undisturbed took."""

GRACE_S = 15.0
"""How long a run that is asked to stop may take, before it is told, and then killed."""

SUFFIXES = ("undisturbed", "disturbed")
"""What the two runs of a job are called, after its name."""


def break_job(job: JobSpec, runs: Path, plan: Plan, say: Say) -> Verdict:
    """Run a job undisturbed, then the same job disturbed, and judge.

    Args:
        job: to run twice.
        runs: folder of run folders.
        plan: what to break.
        say: told what is being done.

    Raises:
        SpecError: the job is too short for so much.
        InstepError: the undisturbed run failed.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; no process is left.
    """
    if plan.partitions:
        check_can_part(job)
    check_job(job)
    if job.train.steps and not plan.over_s:
        check_long_enough(job.train.steps, plan.injections, _longer(job, plan))
    say("running it undisturbed")
    done = run_job(_named(job, SUFFIXES[0]), runs, named=False, quiet=True, watch=Progress(say))
    if done.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return break_again(RunFolder(done.path), runs, plan, say, name=job.name)


def break_again(
    undisturbed: RunFolder, runs: Path, plan: Plan, say: Say, *, name: str = ""
) -> Verdict:
    """Run the job of a run that has ended once more, disturbed, and judge it by that run.

    Args:
        undisturbed: a run that has ended.
        runs, plan, say: as for `break_job`.
        name: of the disturbed run, before its suffix; that run's own if not given.

    Raises:
        SpecError: the job is too short for so much, or that run cannot be repeated.
        KeyboardInterrupt: as for `break_job`.
    """
    check_can_be_repeated(undisturbed)
    job = _repeated(undisturbed)
    if plan.partitions:
        check_can_part(job)
    if not plan.over_s:
        check_long_enough(undisturbed.last_step, plan.injections, _longer(job, plan))
    for text in changes_since(undisturbed, undisturbed.last_step):
        say(f"mind: {text}")
    injections = _drawn(plan, undisturbed)
    say(f"running it again, to break it {plan.injections} times")
    with ExitStack() as stack:
        plain, parting = job, None
        if plan.partitions:
            job, parting = stack.enter_context(on_emulated_hosts(job))
        check_job(job)
        program = stack.enter_context(_running(_named(job, SUFFIXES[1], name), runs))
        steps, limit_s = undisturbed.last_step, max(STUCK_S, undisturbed.seconds)
        breaker = Breaker(program.folder, injections, plan, say, steps=steps, parting=parting)
        breaker.serve(lambda: program.goes_on and breaker.still_s < limit_s)
        program.check_began()
        stuck_s = breaker.still_s if program.goes_on else 0.0
        program.stop()
        left = _outlived(breaker)
    if parting is not None:  # its hosts are gone: it goes on, if anybody wants that, without them
        _rewrite_job(program.folder, plain)
    return _judged(program.folder, undisturbed, breaker, left=left, stuck_s=stuck_s)


def break_running(run: RunFolder, plan: Plan, say: Say) -> Verdict:
    """Break a run that is going on, and judge how it took that; it goes on afterwards.

    Args:
        run: the run.
        plan, say: as for `break_job`.

    Raises:
        SpecError: too few of its steps are left, others started its processes, or its network is
            to be parted.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; the run goes on.
    """
    check_own(run)
    if plan.partitions:
        raise SpecError(
            f"--partitions {plan.partitions}: {run.path} is going on, and a run moves to a network "
            "that can be parted only from its beginning. Give the job file, or leave it out."
        )
    ready = run.last("worker_ready")
    last = int(ready.get("last_step") or 0)
    if not last and not plan.over_s:
        raise SpecError(f"{run.path} has not said how long it is. Give --over SECONDS.")
    if not plan.over_s:
        left = last - run.last_step
        check_long_enough(left, plan.injections, "Give --over SECONDS, or ask for less.")
    breaker = Breaker(run.path, _drawn(plan, run), plan, say, begin=run.last_step, steps=last)
    with folder_for_runs("instep-chaos-"):
        breaker.serve(lambda: not breaker.settled and is_going_on(run.path))
    return _judged(run.path, None, breaker, going_on=is_going_on(run.path))


def check_own(run: RunFolder) -> None:
    """Refuse runs whose processes others started, or that are on another machine.

    Raises:
        SpecError: it is one.
    """
    if run.joined:
        raise SpecError(
            f"{run.path} is of processes that called instep.join: nobody replaces them, so a "
            "kill ends the run. instep chaos breaks runs of instep run."
        )
    there, here = (run.last("run_started").get("host") or {}).get("name"), platform.node()
    if is_going_on(run.path) and there not in (None, here):
        raise SpecError(
            f"{run.path} is going on on {there}, and this is {here}: its processes are out of "
            "reach. Break it there."
        )


def check_can_be_repeated(run: RunFolder) -> None:
    """Refuse runs whose result the job alone does not give again.

    Raises:
        SpecError: says why not.
        RunError: it has no end, or failed.
    """
    check_own(run)
    if run.outcome not in ("completed", "stopped") or not run.last_step:
        raise RunError(
            f"{run.path} is {run.outcome}: a disturbed run is held against one that has come to "
            f"its end. To end it: {run.to_resume}"
        )
    if (
        len({stretch.job.train.steps or stretch.job.train.passes for stretch in _stretches(run)})
        > 1
    ):
        raise SpecError(
            f"{run.path} was resumed with another length, which one run from the beginning does "
            "not give again. Give the job file instead."
        )


def _stretches(run: RunFolder) -> Iterator[Any]:
    return stretches(run, 0, run.last_step)


def is_going_on(folder: Path) -> bool:
    """Whether another process has the run folder for itself.

    Raises:
        RunError: the folder cannot be asked.
    """
    try:
        with (folder / ID).open("ab") as file:
            mine = lock(file)
            if mine:
                unlock(file)
            return not mine
    except OSError as error:
        raise RunError(f"{folder / ID} cannot be opened: {error.strerror}.") from None


def _drawn(plan: Plan, run: RunFolder) -> list[Injection]:
    """What to break in a run like this one."""
    there = roles_of(run)
    if not there:
        raise SpecError(f"{run.path} tells of no process yet. Try again in a moment.")
    if absent := [role for role in plan.roles if role not in there]:
        raise SpecError(
            f"--roles {','.join(plan.roles)}: {run.path} tells of no {absent[0]} process that "
            f"could be killed. It has: {', '.join(there)}."
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
    return msgspec.structs.replace(job, name=f"{plain}-{suffix}")


def _longer(job: JobSpec, plan: Plan) -> str:
    """How the job is made long enough, as far as that can be told."""
    if job.train.steps:
        return f"Lengthen it: --set train.steps={4 * plan.injections}"
    return f"Lengthen it: --set train.epochs={4 * job.train.passes}, or more, or ask for less."


def _judged(folder: Path, undisturbed: RunFolder | None, breaker: Breaker, **more: Any) -> Verdict:
    verdict = judge(RunFolder(folder), undisturbed, breaker.injected, breaker.falls, **more)
    breaker.write(verdict.as_table())
    return verdict


def _rewrite_job(folder: Path, plain: JobSpec) -> None:
    job = msgspec.structs.replace(plain, name=RunFolder(folder).spec.name)
    (folder / "job.toml").write_text(spec_file.dump(job), encoding="utf-8")


def _outlived(breaker: Breaker) -> list[int]:
    """Processes of a run that has ended; they get a moment to go."""
    breaker.roster.listen()
    for pid in breaker.roster.alive():
        with suppress(psutil.Error):
            psutil.Process(pid).wait(5.0)
    return breaker.roster.alive()


@contextmanager
def _running(job: JobSpec, runs: Path) -> Iterator[_Program]:
    """`instep run` as a program of its own; ended with the context, however that ends."""
    name = next(name for name in numbered(job.name) if not (runs / name).exists())
    with folder_for_runs("instep-chaos-") as place:
        file, said = place / "job.toml", place / "said"
        file.write_text(spec_file.dump(job), encoding="utf-8")
        command = ["run", str(file), "--runs", str(runs), "--name", name, "--json"]
        with said.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "instep", *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=out,
                start_new_session=True,  # Ctrl-C is ours; it is told below
            )
        program = _Program(process, (runs / name).resolve(), said)
        try:
            yield program
        finally:
            program.stop()


class _Program:
    """A run that another process conducts."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, said: Path) -> None:
        self._process, self.folder, self._said = process, folder, said

    @property
    def goes_on(self) -> bool:
        return self._process.poll() is None

    def check_began(self) -> None:
        """Refuse to judge what has never been a run."""
        if not (self.folder / "events.jsonl").exists():
            words = self._said.read_text(errors="replace").strip().rpartition("instep: ")[2]
            raise WorkerError(f"the disturbed run did not begin: {words}")

    def stop(self) -> None:
        """End the run, if it still goes on: asked first, then told, then killed."""
        with on_signals(signal.SIG_IGN):  # a second Ctrl-C would leave its processes
            for ask in (self._process.terminate, self._process.terminate, self._process.kill):
                if not self.goes_on:
                    return
                ask()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE_S)
