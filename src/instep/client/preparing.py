"""Prepares data for a command or a job, and a job for its run. Ways in: `prepared`, `as_run`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from instep.client.job_checks import with_options
from instep.data.shards.urls.remote import cache_in
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.privacy import found
from instep.recipe.given import given
from instep.words import printable

if TYPE_CHECKING:
    from instep.prepare.prepare import Prepared
    from instep.prepare.workers.hosts import Hosting

HOSTED = ("hosts", "slurm", "ray")
"""Launchers on whose hosts data are prepared; machines that join by hand have come for the run."""


def prepared(
    who: str,
    say: Callable[[str], None],
    workers: int | None,
    job: JobSpec | None = None,
    *,
    shard_mb: float | None,
    **asked: Any,
) -> Prepared:
    """Make shards.

    Args:
        who: asks for them, for a message.
        say: prints a line.
        workers: processes; None: one for each processor.
        job: its `[launch]` says where they are; None: on this machine.
        shard_mb: about so many MB does a shard have; None: as many as usual.
        asked: fields of `prepare.asked.Asked`.

    Raises:
        InstepError: they cannot be made; or a package is not installed.
    """
    try:
        from instep.prepare.asked import Asked
        from instep.prepare.prepare import prepare
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{who} needs the package {error.name}: pip install 'instep[data]'."
        ) from None
    if shard_mb is not None:
        asked["shard_bytes"] = round(shard_mb * 1e6)
    if job is None or job.launch.launcher not in HOSTED:
        return prepare(Asked(**asked), say, workers=workers)
    return prepare(Asked(**asked), say, workers=workers, enter=lambda: _hosting(job))


@contextmanager
def _hosting(job: JobSpec) -> Iterator[Hosting]:
    """A launcher for the hosts of a job, and where they connect; none is left at the end."""
    from instep.client.job_checks import open_switchboard
    from instep.client.launching import launching
    from instep.prepare.workers.hosts import Hosting

    with launching(job) as (settled, launcher):
        board = open_switchboard(settled)
        try:
            yield Hosting(launcher, board, settled.launch)
        finally:
            launcher.stop()
            board.close()


def launch_of(on: str, workers: int | None, map: str | None, changes: Sequence[str]) -> JobSpec:
    """A job that says where a preparation's workers are, and nothing else.

    Args:
        on: as `launch.on`.
        workers: all of them.
        map: the function's reference.
        changes: `launch.KEY=VALUE` or `network=VALUE`.

    Raises:
        SpecError: there is no such launcher, or a change is of something else.
    """
    from instep.job import file as spec_file
    from instep.job.overrides import apply_overrides

    for change in changes:
        if not change.startswith(("launch.", "network=")):
            raise SpecError(f"--set {change!r}: instep prepare has launch.KEY=VALUE and network.")
    if on not in ("local", *HOSTED):
        raise SpecError(f"--on {on!r}: wanted is local, hosts, slurm or ray.")
    if on in ("slurm", "ray") and workers is None:
        raise SpecError(f"--on {on} needs --workers N: the cores to ask the cluster for.")
    table: dict[str, Any] = {
        "name": "prepare",
        "recipe": map or "none.py:none",
        "workers": workers or 1,
        "launch": {"on": on},
    }
    typed = apply_overrides(table, changes)
    job = spec_file.build(table, source="instep prepare", typed=typed)
    return spec_file.absolute(job, Path.cwd())


def prepare_data(job: JobSpec, *, quiet: bool, here: bool = False) -> None:
    """Make the shards that a job asks for; nothing if it asks for none.

    Args:
        job: has a `[prepare]`, and a `[launch]`.
        quiet: print nothing.
        here: on this machine, whatever the job says.

    Raises:
        InstepError: they cannot be made.
        KeyboardInterrupt: a signal has come; what was done is kept.
    """
    spec = job.prepare
    if not spec.sources:
        return
    cluster = job.launch.launcher in ("slurm", "ray")

    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr, flush=True)

    with cache_in(job.data.cache, job.data.cache_gb):
        done = prepared(
            "[prepare]",
            say,
            spec.workers or (job.workers if cluster and not here else None),
            None if here else job,
            sources=list(spec.sources),
            to=spec.to,
            map=spec.map or None,
            key=spec.key or None,
            reduce=spec.reduce or None,
            shuffle=spec.shuffle,
            keep=spec.keep,
            shard_mb=spec.shard_mb,
            tokens=spec.tokens or None,
            length=spec.length,
            unreadable=spec.unreadable,
            types=dict(spec.types),
            seed=spec.seed,
        )
    if done.manifest is None:
        raise KeyboardInterrupt
    if done.done_before < done.tasks:
        for line in done.lines()[:-1]:
            say(line)


def _planned(job: JobSpec) -> tuple[float | None, ...]:
    """Settings that may change when a run is resumed, and that epsilon follows from."""
    return job.train.epochs, job.train.steps, job.privacy.epsilon


def as_run(job: JobSpec, before: JobSpec | None = None) -> JobSpec:
    """The job with `sync.defaults` (`with_options`), and where it is private with its noise, the
    steps within its budget, and bounds of epsilon, which may take a minute.

    Args:
        job: of a run that begins, or is resumed.
        before: the job of the run that is resumed.

    Raises:
        InstepError: as `with_options`; or the budget is not enough, or a library is missing.
    """
    job = with_options(job, before)
    same = before is not None and _planned(before) == _planned(job)
    if not job.privacy.on or (same and job.privacy.accounted):
        return job
    if given(job.recipe) is not None:  # of a notebook: only this process has it
        from instep.worker.training import budget  # which imports torch

        return replace(job, privacy=budget.settled(job))
    done = subprocess.run(
        [sys.executable, "-P", "-m", found.PROGRAM],
        input=spec_file.dump(job).encode(),
        stdout=subprocess.PIPE,
        check=False,
    )
    return replace(job, privacy=found.read(done.stdout.decode(errors="replace"), job.privacy))
