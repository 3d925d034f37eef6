"""Which runs of a folder to list, and in which order: conditions, and the best of a metric.

A condition is a key, an operator and a value, such as `accuracy>0.9` or `sync.name=diloco`. A key
is a column of the list, a metric of the last validation, or a key of the job. Way in: `RunChoice`.
"""

from __future__ import annotations

import math
import operator
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from instep.errors import SpecError, near_miss
from instep.store.run_folder import RunFolder

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([\w.-]+?)\s*(>=|<=|!=|=|>|<)\s*(.+?)\s*")


class BestValidation(NamedTuple):
    """Best value of a metric in a run, and the step of that validation."""

    value: float
    step: int


class Condition(NamedTuple):
    """A key with what it has to be."""

    key: str
    sign: str
    value: Any

    @classmethod
    def of(cls, text: str) -> Condition:
        """Read `KEY>VALUE`.

        Raises:
            SpecError: it is no condition, or it orders by what is no number.
        """
        parts = _CONDITION.fullmatch(text)
        if parts is None:
            raise SpecError(
                f"--where {text!r}: needs KEY, one of > >= < <= = !=, and a value, "
                "such as 'accuracy>0.9'."
            )
        key, sign, written = parts.groups()
        value = _value(written)
        if sign in _ORDERS and not _is_number(value):
            raise SpecError(f"--where {text!r}: {sign} needs a number, and {written!r} is none.")
        return cls(key, sign, value)

    def holds(self, known: Mapping[str, Any]) -> bool:
        """Compare with the values of a run; one without the key fails."""
        if self.key not in known:
            return False
        its = known[self.key]
        if self.sign in _ORDERS:
            return _is_number(its) and _ORDERS[self.sign](its, self.value)
        both_numbers = _is_number(its) and _is_number(self.value)
        equal = its == self.value if both_numbers else _text(its) == _text(self.value)
        return equal == (self.sign == "=")


class RunChoice:
    """Looks at run after run.

    Args:
        where: conditions, all of which have to hold.
        best: a metric by which to order, the best first; `METRIC:min` or `METRIC:max` says which
            is better. Left out: the least for `loss`, and the largest for others.

    Raises:
        SpecError: a condition or a metric cannot be read.
    """

    def __init__(self, where: Sequence[str] = (), best: str | None = None) -> None:
        self._where = [Condition.of(text) for text in where]
        self.metric, _, mode = (best or "").partition(":")
        if mode not in ("", "min", "max") or (best is not None and not self.metric):
            raise SpecError(f"--best {best!r}: needs a metric, such as accuracy, or error:min.")
        self._least = mode == "min" or (not mode and self.metric == "loss")
        self._keys, self._metrics, self._looked = set[str](), set[str](), 0

    def takes(self, run: RunFolder, columns: Mapping[str, Any]) -> bool:
        """Decide whether to list a run, of which the list has these columns."""
        self._looked += 1
        if not self._where:
            return True
        measured = run.last("validated").get("metrics") or {}
        known = {**dict(_flat(msgspec.to_builtins(run.spec))), **columns, **measured}
        self._keys.update(known)
        return all(condition.holds(known) for condition in self._where)

    def best_of(self, run: RunFolder) -> BestValidation | None:
        """Best value of the metric; None without a metric, or a validation that has it."""
        if not self.metric:
            return None
        found = list[BestValidation]()
        for event in run.validations:
            metrics = event.get("metrics") or {}
            self._metrics.update(metrics)
            value = metrics.get(self.metric)
            if isinstance(value, int | float) and math.isfinite(value):
                found.append(BestValidation(float(value), int(event.get("step") or 0)))
        return min(found, key=self.order, default=None)

    def order(self, best: BestValidation) -> float:
        """Less is better."""
        return best.value if self._least else -best.value

    def check(self, chosen: int) -> None:
        """See that the runs had what was asked for.

        Raises:
            SpecError: no run has a key, or no chosen one measured the metric.
        """
        for condition in self._where if self._looked else ():
            if condition.key not in self._keys:
                raise SpecError(
                    f"no run has {condition.key!r}. {near_miss(condition.key, self._keys)}"
                )
        if self.metric and chosen and self.metric not in self._metrics:
            said = near_miss(self.metric, self._metrics) if self._metrics else "None has metrics."
            raise SpecError(f"no run has measured {self.metric!r}. {said}")


def _value(written: str) -> Any:
    """Read a TOML value, or text that is not in quotes."""
    try:
        return tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        return written


def _flat(table: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
