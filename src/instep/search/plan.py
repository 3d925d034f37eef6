"""The job that the trials of a search share, and the job of one trial. No process, no file.

Ways in: `base_of` before a search, `trial_job` for each trial.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection
from pathlib import Path

import msgspec

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.overrides import apply_overrides
from instep.job.search import SearchSpec, Value
from instep.job.spec import JobSpec
from instep.search.results import Values, name_of

_SET = {"train.determinism": '"bits"', "train.threads": "1", "checkpoint.every": '"30s"'}
"""Values that a search sets, unless the job or an option does: the same bits at any number of
workers, and little to compute again after a kill."""


def base_of(path: Path, overrides: Collection[str]) -> JobSpec:
    """The job that all trials share.

    Args:
        path: of the job file.
        overrides: `section.key=value`.

    Raises:
        SpecError: it is wrong, has nothing to search, or cannot be searched.
    """
    given = spec_file.read_table(path)
    told = {each.partition("=")[0].strip() for each in overrides}
    train = {**given.get("train", {}), **{key.partition(".")[2]: 0 for key in told}}
    more = []
    for key, value in _SET.items():
        section, _, name = key.partition(".")
        exact = key == "train.determinism" and {"merge", "batch_norm"} & {*train}
        if name not in given.get(section, {}) and key not in told and not exact:
            more.append(f"{key}={value}")
    job = spec_file.load(path, [*more, *overrides])
    if not job.search.space:
        raise SpecError(
            f"{path} has no [search.space]: say which keys to try, such as "
            '"arguments.lr" = { low = 1e-5, high = 0.1, log = true }.'
        )
    metric = job.search.metric or job.stop.metric
    if metric != job.stop.metric and job.stop.by_metric:
        raise SpecError(
            f"search.metric = {metric!r}, but the rules of [stop] watch {job.stop.metric!r}: a run "
            "has one metric. Leave search.metric out, or change stop.metric."
        )
    if job.stop.bounds and job.search.prune != "none":
        raise SpecError(
            "stop.bounds and search.prune are both set, and a search sets the bounds of its trials "
            "itself. Leave one of them out."
        )
    if job.train.stop_after_steps or job.stop.time_limit is not None:
        raise SpecError(
            "train.stop_after_steps and stop.time_limit would end trials before their result, or "
            "by the clock. Leave them out; train.steps is the length of a trial."
        )
    replace = msgspec.structs.replace
    return replace(job, stop=replace(job.stop, metric=metric))


def trial_job(
    base: JobSpec, number: int, values: Values, bounds: tuple[tuple[int, float], ...]
) -> JobSpec:
    """The job of one trial: an ordinary one, which `instep run` trains alike.

    Raises:
        SpecError: its values are not what a job can have.
    """
    table = tomllib.loads(spec_file.dump(base))
    del table["search"]
    words = [f"{key}={_as_toml(value)}" for key, value in values.items()]
    typed = apply_overrides(table, words)
    job = spec_file.build(table, source=name_of(number), typed=typed)
    replace = msgspec.structs.replace
    stop = replace(job.stop, bounds=bounds or job.stop.bounds)
    return replace(job, name=name_of(number), stop=stop, search=SearchSpec())


def check_space(base: JobSpec) -> None:
    """Refuse a key that a job does not have, before any trial.

    Raises:
        SpecError: names it.
    """
    for key, each in base.search.ranges.items():
        for value in each.choices or (each.low, each.high):
            trial_job(base, 0, {key: value}, ())


def same_search(before: str, now: JobSpec) -> str:
    """The first line in which the job of a search is another one now; empty if none is."""
    old, new = _comparable(spec_file.build(tomllib.loads(before), source="the search")), now
    lines = zip(old, _comparable(new), strict=False)
    return next((f"{was!r} is now {given!r}" for was, given in lines if was != given), "")


def _comparable(job: JobSpec) -> list[str]:
    replace = msgspec.structs.replace
    search = replace(job.search, trials=1, keep=1)
    return spec_file.dump(replace(job, workers=job.mesh.ranks, search=search)).splitlines()


def _as_toml(value: Value) -> str:
    return json.dumps(value) if isinstance(value, str | bool) else repr(value)
