"""The table `[search]` of a job: which values to try, and how they are chosen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from msgspec import field

from instep.job.base import Positive, Section

Value = bool | int | float | str

MOST_CHOICES = 10_000
"""Most values of one key, and points of a grid."""


class Range(NamedTuple):
    """The values of one key that may be tried: between two numbers, or from a list."""

    low: float = 0.0
    high: float = 0.0
    log: bool = False
    """Whether equal ratios are equally likely, instead of equal differences."""
    step: float | None = None
    whole: bool = False
    choices: tuple[Value, ...] = ()
    """Where there are any, the rest is of no meaning."""


class SearchSpec(Section, frozen=True, kw_only=True):
    """Values that `instep search` tries, how it chooses them, and when it ends a trial early."""

    trials: Positive = 40
    """How many trials; with `sampler = "grid"` at most the points of the grid."""

    width: Positive = 4
    """Trials in flight: trial n is chosen once trials 0 to n - width have their result, whatever
    the machines. More: less informed, more parallel."""

    metric: str = ""
    """The metric of validations by which trials are compared; that of `stop.metric` if left out.
    `stop.mode` says which way is better."""

    sampler: Literal["tpe", "random", "grid", "qmc", "gp", "cmaes"] = "tpe"
    """How values are chosen: Optuna's tree-structured Parzen estimator, at random, all points of a
    grid in turn, a scrambled Sobol sequence, or Optuna's Gaussian process or CMA-ES."""

    prune: Literal["none", "halving", "median"] = "none"
    """Which trials end early, at a rung: with `halving` those not in the best quarter of the
    trials that got there, with `median` those worse than half of the completed ones."""

    rungs: tuple[Positive, ...] = ()
    """Numbers of the validations at which trials are compared, such as `[1, 3, 9]`: epochs, unless
    `train.validate_every` says otherwise."""

    keep: Positive = 3
    """How many of the best trials keep their model and checkpoints."""

    space: dict[str, Any] = field(default_factory=dict)
    """Keys of the job in quotes, each with its values: a list, `{ low = 1e-5, high = 0.1,
    log = true }`, or `{ whole = [16, 256], log = true }`; `step` cuts a range evenly."""

    @property
    def ranges(self) -> dict[str, Range]:
        """The values of each key, in the order of the keys' names."""
        return {key: _range(key, value) for key, value in sorted(_keys("", self.space))}

    @property
    def grid(self) -> list[tuple[Value, ...]]:
        """The values of each key of a grid, in the same order."""
        return [points(key, each) for key, each in self.ranges.items()]

    @property
    def count(self) -> int:
        """Number of trials: a grid may have fewer points than `trials`."""
        if self.sampler != "grid":
            return self.trials
        return min(self.trials, math.prod(len(each) for each in self.grid))

    def __post_init__(self) -> None:
        ranges = self.ranges
        for key in ranges:
            if key.split(".")[0] in _FIXED or key in _FIXED:
                raise ValueError(
                    f"space has the key {key!r}: it decides nothing about the model, or what "
                    "a trial is. Leave it out."
                )
        if [*self.rungs] != sorted(set(self.rungs)):
            raise ValueError(f"rungs = {[*self.rungs]}: needs each rung once, in order.")
        if self.prune != "none" and not self.rungs:
            raise ValueError(
                f"prune = {self.prune!r} without rungs: say at which validations trials are "
                "compared, such as rungs = [1, 3, 9]."
            )
        if self.sampler == "grid":
            count = math.prod(len(each) for each in self.grid)
            if count > MOST_CHOICES:
                raise ValueError(f"sampler = 'grid': {count} points are more than {MOST_CHOICES}.")


_FIXED = ("search", "workers", "name", "launch", "cluster", "network", "report", "stop", "format")


def points(key: str, values: Range) -> tuple[Value, ...]:
    """The values of a key that a grid tries.

    Raises:
        ValueError: the range has no step to cut it by.
    """
    if values.choices:
        return values.choices
    step = values.step or (1 if values.whole and not values.log else None)
    if step is None:
        raise ValueError(
            f"space: {key!r} is a range, and a grid needs points. Give a list, or a step."
        )
    count = math.floor((values.high - values.low) / step + 1e-9) + 1
    if count > MOST_CHOICES:
        raise ValueError(f"space: {key!r} has {count} points, more than {MOST_CHOICES}.")
    found = [values.low + number * step for number in range(count)]
    return tuple(int(each) for each in found) if values.whole else tuple(found)


def _keys(outer: str, table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Keys with their values, also where a table holds them (`arguments.lr` without quotes)."""
    for key, value in table.items():
        where = f"{outer}.{key}".lstrip(".")
        if isinstance(value, Mapping) and not {"low", "high", "whole", "log", "step"} & {*value}:
            yield from _keys(where, value)
        else:
            yield where, value


def _range(key: str, value: Any) -> Range:
    """One entry of `space`.

    Raises:
        ValueError: it is none.
    """
    if isinstance(value, list | tuple):
        return Range(choices=_choices(key, value))
    if not isinstance(value, Mapping):
        raise ValueError(f"space: {key!r} = {value!r} is no list and no range. {_WANTED}")
    strange = {*value} - {"low", "high", "whole", "log", "step"}
    ends = value.get("whole", (value.get("low"), value.get("high")))
    both = "whole" in value and {"low", "high"} & {*value}
    if strange or both or not isinstance(ends, list | tuple) or len(ends) != 2:
        raise ValueError(f"space: {key!r} = {dict(value)} is no range. {_WANTED}")
    low, high = ends
    whole, log, step = "whole" in value, value.get("log", False), value.get("step")
    numbers = [low, high, *([] if step is None else [step])]
    kinds = int if whole else (int, float)
    if not all(isinstance(n, kinds) and not isinstance(n, bool) for n in numbers):
        kind = "whole numbers" if whole else "numbers"
        raise ValueError(f"space: {key!r} = {dict(value)}: its ends and step need to be {kind}.")
    if not all(math.isfinite(n) for n in numbers) or not low < high or (step or 1) <= 0:
        raise ValueError(f"space: {key!r}: needs finite numbers, low < high, and a step above 0.")
    if not isinstance(log, bool) or (log and (low <= 0 or step is not None)):
        raise ValueError(f"space: {key!r}: log = true needs low above 0, and no step.")
    return Range(low, high, log, step, whole)


def _choices(key: str, values: list[Any] | tuple[Any, ...]) -> tuple[Value, ...]:
    plain = all(isinstance(each, Value) for each in values)
    finite = all(math.isfinite(each) for each in values if isinstance(each, float))
    if not 0 < len(values) <= MOST_CHOICES or not plain or not finite:
        raise ValueError(f"space: {key!r}: needs one or more plain values. {_WANTED}")
    if len({repr(each) for each in values}) < len(values):
        raise ValueError(f"space: {key!r} = {[*values]}: needs each value once.")
    return tuple(values)


_WANTED = (
    "Give a list, { low = 1e-5, high = 0.1, log = true }, or { whole = [16, 256], log = true }."
)
