"""What a command predicts: which model, with which job, over which data.

Nothing is started here. Ways in: `source_of`, `data_of` and `begin`.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.client.job_checks import check_mesh
from instep.client.results import _version
from instep.control.resume import check_own
from instep.errors import CheckpointError, RunError, SpecError, file_beside
from instep.formats import INSTEP
from instep.job import file as spec_file
from instep.job.launch import LaunchSpec
from instep.job.overrides import apply_overrides
from instep.job.spec import JobSpec, as_table
from instep.job.start import StartSpec
from instep.job.sync import SyncSpec
from instep.launch.forking import MOST_PAGES
from instep.state.export.export import copy_model
from instep.state.files.manifest import published, read_manifest
from instep.state.files.model_file import check_hash
from instep.state.intact import newest_intact
from instep.store.predictions import COPY, Plan, Predictions
from instep.store.run_folder import RunFolder

_WANTED = ("recipe", "workers", "mesh")
"""Keys that say how many processes there are, and what they share."""

_TRAIN = ("precision", "threads", "device", "determinism")
"""Keys of `[train]` that decide numbers here too."""


class PredictSource(NamedTuple):
    """Which model predicts, and how."""

    job: JobSpec
    """As workers that predict get it: nothing of it is about groups or other machines."""
    batch: int
    """Samples of a batch, as in a validation of the job."""
    path: Path
    """The file of the model."""
    step: int | None = None
    checkpoint: Path | None = None
    """Where the path is in a checkpoint, which may be deleted."""


def source_of(
    of: Path, recipe: str | None, overrides: Sequence[str], workers: int | None
) -> PredictSource:
    """The job, and the file of the model.

    Args:
        of: a run folder, or a safetensors file.
        recipe: `file.py:function`, relative to the present folder; needed for a file.
        overrides: `section.key=value`, changes of the job.
        workers: processes; by default as many as the job has.

    Raises:
        InstepError: there is no such run or file, it has no model, or the job cannot predict.
    """
    if of.is_dir():
        return _of_run(of, recipe, overrides, workers)
    if not of.exists():
        raise SpecError(f"there is no run folder or file {str(of)!r}. {file_beside(of, '*')}")
    if of.suffix != ".safetensors":
        raise SpecError(f"{of}: a run folder is wanted, or a model file that ends in .safetensors.")
    if recipe is None:
        raise SpecError(
            f"{of} is a model file, which does not say how the model is built. Give "
            "--recipe FILE.py:function, the recipe that it was trained with."
        )
    check_hash(of)
    table: dict[str, Any] = {"recipe": recipe}
    job, batch = _job_of(table, overrides, workers, "instep predict")
    return PredictSource(spec_file.absolute(job, Path.cwd()), batch, of.resolve())


def _of_run(
    path: Path, recipe: str | None, overrides: Sequence[str], workers: int | None
) -> PredictSource:
    run, file = RunFolder(path), path / "job.toml"
    job, batch = _job_of(spec_file.read_table(file), overrides, workers, str(file))
    if recipe is not None:
        job = msgspec.structs.replace(job, recipe=recipe)
    elif job.recipe.endswith(":__main__"):
        raise SpecError(
            f"{path} was trained by a script with a loop of its own. Give --recipe "
            "FILE.py:function, a recipe that builds the same model."
        )
    job = spec_file.absolute(job, path if recipe is None else Path.cwd())
    model = path.resolve() / COPY
    saved = int(run.last("model_saved").get("step", 0)) if model.is_file() else -1
    newest = next(iter(published(path / "checkpoints")), (-1, path))[0]
    if newest > saved:
        chosen, refused = newest_intact(
            path / "checkpoints", lambda at, manifest: check_own(path, at, manifest)
        )
        if chosen is not None and (step := read_manifest(chosen).step) > saved:
            return PredictSource(job, batch, chosen / COPY, step, chosen)
        if saved < 0:
            raise CheckpointError(refused[0])
    if saved < 0:
        raise RunError(
            f"{path} has no model yet: the run is {run.outcome}, and has kept no checkpoint."
        )
    check_hash(model, required=True)
    return PredictSource(job, batch, model)


def _job_of(
    table: dict[str, Any], overrides: Sequence[str], workers: int | None, source: str
) -> tuple[JobSpec, int]:
    """The job of processes that predict, and the samples of a batch.

    They have no steps, so a job's micro-batches do not limit how many there are, and the keys of a
    mesh that are about training do not count.
    """
    typed = apply_overrides(table, overrides)
    if workers is not None:
        table["workers"] = workers
    given = spec_file.build({**table, "workers": 1, "mesh": {}}, source=source, typed=typed)
    many = {"global_batch": MOST_PAGES, "micro_batches": MOST_PAGES}
    wanted: dict[str, Any] = {key: table[key] for key in _WANTED if key in table}
    found = spec_file.build({**wanted, "train": many}, source=source, typed=typed)
    mesh = msgspec.structs.replace(found.mesh, checkpointing="none", offload="none", compile="none")
    check_mesh(mesh)
    parts = max(given.train.micro_batches, found.workers)
    train = {"micro_batches": parts, "global_batch": max(given.train.global_batch, parts)}
    job = msgspec.structs.replace(
        given,
        workers=found.workers,
        mesh=mesh,
        train=msgspec.structs.replace(given.train, **train),
        launch=LaunchSpec(),
        sync=SyncSpec(),
        start=StartSpec(),
    )
    return job, given.train.validation_batch


def begin(
    folder: Predictions,
    source: PredictSource,
    of: Path,
    data: tuple[Path, str],
    batch: int | None,
) -> Plan:
    """Write the plan, or take up the same one.

    Args:
        folder: beside the file that is asked for.
        source: from `source_of`.
        of: the run folder or model file that was named.
        data: file and function, from `data_of`.
        batch: samples of a batch, instead of the job's.

    Raises:
        InstepError: the folder is of another command, or cannot be written.
    """
    job = source.job
    if batch is not None and batch < 1:
        raise SpecError(f"--batch {batch}: needs a number of samples above 0.")
    if of.is_dir() and folder.out.is_relative_to(of.resolve()):
        raise SpecError(
            f"--out '{folder.out}' lies in the run folder {of}, which holds only the run's files. "
            "Name a file elsewhere."
        )
    model, step = _model_of(folder, source)
    table = as_table(job)
    numbers = {key: table["train"][key] for key in _TRAIN}
    plan = Plan(
        of=str(of.resolve()),
        model=str(model),
        model_sha256=_sha256(model),
        step=step,
        data=":".join(map(str, data)),
        data_sha256=_sha256(data[0]),
        recipe_sha256=_sha256(Path(job.recipe.rpartition(":")[0])),
        batch=batch or source.batch,
        format=folder.out.suffix,
        job={
            "recipe": job.recipe,
            "arguments": table["arguments"],
            "seed": job.seed,
            "unreadable": job.data.unreadable,
            # sums along these axes round otherwise, along `shard` nothing is summed
            "mesh": [job.mesh.tensor, job.mesh.stages],
            **numbers,
        },
        versions={
            "python": platform.python_version(),
            "instep": INSTEP,
            "torch": _version("torch"),
        },
    )
    folder.begin(plan)
    return plan


def _model_of(folder: Predictions, source: PredictSource) -> tuple[Path, int | None]:
    """The file that predicts, and its step; copied out of a checkpoint, which may be deleted."""
    before, copy = folder.begun(), folder.path / COPY
    if before is not None and before.model != str(copy):
        before = None
    if source.checkpoint is None:  # or the run has ended since
        return (source.path, source.step) if before is None else (copy, before.step)
    if before is not None and copy.is_file():
        return copy, before.step  # the run may have saved others since
    try:
        copy_model(source.checkpoint, copy)
    except OSError as error:
        raise RunError(f"{copy} cannot be written: {error.strerror}.") from None
    return copy, source.step


def data_of(given: str) -> tuple[Path, str]:
    """File and function of `--data`."""
    file, _, function = given.rpartition(":")
    if not file or not function:
        raise SpecError(
            f"--data {given!r}: needs a file and a function in it, as net.py:test_data."
        )
    path = Path(file).expanduser().resolve()
    if not path.is_file():
        raise SpecError(f"--data {given!r}: there is no such file. {file_beside(path, '*.py')}")
    return path, function


def _sha256(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
