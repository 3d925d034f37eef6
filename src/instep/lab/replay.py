"""Computes recorded steps again on one replica, and compares them with the record.

A replay is a run of one worker, or of the processes of one replica, in a temporary folder.
It begins at a checkpoint that the run kept, or at the beginning, and ends with the step
asked for. The recorded run is only read, and may still be running. `comparison.py` compares
the results. Nothing here imports torch. Way in: `replay`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.client.results import about, recipe_sha256
from instep.control.resume import check_own
from instep.errors import CheckpointError, RunError, SpecError, raise_first
from instep.job import file as spec_file
from instep.job.checkpoint import CheckpointSpec
from instep.job.launch import LaunchSpec
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec, ReportSpec
from instep.job.train import StopSpec
from instep.lab.comparison import Replayed, judge, on_processes
from instep.lab.temporary_runs import Progress, folder_for_runs, run_quietly
from instep.privacy.refusals import repeated
from instep.state.compare import checkpoint_of
from instep.state.export.export import check_target, copy_own, writing_to
from instep.state.files.manifest import published
from instep.state.intact import check
from instep.store.folder import StartPoint
from instep.store.run_folder import RunFolder
from instep.words import shown_url


class Stretch(NamedTuple):
    """Steps (`after`, `last`] that one session of the recorded run computed."""

    after: int
    last: int
    job: JobSpec
    """As in that session; other sessions may have had another length."""


def replay(
    run: RunFolder, step: int, say: Callable[[str], None], *, to: Path | None = None
) -> Replayed:
    """Compute a committed step again, and the steps before it back to a checkpoint.

    Args:
        run: the recorded run.
        step: counts from 1.
        say: prints a line of progress.
        to: where to write the model after that step, as safetensors.

    Raises:
        SpecError: the run has no such step, or others started its processes; or `to` is a file
            that the run needs.
        RunError: the steps could not be computed to the last one, or `to` not be written.
        InstepError: the run of one replica failed; the text says why.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; nothing is left behind.
    """
    if to is not None:
        check_target(to, run.path, run.spec.start.model)
    check_step(run, step)
    warnings = changes_since(run, step)
    with folder_for_runs("instep-replay-") as folder:
        start_point, refused = _start_point(run, step, folder)
        computed, at = [], start_point
        for number, stretch in enumerate(stretches(run, start_point.step, step)):
            while at.step < stretch.last:
                say(_progress(at.step, stretch.last, start_point, stretch.job.workers))
                done = _computed(stretch, at, folder / f"{number}-{at.step}", say)
                if done.last_step <= at.step:
                    raise RunError(
                        f"step {at.step + 1} could not be computed again: its run "
                        f"ended ({done.outcome}) before it."
                    )
                computed.append(done)
                at = StartPoint(done.last_step, checkpoint_of(done.path, done.last_step))
        if start_point.checkpoint is None:
            warnings += _other_start(run, computed[0])
        if to is not None:
            with writing_to(to):
                copy_own(computed[-1].path / "model.safetensors", to)
        found = judge(
            run, computed, step, checkpoint=start_point.checkpoint, after=start_point.step
        )
        return replace(found, warnings=(*refused, *warnings, *found.warnings), model=to)


def check_step(run: RunFolder, step: int) -> None:
    """Refuse a step that cannot be computed again.

    Raises:
        SpecError: the run has no such step, or others started its processes.
        RunError: it has no committed step at all.
    """
    raise_first(repeated(run.spec, "instep replay"))
    if run.joined:
        raise SpecError(
            f"the processes of {run.path} called instep.join: their script says what they train, "
            "and instep replay cannot start it."
        )
    if run.spec.sync.codec != "none":
        raise SpecError(
            f"{run.path} was trained with sync.codec = {run.spec.sync.codec!r}: what was carried "
            "over depends on its workers, so one process cannot compute its steps again."
        )
    if run.spec.sync.leased:
        raise SpecError(
            f"{run.path} was trained with sync.name = {run.spec.sync.name!r}: its updates depend "
            "on timing, so they cannot be computed again."
        )
    if step < 1:
        raise SpecError(f"--step {step}: steps count from 1.")
    if not run.last_step:
        raise RunError(f"{run.path} has no committed step yet: there is nothing to compute again.")
    if step > run.last_step:
        raise SpecError(
            f"--step {step}: the last committed step of {run.path} is {run.last_step}. "
            f"Name one from 1 to {run.last_step}."
        )


def stretches(run: RunFolder, after: int, last: int) -> Iterator[Stretch]:
    """Which job computed the steps (`after`, `last`], in order.

    A session that resumed from step r discarded the steps after r, so a step belongs to the
    last session that began before it. Neighbours with the same job are one stretch.
    """
    begun = [(int(e.get("resumed_step") or 0), _job(run, e)) for e in run.named("run_started")]
    edges = sorted({after, last, *(step for step, _ in begun if after < step < last)})
    found: list[Stretch] = []
    for begin, end in pairwise(edges):
        own = [job for step, job in begun if step <= begin]
        job = own[-1] if own else run.spec
        if found and found[-1].job == job:
            found[-1] = found[-1]._replace(last=end)
        else:
            found.append(Stretch(begin, end, job))
    yield from found


def _job(run: RunFolder, started: dict[str, Any]) -> JobSpec:
    """The job of one session, for one replica: that of the run, with what a resume may change."""
    table = started.get("job")
    logged = table if isinstance(table, dict) else {}
    parts = {key: logged[key] for key in ("train", "stop", "data", "mesh", "sync") if key in logged}
    ranks = msgspec.convert(parts.get("mesh", {}), MeshSpec, strict=False).ranks
    session = {"recipe": run.spec.recipe, "workers": ranks, **spec_file.with_present_keys(parts)}
    given = spec_file.build(session, source=str(run.path)) if parts else run.spec
    device = str(run.last("worker_ready").get("device") or given.train.device).partition(":")[0]
    return msgspec.structs.replace(
        run.spec,
        workers=given.mesh.ranks,
        mesh=given.mesh,
        train=msgspec.structs.replace(given.train, device=device, stop_after_steps=0),
        data=given.data,
        stop=StopSpec(non_finite=False, gradient_norm=given.stop.gradient_norm),
        checkpoint=CheckpointSpec(every="never", keep_last=1),
        report=ReportSpec(),
        launch=LaunchSpec(),  # here, wherever the run was
        network="loopback",
    )


def _start_point(run: RunFolder, step: int, folder: Path) -> tuple[StartPoint, list[str]]:
    """The newest intact checkpoint before a step, and what is wrong with newer ones."""
    refused = []
    for number, checkpoint in published(run.path / "checkpoints"):
        if number >= step:
            continue
        try:
            kept = checkpoint if run.ending else _copy_of(checkpoint, folder)
            check_own(run.path, kept, check(kept))
        except CheckpointError as error:
            refused.append(f"{error} An earlier one is used.")
        else:
            return StartPoint(number, kept.resolve()), refused
    return StartPoint(0, None), refused


def _copy_of(checkpoint: Path, folder: Path) -> Path:
    """Our own copy: a running job may delete its checkpoint at any moment."""
    try:
        return Path(shutil.copytree(checkpoint, folder / "from" / checkpoint.name))
    except (OSError, shutil.Error) as error:
        raise CheckpointError(f"{checkpoint} cannot be copied: {error}.") from None


def _computed(
    stretch: Stretch, at: StartPoint, runs: Path, say: Callable[[str], None]
) -> RunFolder:
    last, job = stretch.last, stretch.job
    train = msgspec.structs.replace(job.train, stop_after_steps=last, validate_every=last)
    return run_quietly(
        msgspec.structs.replace(job, train=train), runs, watch=Progress(say, last), start_point=at
    )


def _progress(step: int, last: int, start_point: StartPoint, processes: int) -> str:
    if step > start_point.step:
        where = f"step {step}"
    elif start_point.checkpoint is None:
        where = "the beginning"
    else:
        where = f"the checkpoint of step {step}"
    steps = f"step {last}" if last == step + 1 else f"steps {step + 1} to {last}"
    return f"computing {steps} {on_processes(processes)}, from {where}"


def changes_since(run: RunFolder, step: int) -> list[str]:
    """What has changed since the steps up to this one were computed, and may give other bits."""
    begun = [e for e in run.named("run_started") if (e.get("resumed_step") or 0) < step]
    now = about(run.spec)
    found = []
    recipes = {e["recipe_sha256"] for e in begun if e.get("recipe_sha256")}
    if recipes - {recipe_sha256(run.spec)}:
        found.append(f"{run.spec.recipe.rpartition(':')[0]} has changed since the run.")
    for name in ("instep", "torch", "numpy"):
        had = {str((e.get("versions") or {}).get(name, "")) for e in begun}
        if had := had - {"", now["versions"][name]}:
            was = " and ".join(sorted(had))
            found.append(f"the run had {name} {was}, this is {name} {now['versions'][name]}.")
    hosts = [e["host"] for e in begun if isinstance(e.get("host"), dict)]
    others = {str(host["name"]) for host in hosts if "name" in host} - {now["host"]["name"]}
    if others:
        was = " and ".join(sorted(others))
        found.append(f"the run was on {was}, this is {now['host']['name']}.")
    return found


def _other_start(run: RunFolder, computed: RunFolder) -> list[str]:
    """A warning if the file that the model starts from has changed."""
    was, given = (each.last("model_loaded").get("sha256") for each in (run, computed))
    return [] if was == given else [f"{shown_url(run.spec.start.model)} has changed since the run."]
