"""Going on with a run: what is checked and put right before its processes start again.

A run goes on from its newest sound checkpoint, at whatever size: the next
global batch is a function of the step alone. Steps that were committed after
that checkpoint are trained again, so they are taken back from the ledger.
Nothing here imports torch.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from instep import spec_file
from instep.errors import CheckpointError, RunError, SpecError
from instep.report.run_folder import RunFolder
from instep.run.folder import Origin
from instep.run.ledger import cut_back
from instep.run.stop_rules import recorded
from instep.spec import JobSpec, as_table
from instep.state.manifest import read_manifest
from instep.state.sound import newest_sound
from instep.units import readable_seconds

PATIENCE_S = 10.0
"""How long workers whose client was killed may take to let go of the ledger."""

FIXED = {
    "name": "a run keeps its folder",
    "seed": "the order of the data and every random draw follow from it",
    "arguments": "the recipe would build something else",
    "sync": "what a strategy remembers is in the checkpoint",
    "mesh": "the checkpoint is cut along it",
    "start.model": "the checkpoint has the model by now",
    "start.partial": "the checkpoint has the model by now",
    "start.freeze": "the optimizer's state is of the parameters that were trained",
    "start.learning_rates": "the optimizer's rates are in the checkpoint",
    "train.global_batch": "the place in the data is counted in global batches",
    "train.micro_batches": "random draws and batch statistics belong to a micro-batch",
    "train.determinism": "bits would be neither those of one nor of the other",
    "train.precision": "every value is rounded by it",
    "train.clip_norm": "every step is scaled by it",
}
"""What may not change when a run goes on, and why."""

FIXED_BITS = {
    "train.threads": "sums are cut among threads, and round otherwise",
    "train.device": "another kind of device rounds otherwise",
}
"""What else may not, where the bits must stay the same."""


def changed(
    path: Path, overrides: Iterable[str], changes: Mapping[str, Any] = MappingProxyType({})
) -> JobSpec:
    """The job of a run folder, with `section.key=value` and tables of changes laid over it.

    Raises:
        RunError: `path` is not the folder of a run.
        SpecError: an override is wrong, or changes what may not change.
    """
    before = RunFolder(path).spec
    given = list(overrides)
    table = spec_file.read_table(path / "job.toml")
    table.get("train", {}).pop("stop_after_steps", None)  # it was for the start before
    spec_file.apply_overrides(table, given)
    spec_file.lay_over(table, changes)
    job = spec_file.build(table, source=f"resume {path}")
    if "recipe" in changes or any(each.split("=")[0].strip() == "recipe" for each in given):
        file, _, function = job.recipe.rpartition(":")
        recipe = f"{Path(file).expanduser().resolve()}:{function}"
        job = msgspec.structs.replace(job, recipe=recipe)
    check_changes(before, job)
    return job


def check_changes(before: JobSpec, after: JobSpec) -> None:
    """Refuse a change of what makes a run the run that it is.

    Raises:
        SpecError: names the key, both values and the reason.
    """
    fixed = FIXED | (FIXED_BITS if before.train.determinism == "bits" else {})
    old, new = as_table(before), as_table(after)
    for key, reason in fixed.items():
        was, given = _at(old, key), _at(new, key)
        if was != given:
            raise SpecError(
                f"{key} was {_shown(was)} and cannot become {_shown(given)} when a run goes on: "
                f"{reason}. Leave it, or begin a new run with instep run."
            )


def _at(table: Mapping[str, Any], key: str) -> Any:
    value: Any = table
    for part in key.split("."):
        value = value[part]
    return value


def _shown(value: Any) -> str:
    plain = list(value) if isinstance(value, tuple) else value  # as a job file has it
    return "not set" if plain is None else repr(plain)


def prepare(folder: Path, job: JobSpec, *, recipe_sha256: str, at_its_end: bool = False) -> Origin:
    """Choose where the run goes on, and take back what was committed after that.

    The caller holds the folder. From here on the folder is that of `job`.

    Args:
        folder: of the run.
        job: as it will go on.
        recipe_sha256: of the recipe's file as it is now.
        at_its_end: take up a run that has all its steps too: to end it, or because
            its length is not the job's business.

    Raises:
        RunError: what was committed can no longer be told, or the folder cannot be written.
        CheckpointError: no checkpoint can be believed, although there are some.
        SpecError: the run is complete already, or has used up its time.
    """
    run = RunFolder(folder)
    _check_time(run, job)
    before = run.last("run_started").get("recipe_sha256")

    def check(step: int) -> None:
        if not at_its_end:
            _check_unfinished(run, job, step)

    origin = go_back(folder, job, check=check)
    warnings = list(origin.warnings)
    if before and before != recipe_sha256:
        warnings.append(
            f"{job.recipe.rpartition(':')[0]} has changed since the run was started; "
            "it goes on with what it is now."
        )
    _replace(folder / "job.toml", spec_file.dump(job))
    return replace(origin, warnings=tuple(warnings))


def go_back(folder: Path, job: JobSpec, check: Callable[[int], None] = lambda _: None) -> Origin:
    """Go back to the newest sound checkpoint: the ledger ends with its step again.

    Args:
        folder: of the run.
        job: as it goes on.
        check: given the step before anything is changed; may raise.

    Raises:
        RunError: what was committed can no longer be told, or the folder cannot be written.
        CheckpointError: no checkpoint can be believed, although there are some.
    """
    run = RunFolder(folder)
    checkpoint, refused = newest_sound(folder / "checkpoints")
    step = size_bytes = 0
    if checkpoint is None and refused:
        raise CheckpointError(
            f"no checkpoint in {folder / 'checkpoints'} can be believed: {refused[0]} "
            "Put it right from a copy, or remove the checkpoints to begin again."
        )
    if checkpoint is not None:
        manifest = read_manifest(checkpoint)
        step, size_bytes = manifest.step, int(manifest.facts["ledger_bytes"])
    check(step)
    warnings = [f"{sentence} An earlier checkpoint is used." for sentence in refused]
    with _nobody_writes(folder / "ledger.bin"):
        cut_back(folder / "ledger.bin", size_bytes)
    watched = job.stop.by_step or job.stop.by_metric
    heard = tuple(recorded(run.steps, run.validations, step)) if watched else ()
    return Origin(step, checkpoint, len(run.generations), tuple(warnings), heard, run.seconds)


def _check_unfinished(run: RunFolder, job: JobSpec, step: int) -> None:
    steps = job.train.steps
    if steps is None:
        batch = job.train.global_batch
        steps = job.train.passes * -(-run.epoch_samples // batch) if run.epoch_samples else None
    if steps is not None and 0 < steps <= step:
        longer = "steps=" if job.train.steps else "epochs="
        more = 2 * (job.train.steps or job.train.passes)
        raise SpecError(
            f"{run.path} is complete: it has {step} of {steps} steps. To train longer: "
            f"instep resume {run.path} --set train.{longer}{more}"
        )


def _check_time(run: RunFolder, job: JobSpec) -> None:
    limit_s = job.stop.time_limit_s
    if limit_s is not None and run.seconds >= limit_s:
        more = f"stop.time_limit={2 * limit_s:g}"
        way = f"{run.way_on} and {more}" if run.joined else f"{run.way_on} --set {more}"
        raise SpecError(
            f"{run.path} has taken {readable_seconds(run.seconds)}, and stop.time_limit is "
            f"{readable_seconds(limit_s)}. To train longer: {way}"
        )


@contextmanager
def _nobody_writes(ledger: Path) -> Iterator[None]:
    """Wait for a worker that outlives its master by a moment."""
    if not ledger.exists():
        yield
        return
    deadline = time.monotonic() + PATIENCE_S
    with ledger.open("ab") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RunError(
                        f"another process still writes {ledger}. End it, then resume."
                    ) from None
                time.sleep(0.05)
            except OSError:
                break
        yield


def _replace(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Make room, or access."
        ) from None
