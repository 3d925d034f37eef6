"""Trains a job once for each fold of its split: `instep run JOB --folds 5`.

One fold after the other, each with all workers, as a run of its own in one folder. How far that has
come, its runs say: nothing else is kept. Nothing here imports torch. Way in: `run_folds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.client.submit import Run, resume_run, run_job
from instep.control.changed_job import check_changes
from instep.errors import DIVERGED, INTERRUPTED, RunError, SpecError
from instep.job.spec import JobSpec, as_table
from instep.report.figures.summary import finite, summarise
from instep.store.folder import numbered
from instep.store.run_folder import RunFolder
from instep.words import listed, short_number

Say = Callable[[str], object]
Metrics = dict[str, float | None]

_MAY_DIFFER = ("stop_after_steps", "threads", "device")
"""Keys of `[train]` that may be others when folds continue."""


class Folds(NamedTuple):
    """What came of the folds that were trained."""

    folder: Path
    runs: list[Path]
    folds: list[Metrics]
    """The metrics of each one's last validation; None for what was no finite number."""
    of: int
    exit_code: int

    def over_folds(self, figure: Callable[[Sequence[float]], float]) -> Metrics | None:
        """A figure of each metric over all folds; None while not all are trained."""
        if len(self.folds) < self.of:
            return None
        found: Metrics = {}
        for name in [n for n in self.folds[0] if all(n in fold for fold in self.folds)]:
            values = [value for fold in self.folds if (value := fold[name]) is not None]
            found[name] = figure(values) if len(values) == self.of else None
        return found

    def as_table(self) -> dict[str, Any]:
        """The result as plain data."""
        table = {
            "folder": str(self.folder),
            "runs": [str(run) for run in self.runs],
            "folds": self.folds,
            "mean": self.over_folds(mean),
            "deviation": self.over_folds(deviation),
        }
        cleaned: dict[str, Any] = finite(table)
        return cleaned

    def lines(self) -> list[str]:
        """The result for a person."""
        means, spread = self.over_folds(mean) or {}, self.over_folds(deviation) or {}
        lines = [f"folds   {len(self.folds)} of {self.of} trained, in {self.folder}"]
        for name, value in means.items():
            of_each = [fold[name] for fold in self.folds]
            shown = listed([_shown(each) for each in of_each], 10)
            lines.append(f"metric  {name} {_shown(value)} +- {_shown(spread[name])}   ({shown})")
        return [*lines, f"next    instep report {self.runs[0]}"] if self.runs else lines


def mean(values: Sequence[float]) -> float:
    """The arithmetic mean."""
    return sum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """The standard deviation of a sample: the squares are divided by one less than there are."""
    middle = mean(values)
    return math.sqrt(sum((value - middle) ** 2 for value in values) / (len(values) - 1))


def _shown(value: float | None) -> str:
    return "none" if value is None else short_number(value)


def run_folds(
    job: JobSpec,
    runs: Path,
    say: Say,
    *,
    named: bool = False,
    resume: bool = False,
    json_output: bool = False,
) -> Folds:
    """Train each fold of a job in turn.

    Args:
        job: with `data.folds`; which fold it says is of no meaning.
        runs: folder of run folders, in which one for all folds is made.
        say: prints a line of progress.
        named: refuse a name that is taken, rather than number it.
        resume: continue in the newest folder of this name: folds that are over stay.
        json_output: as of `run_job`.

    Raises:
        SpecError: the job cannot have folds, or is another one than that of the folds before.
        InstepError: a fold failed; the text says why.
        KeyboardInterrupt: Ctrl-C came before a fold began.
    """
    count = job.data.folds
    if not count:
        raise SpecError("folds need data.folds: give --folds 5, say.")
    if job.recipe.endswith(":__main__"):
        raise SpecError(
            "--folds is for a recipe: the loop of a script has its own data. Have the script "
            "take a fold as an argument, or train a recipe."
        )
    made = _newest(runs, job.name) if resume else _made(runs, job.name, named=named)
    folder = made.resolve()
    every = [_of_fold(job, number) for number in range(count)]
    before = [RunFolder(path) if _is_there(path := folder / fold.name) else None for fold in every]
    for fold, run in zip(every, before, strict=True):
        if run is not None:
            _check_same(run.spec, fold)
    done = Folds(folder, [], [], count, 0)
    try:
        for number, (fold, run) in enumerate(zip(every, before, strict=True), 1):
            over = run is not None and _is_over(run)
            say(f"fold    {number} of {count}{' was trained before' if over else ''}")
            trained = _trained(fold, folder, run, json_output)
            if trained.exit_code == INTERRUPTED:
                done = done._replace(exit_code=INTERRUPTED)
                break
            if over or _is_over(RunFolder(trained.path)):
                done.runs.append(trained.path)
                done.folds.append(trained.summary["metrics"])
            done = done._replace(exit_code=done.exit_code or trained.exit_code)
    finally:
        with suppress(OSError):  # as a rule there are runs in it
            folder.rmdir()
        if len(done.folds) < count and folder.exists():
            say(f"next    the same command with --resume continues in {folder}")
    return done


def _of_fold(job: JobSpec, number: int) -> JobSpec:
    data = msgspec.structs.replace(job.data, fold=number)
    return msgspec.structs.replace(job, name=f"{job.name}-fold-{number}", data=data)


def _is_there(path: Path) -> bool:
    return (path / "job.toml").exists()


def _trained(job: JobSpec, folder: Path, run: RunFolder | None, json_output: bool) -> Run:
    """A fold at its end: as it is, resumed, or begun."""
    if run is None:
        return run_job(job, folder, named=True, json_output=json_output)
    if _is_over(run):
        summary = summarise(run)
        return Run(run.path, summary, DIVERGED if summary["diverged"] else 0)
    return resume_run(run.path, changes={"workers": job.workers}, json_output=json_output)


def _is_over(run: RunFolder) -> bool:
    """Whether a fold has its result, at the end of its length or by a rule."""
    by_rule = run.outcome == "stopped" and run.ending.get("rule") != "stop_after_steps"
    return run.outcome == "completed" or by_rule


def _check_same(before: JobSpec, now: JobSpec) -> None:
    """Refuse folds of which some would have been trained otherwise than others.

    Raises:
        SpecError: names what is different.
    """
    replace = msgspec.structs.replace
    check_changes(before, replace(now, sync=replace(now.sync, defaults=before.sync.defaults)))
    for section in ("train", "stop"):
        old, new = as_table(before)[section], as_table(now)[section]
        for key in old.keys() - set(_MAY_DIFFER):
            if old[key] != new[key]:
                raise SpecError(
                    f"{section}.{key} was {old[key]!r} in the folds before and is {new[key]!r} "
                    "now: all folds are trained in the same way. Leave --resume out to begin anew."
                )


def _made(runs: Path, name: str, *, named: bool) -> Path:
    runs.mkdir(parents=True, exist_ok=True)
    for candidate in numbered(f"{name}-folds"):
        try:
            (runs / candidate).mkdir()
        except FileExistsError:
            if named:
                raise RunError(
                    f"{runs / candidate} exists. Choose another --name, or continue it with "
                    "--resume."
                ) from None
        else:
            return runs / candidate
    raise AssertionError("names are counted without end")


def _newest(runs: Path, name: str) -> Path:
    newest = None
    for candidate in numbered(f"{name}-folds"):
        if not (runs / candidate).is_dir():
            break
        newest = runs / candidate
    if newest is None:
        raise RunError(
            f"--resume: there is no {runs / f'{name}-folds'}, so no folds to continue. Leave "
            "--resume out to begin."
        )
    return newest
