"""Predicts a whole dataset with a trained model, on worker processes of this machine.

Batches are fixed by the job, each is computed alone, and its result is written to a folder
beside the file that is asked for; at the end they are put together. So the numbers do not
depend on how many workers there are, and what was done is kept, whatever ends the command.
Nothing here imports torch. Way in: `predict`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from instep.client.predict.master import PredictEnded, PredictMaster
from instep.client.predict.plan import begin, data_of, source_of
from instep.errors import InstepError, RunError, SpecError
from instep.job.spec import JobSpec
from instep.launch.forking import MOST_PAGES
from instep.store.joined import Published, publish
from instep.store.predictions import FORMATS, SHARDS, Damaged, Plan, Predictions
from instep.system.processes import on_signals
from instep.units import readable_seconds
from instep.words import plural, ranges

_MOST_DAMAGED = 2
"""A part that was damaged more often is not predicted again."""

_REFUSALS = (2, 3, 4, 7)
"""Exit codes of errors that a worker's log says no more about."""


@dataclass(frozen=True)
class PredictResult:
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
    ended: PredictEnded
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
    SHARDS: "instep.data.sources.shards({!r})",
}


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
) -> PredictResult:
    """Predict every sample of a dataset once, and write the outputs in its order.

    Args:
        of: a run folder, or a safetensors file.
        data: `file.py:function`; the function returns a dataset.
        out: file to write; its suffix is one of `FORMATS`, or it has none and is a
            folder of shards. It does not exist.
        say: prints a line of progress.
        recipe: `file.py:function`, which builds the model; needed for a file.
        workers: processes; by default as many as the job has. They make whole replicas.
        batch: samples of a batch; by default as many as in a validation of the job.
        overrides: `section.key=value`, changes of the job.

    Raises:
        InstepError: nothing was started, or a worker failed; the text says why. What was
            predicted is kept, and taken up by the same call.
    """
    began = time.time()
    _check_format(out)
    folder, reference = Predictions(out.resolve()), data_of(data)
    if workers is not None and not 1 <= workers <= MOST_PAGES:
        raise SpecError(f"--workers {workers}: needs a number from 1 to {MOST_PAGES}.")
    source = source_of(of, recipe, list(overrides), workers)
    new = not folder.path.exists()
    if new and out.exists():
        raise SpecError(f"--out '{out}' exists already. Name another file, or remove that one.")
    with folder.held():
        try:
            plan = begin(folder, source, of, reference, batch)
        except InstepError:
            if new:
                folder.remove()
            raise
        taken_up = len(folder.done())
        say(_opening(plan, source.job, taken_up))
        ended, published = _published(folder, plan, source.job, say)
        if ended.interrupted and not folder.done():
            folder.remove()
    return PredictResult(
        out=out,
        model=plan.model,
        step=plan.step,
        workers=source.job.workers,
        batch=plan.batch,
        ended=ended,
        taken_up=taken_up,
        seconds=time.time() - began,
        published=published,
    )


def _check_format(out: Path) -> None:
    if out.suffix not in (*FORMATS, SHARDS):
        raise SpecError(
            f"--out '{out}': the file's name needs to end in {_or(FORMATS)}; a name without a "
            "suffix is a folder of shards."
        )
    if out.suffix == SHARDS and not find_spec("pyarrow"):
        raise SpecError(f"--out '{out}': shards need pyarrow: pip install 'instep[data]'.")


def _published(
    folder: Predictions, plan: Plan, job: JobSpec, say: Callable[[str], None]
) -> tuple[PredictEnded, Published | None]:
    """Predict what has no part yet, and put the parts together, unless a signal comes."""
    ended = _predicted(folder, plan, job, say)
    damaged = Counter[int]()
    while not ended.interrupted:
        try:
            return ended, publish(folder, ended.samples, plan.batch)
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
    return ended, None


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
    mesh = f" in replicas of {job.mesh.ranks} ([mesh] {job.mesh.axes})" if job.mesh.axes else ""
    return f"predicting with {plan.model}{step}, workers: {job.workers}{mesh}{before}"


def _predicted(
    folder: Predictions, plan: Plan, job: JobSpec, say: Callable[[str], None]
) -> PredictEnded:
    """Have all batches predicted that have no part."""
    asked: list[int] = []
    with on_signals(lambda number, _: asked.append(number)):
        try:
            return PredictMaster(job, folder, plan.batch, say, asked).serve()
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
