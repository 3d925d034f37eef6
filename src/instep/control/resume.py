"""Resuming a run: what is checked and repaired before its processes start again.

A run resumes from its newest valid checkpoint, with any number of workers: the next global
batch is a function of the step alone. Steps that were committed after that checkpoint are
trained again, so they are removed from the ledger. Nothing here imports torch.
"""

from __future__ import annotations

import time
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from instep.control.changed_job import check_changes
from instep.control.stop_rules import recorded
from instep.errors import CheckpointError, RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import plain, replace_plain
from instep.privacy import secret_files
from instep.state.files.manifest import CheckpointManifest, read_manifest
from instep.state.intact import discard_newer, newest_intact
from instep.store.folder import ID, StartPoint, numbered, run_id
from instep.store.ledger import check_intact, check_reaches, cut_back
from instep.store.own_files import lock, unlock
from instep.store.run_folder import RunFolder
from instep.units import readable_seconds
from instep.words import command

TIMEOUT_S = 10.0
"""How long workers whose client was killed may take to close the ledger."""


def prepare(
    folder: Path, job: JobSpec, *, recipe_sha256: str, at_its_end: bool = False
) -> StartPoint:
    """Choose the checkpoint to resume from, and undo what was committed after it.

    The caller holds the folder. From here on the folder is that of `job`.

    Args:
        folder: of the run.
        job: as it will be resumed.
        recipe_sha256: of the recipe's file as it is now.
        at_its_end: accept a run that has all its steps: to end it, or because the job does
            not fix its length.

    Raises:
        RunError: a process still writes the ledger, it is damaged, or the folder cannot be written.
        CheckpointError: there are checkpoints, and none is valid.
        SpecError: the run is complete already, has used up its time or is to stop at a
            step that lies behind it; or the checkpoint is of another job; or the secret of
            a private run is not here.
    """
    run = RunFolder(folder)
    _check_time(run, job)
    if job.privacy.on:
        secret_files.load(run_id(folder))
    before = run.last("run_started").get("recipe_sha256")
    start_point = go_back(folder, job, check=_check_stop if at_its_end else _check_ahead)
    warnings = list(start_point.warnings)
    if before and before != recipe_sha256:
        file = job.recipe.rpartition(":")[0]
        warnings.append(f"{file} has changed since the run was started; the new version is used.")
    path = folder / "job.toml"
    try:
        replace_plain(path, spec_file.dump(job), durable=True)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Make room, or get access to it."
        ) from None
    return replace(start_point, warnings=tuple(warnings))


def go_back(
    folder: Path, job: JobSpec, check: Callable[[RunFolder, JobSpec, int], None] = lambda *_: None
) -> StartPoint:
    """Go back to the newest valid checkpoint: the ledger ends with its step again.

    The model that an earlier end of the run saved is removed, or renamed.

    Args:
        folder: of the run.
        job: as it continues.
        check: given the run as it was left, the job and the step, before anything is
            changed; may raise.

    Raises:
        RunError: a process still writes the ledger, it is damaged, or the folder cannot be written.
        CheckpointError: there are checkpoints, and none is valid.
        SpecError: the checkpoint is of a job that cannot become this one.
    """
    with _no_other_writer(folder / "ledger.bin"):
        run = RunFolder(folder)
        checkpoint, refused = newest_intact(folder / "checkpoints", partial(check_own, folder))
        step = size_bytes = 0
        if checkpoint is None and refused:
            raise CheckpointError(
                f"no checkpoint in {folder / 'checkpoints'} is valid: {refused[0]} "
                "Restore one from a copy, or remove the checkpoints to begin again."
            )
        if checkpoint is not None:
            manifest = read_manifest(checkpoint)
            step, size_bytes = manifest.step, int(manifest.facts["ledger_bytes"])
            check_changes(_job_of(checkpoint, manifest), job)
            if "ledger_crc32" in manifest.facts:  # of a checkpoint that is not older than that
                check_intact(folder / "ledger.bin", size_bytes, manifest.facts["ledger_crc32"])
        check(run, job, step)
        kept = _set_model_aside(run, step)
        if checkpoint is not None:
            discard_newer(checkpoint)
        cut_back(folder / "ledger.bin", size_bytes)
    warnings = [f"{sentence} An earlier checkpoint is used." for sentence in refused] + kept
    if (step or len(run.ledger)) and not run.named("run_started"):
        warnings.append(
            f"{folder / 'events.jsonl'} has lost the events of earlier sessions: it was cut or "
            "removed. The report covers what follows, and what the ledger has."
        )
    watched = job.stop.by_step or job.stop.by_metric
    figures = tuple(recorded(run.steps, run.validations, step)) if watched else ()
    return StartPoint(
        step, checkpoint, len(run.members.generations), tuple(warnings), figures, run.times.seconds
    )


def _set_model_aside(run: RunFolder, step: int) -> list[str]:
    """Delete the model of an earlier end if the checkpoint of `step` has the same; else rename it.

    While a run trains, its folder has no model.

    Returns:
        A sentence that says so, where it was renamed.

    Raises:
        RunError: the folder cannot be written.
    """
    model, its_step = run.path / "model.safetensors", run.last("model_saved").get("step")
    try:
        if its_step == step:
            model.unlink(missing_ok=True)
        elif model.exists() and its_step is not None:
            aside = model.replace(model.with_name(f"model-of-step-{its_step}.safetensors"))
            return [f"the model of step {its_step}, which no valid checkpoint has, is now {aside}."]
        elif model.exists():  # the log that has its step was cut, or removed
            names = (model.with_name(f"{name}.safetensors") for name in numbered("model-before"))
            aside = model.replace(next(path for path in names if not path.exists()))
            return [f"the model in {run.path}, of an unknown step, is now {aside}."]
    except OSError as error:
        raise RunError(f"{model} cannot be renamed: {error.strerror}. Get access.") from None
    return []


_KEPT = ("run", "job", "ledger_bytes", "epoch_so_far", "optimizer", "scaler")


def check_own(folder: Path, checkpoint: Path, manifest: CheckpointManifest) -> None:
    """Refuse a checkpoint of another run, of an earlier instep, or beyond the ledger."""
    kept = {name.partition("-")[0] for name in manifest.facts}  # optimizer-NAME, of several turns
    if missing := [name for name in _KEPT if name not in kept]:
        raise CheckpointError(
            f"{checkpoint} was saved by instep {manifest.instep}, which did not keep all that this "
            f"one needs ({', '.join(missing)}): resume it with that version, or begin a new run."
        )
    if manifest.facts["run"] != run_id(folder):
        raise CheckpointError(
            f"{checkpoint} is of another run: its id is not the one in {folder / ID}."
        )
    check_reaches(folder / "ledger.bin", int(manifest.facts["ledger_bytes"]))


def _job_of(checkpoint: Path, manifest: CheckpointManifest) -> JobSpec:
    table = spec_file.with_present_keys(tomllib.loads(manifest.facts["job"]))
    return spec_file.build(table, source=f"the job in {checkpoint}")


def _check_ahead(run: RunFolder, job: JobSpec, step: int) -> None:
    """Refuse to resume where no step would follow."""
    _check_unfinished(run, job, step)
    _check_stop(run, job, step)


def _check_stop(run: RunFolder, job: JobSpec, step: int) -> None:
    stop = job.train.stop_after_steps
    if 0 < stop <= step:
        raise SpecError(
            f"train.stop_after_steps = {stop}: {run.path} resumes from step {step}. "
            "Set a later step, or leave it out."
        )


def _check_unfinished(run: RunFolder, job: JobSpec, step: int) -> None:
    train, batches = job.train, run.plan.batches_of(job)
    steps = batches.length(job)
    if not 0 < steps <= step or not _has_its_model(run, step):
        return
    longer, reached = ("steps", step) if train.steps else ("epochs", batches.of(step).epoch + 1)
    given = train.steps or train.passes
    state = f"is complete: it has {step} of {steps} steps"
    if steps < step:
        given_steps = "" if train.steps else f", which are {steps} steps"
        state = f"has {step} steps already, and is to have train.{longer} = {given}{given_steps}"
    again = command("resume", run.path, "--set", f"train.{longer}={2 * max(given, reached)}")
    raise SpecError(f"{run.path} {state}. To train longer: {again}")


def _has_its_model(run: RunFolder, step: int) -> bool:
    """Whether the model of the last step was saved; else the run resumes to do just that."""
    saved = run.last("model_saved").get("step") == step
    return saved and (run.path / "model.safetensors").is_file()


def _check_time(run: RunFolder, job: JobSpec) -> None:
    limit_s = job.stop.time_limit_s
    if limit_s is not None and run.times.seconds >= limit_s:
        more = f"stop.time_limit={2 * limit_s:g}"
        way = f"{run.to_resume} and {more}" if run.joined else f"{run.to_resume} --set {more}"
        raise SpecError(
            f"{run.path} has taken {readable_seconds(run.times.seconds)}, and stop.time_limit is "
            f"{readable_seconds(limit_s)}. To train longer: {way}"
        )


@contextmanager
def _no_other_writer(ledger: Path) -> Iterator[None]:
    """Wait for a worker that outlives its master by a moment, and lock the ledger."""
    if not ledger.exists():
        yield
        return
    deadline = time.monotonic() + TIMEOUT_S
    try:
        file = open(ledger, "ab", opener=plain)  # noqa: SIM115 closed below
    except OSError as error:
        raise RunError(f"{ledger} cannot be written: {error.strerror}. Get access to it.") from None
    with file:
        while not lock(file):
            if time.monotonic() > deadline:
                raise RunError(f"another process still writes {ledger}. End it, then resume.")
            time.sleep(0.05)
        try:
            yield
        finally:
            unlock(file)
