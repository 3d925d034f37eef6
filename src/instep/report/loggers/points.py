"""From events and step records to points of curves. Where the points go, is not known here."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from instep.report.loggers.base import Point
from instep.store.run_files import Records, step_ends

SPEED_S = 1.0
"""Seconds between points of the throughput curve."""
OVERLAP = 10_000
"""A step that arrives this many steps behind the newest is a repetition."""


class Points:
    """Makes the curves `train/loss`, `train/gradient_norm`, `train/samples_per_second`,
    `validation/NAME`, and those that were logged."""

    def __init__(self, *, losses: bool = True) -> None:
        self._names = ("loss", "gradient_norm") if losses else ("gradient_norm",)
        self._seen = set[int]()  # steps that have their points
        self._samples = 0  # since the last point of the throughput curve
        self._since: float | None = None  # Unix seconds of that point

    def go_back(self, step: int) -> None:
        """The run continues from a step; those after it are computed anew."""
        self._seen = {each for each in self._seen if each <= step}

    def of_event(self, event: Mapping[str, Any]) -> Iterator[Point]:
        """Those of a validation, and of logged values; other events have none."""
        what = event["event"]
        named = event["metrics"] if what == "validated" else event.get("values") or {}
        if what not in ("validated", "logged"):
            return
        for name, value in named.items():
            if isinstance(value, int | float) and math.isfinite(value):
                name = f"validation/{name}" if what == "validated" else name
                yield Point(name, float(value), event["step"], event["time"])

    def of_steps(self, steps: Records) -> Iterator[Point]:
        """Loss and norm of each new step once, whichever worker records it, and about once a second
        the speed.

        Args:
            steps: [any] of `STEPS`, of any workers.
        """
        if not len(steps):
            return
        ends = step_ends(steps)
        numbers, where = np.unique(steps["step"], return_index=True)
        oldest = int(numbers[-1]) - OVERLAP
        for step, place in zip(numbers.tolist(), where.tolist(), strict=True):
            if step in self._seen or step <= oldest:
                continue
            self._seen.add(step)
            for name in self._names:
                value = float(steps[name][place])
                if math.isfinite(value):
                    yield Point(f"train/{name}", value, step, float(ends[place]))
        if len(self._seen) > 2 * OVERLAP:
            self._seen = {step for step in self._seen if step > oldest}
        self._samples += int(steps["samples"].sum())
        self._since = float(steps["begin"].min()) if self._since is None else self._since
        end, last = float(ends.max()), int(numbers[-1])
        if end - self._since >= SPEED_S:
            speed = self._samples / (end - self._since)
            yield Point("train/samples_per_second", speed, last, end)
            self._samples, self._since = 0, end
