"""Predicts a whole dataset with a trained model, on worker processes of this machine.

Batches are fixed by the job, each is computed alone, and its result is written to a folder
beside the file that is asked for; at the end they are put together. So the numbers do not
depend on how many workers there are, and what was done is kept, whatever ends the command.
Nothing here imports torch. Way in: `predict`.
"""

from __future__ import annotations

import hashlib
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep import spec_file
from instep.client.predict_master import Ended, PredictMaster
from instep.client.results import _version
from instep.control.resume import check_own
from instep.errors import CheckpointError, InstepError, RunError, SpecError, file_beside
from instep.formats import INSTEP
from instep.launch.fork_server import MOST_PAGES
from instep.spec import JobSpec, LaunchSpec, MeshSpec, StartSpec, SyncSpec, as_table
from instep.state.export import copy_model
from instep.state.intact import newest_intact
from instep.state.manifest import published, read_manifest
from instep.state.model_file import check_hash
from instep.store.joined import Published, publish
from instep.store.predictions import COPY, FORMATS, Damaged, Plan, Predictions
from instep.store.run_folder import RunFolder
from instep.system.processes import on_signals
from instep.units import readable_seconds
from instep.words import plural, ranges

_MOST_DAMAGED = 2
"""A part that was damaged more often is not predicted again."""

_REFUSALS = (2, 3, 4, 7)
"""Exit codes of errors that a worker's log says no more about."""

_TRAIN = ("precision", "threads", "device", "determinism")
"""Keys of `[train]` that decide numbers here too."""


@dataclass(frozen=True)
class Predicted:
    """The result of a command."""

    out: Path
    """The file of all predictions; not there if `interrupted`."""
    model: str
    """The file that the model was loaded from."""
    step: int | None
    """Of its checkpoint, if it is from one."""
    workers: int
    batch: int
    """Samples of a batch."""
    ended: Ended
    taken_up: int
    """Batches that an earlier command had predicted."""
    seconds: float
    published: Published | None
    """None if a signal has ended the command before."""

    def lines(self) -> list[str]:
        """For a terminal."""
        step = f" (step {self.step})" if self.step is not None else ""
        if self.published is None:
            kept = self.taken_up + self.ended.predicted
            return [
                f"kept       {plural(kept, 'part')}, a part for each batch",
                "next       the same command predicts the others",
            ]
        rate = self.ended.predicted * self.batch / max(self.seconds, 1e-9)
        said = f"{plural(self.ended.samples, 'sample')}, {readable_seconds(self.seconds)}"
        lines = [f"predicted  {said}, {rate:,.0f} samples/s", f"model      {self.model}{step}"]
        for name, found in self.published.outputs.items():
            lines.append(f"output     {name}: {found['dtype']} {found['shape']}")
        if skipped := self.published.skipped:
            lines.append(
                f"skipped    {plural(len(skipped), 'sample')}: {ranges([s for s, _ in skipped], 6)}"
            )
        lines.append(f"written    {self.out}")
        return [*lines, f"next       {_OPENED[self.out.suffix].format(str(self.out))}"]

    def as_table(self) -> dict[str, Any]:
        """For `--json`."""
        found = self.published
        return {
            "out": str(self.out) if found else None,
            "model": self.model,
            "step": self.step,
            "samples": self.ended.samples,
            "outputs": found.outputs if found else {},
            "skipped": [list(each) for each in found.skipped] if found else [],
            "batches_predicted": self.ended.predicted,
            "batches_taken_up": self.taken_up,
            "workers": self.workers,
            "workers_lost": self.ended.lost,
            "interrupted": self.ended.interrupted,
            "seconds": self.seconds,
        }


_OPENED = {
    ".safetensors": "safetensors.torch.load_file({!r})",
    ".npz": "numpy.load({!r})",
    ".jsonl": "pandas.read_json({!r}, lines=True)",
}


class _Model(NamedTuple):
    """Which model predicts."""

    job: JobSpec
    path: Path
    step: int | None = None
    checkpoint: Path | None = None
    """Where the path is in a checkpoint, which may be deleted."""


def predict(
    of: Path,
    data: str,
    out: Path,
    say: Callable[[str], None],
    *,
    recipe: str | None = None,
    workers: int | None = None,
    batch: int | None = None,
    overrides: Iterable[str] = (),
) -> Predicted:
    """Predict every sample of a dataset once, and write the outputs in its order.

    Args:
        of: a run folder, or a safetensors file.
        data: `file.py:function`; the function returns a dataset.
        out: file to write; its suffix is one of `FORMATS`, and it does not exist.
        say: prints a line of progress.
        recipe: `file.py:function`, which builds the model; needed for a file.
        workers: processes; by default as many as the job has.
        batch: samples of a batch; by default as many as in a validation of the job.
        overrides: `section.key=value`, changes of the job.

    Raises:
        InstepError: nothing was started, or a worker failed; the text says why. What was
            predicted is kept, and taken up by the same call.
    """
    began = time.time()
    if out.suffix not in FORMATS:
        raise SpecError(f"--out '{out}': the file's name needs to end in {_or(FORMATS)}.")
    folder = Predictions(out.resolve())
    reference = _data(data)
    source = _source(of, recipe, list(overrides))
    job = _for_workers(source.job, workers)
    new = not folder.path.exists()
    if new and out.exists():
        raise SpecError(f"--out '{out}' exists already. Name another file, or remove that one.")
    with folder.held():
        try:
            plan = _begin(folder, source, job, of, reference, batch)
        except InstepError:
            if new:
                folder.remove()
            raise
        taken_up = len(folder.done())
        say(_opening(plan, job, taken_up))
        ended = _predicted(folder, plan, job, say)
        published, damaged = None, Counter[int]()
        while not ended.interrupted and published is None:
            try:
                published = publish(folder, ended.samples, plan.batch)
            except Damaged as error:  # the machine crashed, or something else wrote there
                number = error.args[0]
                damaged[number] += 1
                _check_damage(folder, number, damaged[number])
                say(f"the part of batch {number} is damaged; it is predicted again")
                folder.drop(number)
                again = _predicted(folder, plan, job, say)
                ended = again._replace(
                    predicted=ended.predicted + again.predicted, lost=ended.lost + again.lost
                )
        if ended.interrupted and not folder.done():
            folder.remove()
    return Predicted(
        out=out,
        model=plan.model,
        step=plan.step,
        workers=job.workers,
        batch=plan.batch,
        ended=ended,
        taken_up=taken_up,
        seconds=time.time() - began,
        published=published,
    )


def _check_damage(folder: Predictions, number: int, times: int) -> None:
    if times > _MOST_DAMAGED:
        raise RunError(
            f"the part of batch {number} in {folder.path} was damaged {times} times: look at the "
            "disk, and at what else writes there."
        )


def _or(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def _opening(plan: Plan, job: JobSpec, taken_up: int) -> str:
    step = f" (step {plan.step})" if plan.step is not None else ""
    before = f"; {taken_up} batches are there already" if taken_up else ""
    return f"predicting with {plan.model}{step}, workers: {job.workers}{before}"


def _predicted(folder: Predictions, plan: Plan, job: JobSpec, say: Callable[[str], None]) -> Ended:
    """Have all batches predicted that have no part."""
    asked: list[int] = []
    with on_signals(lambda number, _: asked.append(number)):
        try:
            return PredictMaster(job, folder, plan.batch, job.workers, say, asked).serve()
        except InstepError as error:
            if not folder.done() and error.exit_code in _REFUSALS:
                raise _without_folder(error, folder) from None
            if kept := len(folder.done()):
                again = f"  {plural(kept, 'part')} kept in {folder.path}, for the same command"
                error.args = (f"{error}\n{again}",)
            raise


def _without_folder(error: InstepError, folder: Predictions) -> InstepError:
    """The error of a command that was refused; its folder goes, and with it the logs."""
    lines = [line for line in str(error).splitlines() if str(folder.path) not in line]
    error.args = ("\n".join(lines),)
    folder.remove()
    return error


# ---- what was asked for


def _source(of: Path, recipe: str | None, overrides: list[str]) -> _Model:
    """The job, and the file of the model.

    Raises:
        InstepError: there is no such run or file, or it has no model.
    """
    if of.is_dir():
        return _of_run(of, recipe, overrides)
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
    spec_file.apply_overrides(table, overrides)
    job = spec_file.build(table, source="instep predict")
    return _Model(spec_file.absolute(job, Path.cwd()), of.resolve())


def _of_run(path: Path, recipe: str | None, overrides: list[str]) -> _Model:
    run = RunFolder(path)
    job = spec_file.load(path / "job.toml", overrides)
    if recipe is not None:
        job = msgspec.structs.replace(job, recipe=recipe)
        job = spec_file.absolute(job, Path.cwd())
    elif job.recipe.endswith(":__main__"):
        raise SpecError(
            f"{path} was trained by a script with a loop of its own. Give --recipe "
            "FILE.py:function, a recipe that builds the same model."
        )
    model = path.resolve() / COPY
    saved = int(run.last("model_saved").get("step", 0)) if model.is_file() else -1
    newest = next(iter(published(path / "checkpoints")), (-1, path))[0]
    if newest > saved:
        chosen, refused = newest_intact(
            path / "checkpoints", lambda at, manifest: check_own(path, at, manifest)
        )
        if chosen is not None and (step := read_manifest(chosen).step) > saved:
            return _Model(job, chosen / COPY, step, chosen)
        if saved < 0:
            raise CheckpointError(refused[0])
    if saved < 0:
        raise RunError(
            f"{path} has no model yet: the run is {run.outcome}, and has kept no checkpoint."
        )
    check_hash(model, required=True)
    return _Model(job, model)


def _for_workers(job: JobSpec, workers: int | None) -> JobSpec:
    """The job as workers that predict get it: nothing of it is about groups or other machines."""
    count = job.workers if workers is None else workers
    if not 1 <= count <= MOST_PAGES:
        raise SpecError(f"--workers {count}: needs a number from 1 to {MOST_PAGES}.")
    return msgspec.structs.replace(
        job,
        workers=count,
        mesh=MeshSpec(),
        launch=LaunchSpec(),
        sync=SyncSpec(),
        start=StartSpec(),
    )


def _begin(
    folder: Predictions,
    source: _Model,
    job: JobSpec,
    of: Path,
    data: tuple[Path, str],
    batch: int | None,
) -> Plan:
    """Write the plan, or take up the same one."""
    if batch is not None and batch < 1:
        raise SpecError(f"--batch {batch}: needs a number of samples above 0.")
    if of.is_dir() and folder.out.is_relative_to(of.resolve()):
        raise SpecError(
            f"--out '{folder.out}' lies in the run folder {of}, which holds only the run's files. "
            "Name a file elsewhere."
        )
    before, model, step = folder.begun(), source.path, source.step
    if source.checkpoint is not None:
        model = folder.path / COPY
        if before is not None and before.model == str(model) and model.is_file():
            step = before.step  # the run may have saved others since
        else:
            try:
                copy_model(source.checkpoint, model)
            except OSError as error:
                raise RunError(f"{model} cannot be written: {error.strerror}.") from None
    elif before is not None and before.model == str(folder.path / COPY):
        model, step = folder.path / COPY, before.step  # the run has ended since
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
        batch=batch or _batch_of(job),
        format=folder.out.suffix,
        job={
            "recipe": job.recipe,
            "arguments": table["arguments"],
            "seed": job.seed,
            "unreadable": job.data.unreadable,
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


def _data(given: str) -> tuple[Path, str]:
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


def _batch_of(job: JobSpec) -> int:
    """Samples of a batch, as in a validation of the job."""
    train = job.train
    return -(-train.global_batch // (train.micro_batches if train.merge == "never" else 1))


def _sha256(file: Path) -> str:
    if not file.is_file():
        return ""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
