"""Begins a search, or continues the one that is in its folder. Way in: `run_search`."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from instep.client.job_checks import check_job
from instep.errors import RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.search.plan import base_of, check_space, same_search
from instep.search.record import FILE, SearchRecord, locked
from instep.search.results import ToldTrial, best_of, name_of
from instep.search.sampling import TrialSampler
from instep.search.search import Search
from instep.system.processes import interrupt, on_signals

Tell = Callable[[Search, int, ToldTrial], object]
Look = Callable[[Search], object]


class SearchState(NamedTuple):
    """The trials of a search so far."""

    folder: Path
    job: JobSpec
    trials: int
    told: dict[int, ToldTrial]
    interrupted: bool = False

    @property
    def best(self) -> int | None:
        """The number of the best completed trial."""
        return next(iter(best_of(self.told, self.job.stop.upwards)), None)

    def as_table(self) -> dict[str, Any]:
        """Plain data."""
        best = self.best
        return {
            "search": str(self.folder),
            "metric": self.job.stop.metric,
            "trials": [
                {"trial": name_of(n), "values": dict(each.values), **each.result._asdict()}
                for n, each in sorted(self.told.items())
            ],
            "of": self.trials,
            "best": None if best is None else str(self.folder / name_of(best)),
        }


def run_search(
    path: Path,
    overrides: Collection[str],
    runs: Path,
    *,
    name: str | None,
    capacity: int | Path | None,
    tell: Tell,
    look: Look = lambda search: None,
) -> SearchState:
    """Search to the end: begin, or continue what is there.

    Args:
        path: of the job file, or the folder of a search.
        overrides: `section.key=value`.
        runs: folder of run folders.
        name: of the search's folder in it; by default that of the job, with `-search`.
        capacity: worker processes at once, or a file that says how many; by default the cores of
            this machine.
        tell: called for each trial that is over.
        look: called several times a second; must not block.

    Raises:
        InstepError: the job is wrong, or its trials cannot be run.
    """
    if path.is_dir():
        folder, job = path, with_overrides(path, overrides)
    else:
        job = base_of(path, overrides)
        folder = runs / (name or f"{job.name}-search")
    _check(job, folder)
    trials = TrialSampler(job.search, job.seed, upwards=job.stop.upwards).trials
    folder.mkdir(parents=True, exist_ok=True)
    folder = folder.resolve()
    with locked(folder), SearchRecord(folder, write=True) as record:
        before = record.about().get("job")
        if before is not None and (changed := same_search(before, job)):
            raise RunError(
                f"{folder} has a search of another job: {changed}. Choose another --name, or give "
                "the job as it was."
            )
        _check_trials(trials, len(record.results()), len(record.chosen()))
        record.keep_about({"job": spec_file.dump(job)})
        search: Search
        search = Search(
            folder,
            job,
            record,
            capacity or max(os.cpu_count() or 1, job.mesh.ranks),
            lambda number, told: tell(search, number, told),
            look,
        )
        interrupted = False
        try:
            with on_signals(interrupt):
                search.conduct()
        except KeyboardInterrupt:
            interrupted = True
        return SearchState(folder, job, trials, search.results, interrupted)


def found_in(folder: Path) -> SearchState:
    """Read the search in a folder.

    Raises:
        RunError: it is not the folder of a search.
    """
    with SearchRecord(folder, write=False) as record:
        job = _job_in(record, folder)
        return SearchState(folder, job, job.search.count, record.results())


def with_overrides(folder: Path, overrides: Collection[str]) -> JobSpec:
    """The job of the search in a folder.

    Raises:
        RunError: it is not the folder of a search.
        SpecError: an override is wrong.
    """
    from instep.job.overrides import apply_overrides

    with SearchRecord(folder, write=False) as record:
        table = tomllib.loads(spec_file.dump(_job_in(record, folder)))
    typed = apply_overrides(table, overrides)
    return spec_file.build(table, source=str(folder), typed=typed)


def _job_in(record: SearchRecord, folder: Path) -> JobSpec:
    text = record.about().get("job")
    if text is None:
        raise RunError(f"{folder} has a search that never began. Remove the folder.")
    try:
        table = tomllib.loads(text)
    except ValueError as error:
        raise RunError(
            f"the job of the search in {folder} is damaged: {error}. Begin another with --name."
        ) from None
    return spec_file.build(table, source=str(folder))


def _check(job: JobSpec, folder: Path) -> None:
    """Refuse a search before its folder is made."""
    if job.launch.launcher != "local":
        raise SpecError(
            f"a search runs its trials on this machine, and the job has launch.on = "
            f"{job.launch.launcher!r}. Leave it out."
        )
    check_job(job)
    check_space(job)
    if (folder / "job.toml").exists() or (folder.exists() and not _is_search(folder)):
        raise RunError(f"{folder} exists and is not a search. Choose another --name.")


def _check_trials(trials: int, told: int, chosen: int) -> None:
    """Refuse fewer trials than are chosen: of those that run, which ended first would decide."""
    if trials < chosen:
        raise SpecError(
            f"search.trials = {trials}: this search has {told} trials that are over, and "
            f"{chosen - told} that have begun. Ask for {chosen} or more, or begin another search "
            "with --name."
        )


def _is_search(folder: Path) -> bool:
    return (folder / FILE).exists() or not any(folder.iterdir())
