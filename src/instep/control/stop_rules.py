"""The rules of `[stop]`: when a run has trained enough, or too badly to continue.

`Rules.evaluate` gets the figures of each committed step and each validation, in order, and
returns the rule that fires, if any. Its state follows from these figures alone, without
clock, socket or worker. So a rule fires at the same step with any number of workers, and
after a restart the run's own records are evaluated again (`recorded`, `Rules.replay`).
Two rules are not here: the time limit needs a clock, and is in `stops.py`; a loss that is
not finite is seen by every worker alike, and ends the run at once (`stopping.py`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from instep.comm.protocol.messages import Figures
from instep.job.train import StopSpec

_ROUNDING = 1e-6
"""Relative: a metric so near its target has reached it. In float32, 57/60 is 0.949999988."""

PRUNED = "pruned"
"""The rule that fires at a validation which is worse than a bound."""

_NOTHING = 1e-6
"""Of the first mean of the losses: what is smaller is no size of which a rise may be a multiple."""


class Fired(NamedTuple):
    """A rule that wants the run to stop."""

    rule: str
    """`target`, `pruned`, `plateau`, `diverged`, `gradient_norm` or `time_limit`."""
    step: int
    """Whose figures made it fire."""
    why: str
    """The figures, as a clause: `accuracy 0.973 reached the target 0.97`."""
    at_once: bool = False
    """Whether that step is the last, as after a validation; else the one after it is."""

    @property
    def after(self) -> int:
        """The last step but one."""
        return self.step - self.at_once


class Rules:
    """What the rules of one job remember.

    Args:
        spec: which rules are set, and how.
    """

    def __init__(self, spec: StopSpec) -> None:
        self._spec = spec
        self._recent: deque[float] = deque(maxlen=spec.window)  # losses
        self._total = 0.0  # of them
        self._lowest: float | None = None  # mean over a whole window
        self._first = 0.0  # such mean that was finite and not zero, its size
        self._best: tuple[float, int] | None = None  # value of the metric, and its step
        self._waited = 0  # validations since
        self._bounds, self._validations = dict(spec.bounds), 0

    def evaluate(self, figures: Figures) -> Fired | None:
        """Evaluate the figures of a step or a validation; returns the rule that fires first."""
        causes = []
        if figures.loss is not None:
            causes += [self._rise(figures.loss, figures.step)]
            causes += [self._small_gradient(figures.gradient_norm)]
        if (value := figures.metrics.get(self._spec.metric)) is not None:
            causes += [self._target(value), self._bound(value), self._plateau(value, figures.step)]
        found = next((cause for cause in causes if cause is not None), None)
        return Fired(found[0], figures.step, found[1], figures.loss is None) if found else None

    def replay(self, figures: Iterable[Figures]) -> list[Fired | None]:
        """Evaluate earlier figures again, in order; returns the rule that each of them fires."""
        return [self.evaluate(each) for each in figures]

    # ---- of a step

    def _rise(self, loss: float, step: int) -> tuple[str, str] | None:
        rise, window, recent = self._spec.rise, self._spec.window, self._recent
        if rise is None:
            return None
        self._total += loss - (recent[0] if len(recent) == window else 0.0)
        recent.append(loss)
        if step % window == 0 or not math.isfinite(self._total):
            self._total = sum(recent)  # the running sum drifts, and never forgets a NaN
        mean, lowest = self._total / window, self._lowest
        if len(recent) < window or math.isnan(mean):
            return None
        if math.isfinite(mean) and (lowest is None or mean < lowest):
            self._lowest = mean
        size = max(abs(lowest or 0.0), _NOTHING * self._first)  # losses may be negative, or zero
        if not self._first and math.isfinite(mean):
            self._first = abs(mean)
        if lowest is None or not size or not mean > lowest + (rise - 1) * size:
            return None
        return "diverged", (
            f"the mean loss of the last {window} steps was {mean:.6g}, "
            f"above {rise:g} times the lowest yet, {lowest:.6g}"
        )

    def _small_gradient(self, norm: float | None) -> tuple[str, str] | None:
        threshold = self._spec.gradient_norm
        if threshold is None or norm is None or not norm < threshold:
            return None
        return "gradient_norm", f"the norm of the gradient was {norm:.6g}, below {threshold:g}"

    # ---- of a validation

    def _target(self, value: float) -> tuple[str, str] | None:
        target, name = self._spec.target, self._spec.metric
        if target is None:
            return None
        short = target - value if self._spec.upwards else value - target
        if not short <= _ROUNDING * abs(target):
            return None
        return "target", f"{name} {value:.6g} reached the target {target:g}"

    def _bound(self, value: float) -> tuple[str, str] | None:
        self._validations += 1
        bound, name = self._bounds.get(self._validations), self._spec.metric
        if bound is None:
            return None
        if value >= bound if self._spec.upwards else value <= bound:
            return None
        nth = f"validation {self._validations}"
        return PRUNED, f"{name} {value:.6g} of {nth} was worse than the bound {bound:.6g}"

    def _plateau(self, value: float, step: int) -> tuple[str, str] | None:
        spec = self._spec
        if not spec.patience:
            return None
        if self._improves(value):
            self._best, self._waited = (value, step), 0
            return None
        self._waited += 1
        if self._waited < spec.patience:
            return None
        least = f" by {spec.least_change:g}" if spec.least_change else ""
        validations = f"{self._waited} validation{'s' if self._waited > 1 else ''}"
        best = f"{self._best[0]:.6g} at step {self._best[1]} was the best, " if self._best else ""
        return "plateau", (
            f"{spec.metric} did not improve{least} in {validations}: {best}{value:.6g} is the last"
        )

    def _improves(self, value: float) -> bool:
        if self._best is None:
            return math.isfinite(value)
        gain = value - self._best[0] if self._spec.upwards else self._best[0] - value
        return gain > 0 and gain >= self._spec.least_change


class Judge:
    """Evaluates each figure once, though some are sent again.

    Args:
        spec: the rules.
        earlier: earlier figures of the run, in order.
    """

    def __init__(self, spec: StopSpec, earlier: Iterable[Figures] = ()) -> None:
        earlier, self._rules, self._by_metric = list(earlier), Rules(spec), spec.by_metric
        before = list(zip(earlier, self._rules.replay(earlier), strict=True))
        # a step's figures, and those of its validation, may be sent again
        self._judged = {(each.step, each.loss is None): fired for each, fired in before[-2:]}

    def evaluate(self, figures: Figures, *, again: bool) -> Fired | None:
        """Let the rules decide on committed figures.

        Args:
            figures: of a step or its validation; sent again if a member was lost after it.
            again: whether a master that was lost may have evaluated them.

        Returns:
            What they fire, or fired when they were evaluated first.
        """
        asked = figures.step, figures.loss is None
        older = again and asked < max(self._judged, default=asked)  # long answered
        if asked not in self._judged and not older:
            self._judged[asked] = self._rules.evaluate(figures)
        fired = self._judged.get(asked) or self._at_once(figures)
        for old in [each for each in self._judged if each[0] < figures.step - 1]:
            del self._judged[old]
        return fired

    def fired_after(self, step: int) -> list[Fired]:
        """What the newest figures fired, as far as they are of later steps than this."""
        validated = [Figures(step=each) for each, of_validation in self._judged if of_validation]
        ended = [fired for each in validated if (fired := self._at_once(each))]
        return [fired for fired in [*self._judged.values(), *ended] if fired and fired.step > step]

    def _at_once(self, figures: Figures) -> Fired | None:
        """What the step fired that was validated: it is the last, as every worker waits there."""
        fired = self._judged.get((figures.step, False)) if figures.loss is None else None
        return fired._replace(at_once=True) if fired and self._by_metric else None


def recorded(
    steps: np.ndarray[Any, Any], validations: Iterable[Mapping[str, Any]], until: int
) -> list[Figures]:
    """The figures in a run's own files, in the order in which the rules evaluated them.

    Args:
        steps: [records] of `events.STEPS`, in any order, of one course: each worker's
            record of a step has the loss that all agreed on.
        validations: `validated` events, oldest first; those that an end out
            of turn caused do not count.
        until: the last step to go to, that of the checkpoint which is taken up.

    Returns:
        One for each step, and after it one for the validation that followed it, if one did.
    """
    _, one_each = np.unique(steps["step"], return_index=True)
    found = {v["step"]: v["metrics"] for v in validations if v.get("scheduled", True)}
    figures = []
    for record in steps[one_each][: np.searchsorted(steps["step"][one_each], until, "right")]:
        step, norm = int(record["step"]), float(record["gradient_norm"])
        known = None if math.isnan(norm) else norm
        figures.append(Figures(step=step, loss=float(record["loss"]), gradient_norm=known))
        if step in found:
            figures.append(Figures(step=step, metrics=found[step]))
    return figures
