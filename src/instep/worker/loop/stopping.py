"""One worker's part in the rules of `[stop]`: measure, ask the master, pass on its verdict.

A loss that is not finite ends the run at that step: every worker has the same loss, and
decides by itself. For the other rules, the worker of rank 0 sends the figures of a step to the
master as soon as the step is committed. It waits for the verdict only after the passes of the
next step, so the answer has usually arrived by then. The verdict travels in the next commit, or
after a validation by a broadcast, so all workers stop at the same step. Without such rules
nothing is sent. The rules themselves are in `control/stop_rules.py`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

import torch

from instep.comm.base import Comm
from instep.comm.protocol.messages import NOT_FINITE, Figures
from instep.engine.member import Member
from instep.errors import SpecError, near_miss
from instep.job.train import StopSpec
from instep.recipe.recipe import Recipe
from instep.sync.rounds.spread import Spread


class Stopping:
    """Asks for verdicts on behalf of all workers.

    Args:
        member: this worker's connection to the run.
        comm: the workers of this generation.
        device: where a tensor must be to be broadcast.
    """

    def __init__(self, member: Member, comm: Comm, device: torch.device) -> None:
        self._member, self._comm, self._device = member, comm, device
        self.spec = member.job.stop
        self._asked: deque[int | None] = deque()  # steps of the verdicts to come; None: ignore it
        self._rule, self._of_step = "", 0  # the first that fired, by the figures of this step
        self._diverged_at: int | None = None  # the first such step

    def regroup(self, comm: Comm) -> None:
        """Another generation begins; verdicts that were asked for may still come."""
        self._comm = comm

    def go_back(self, step: int) -> None:
        """This worker is back at an earlier step: verdicts on later ones do not count.

        Args:
            step: the last that counts.
        """
        self._asked = deque(None if of is None or of > step else of for of in self._asked)
        if self._of_step > step:
            self._rule, self._of_step = "", 0
        if self._diverged_at is not None and self._diverged_at > step:
            self._diverged_at = None
        self._member.stops.forget(step)

    @property
    def diverged(self) -> bool:
        """Whether the parameters are useless: the last checkpoint is better than a new one."""
        return self._diverged_at is not None

    def _set_diverged(self, step: int) -> None:
        if self._diverged_at is None:
            self._diverged_at = step

    def asked_to_stop(self, step: int) -> bool:
        """Whether the run is to stop with this step; waits for the verdict on the one before.

        Raises:
            PeerError: the master is gone.
        """
        rule = self._member.stops.rule(step)
        if rule == "diverged":  # it fired before this worker joined
            self._set_diverged(step)
        return (self.verdict() and step > self._of_step) or rule is not None

    def verdict(self) -> bool:
        """Whether a rule has fired; waits for every verdict that was asked for."""
        while self._asked:
            rule = self._member.stops.verdict().rule
            step = self._asked.popleft()
            if step is not None and rule and not self._rule:
                self._rule, self._of_step = rule, step
        if self._rule == "diverged":
            self._set_diverged(self._of_step)
        return bool(self._rule)

    def not_finite(self, loss: float, gradient_norm: float | None) -> str:
        """Which figure of a step ends the run because it is not finite, as a clause; else empty.

        Both figures are the same on every worker, so each decides by itself.
        """
        if not self.spec.non_finite:
            return ""
        if not math.isfinite(loss):
            return f"the loss was {loss}"
        norm = gradient_norm if gradient_norm is not None else 0.0
        return "" if math.isfinite(norm) else f"the norm of the gradient was {norm}"

    def too_far_apart(self, spread: Spread | None) -> str:
        """Whether the participants of the last round end the run, as a clause; else empty.

        Every worker has the same figures, so each decides by itself.
        """
        limit = self.spec.spread
        if limit is None or spread is None or not spread.ratio > limit:
            return ""
        return (
            f"the participants were {spread.ratio:.4g} times as far from their mean as it moved, "
            f"above {limit:g}"
        )

    def report(self, why: str, step: int, rule: str = NOT_FINITE) -> None:
        """Write into the log, once, why this step is the last."""
        if self._comm.rank == 0:
            why += f" from step {step} on" if why.startswith("the loss") else ""
            self._member.emit("stop_requested", by="workers", rule=rule, step=step, why=why)

    def after_commit(
        self, step: int, loss: float, gradient_norm: float | None, *, last: bool
    ) -> None:
        """Send the figures of a committed step to the master, unless it is the last anyway.

        Args:
            step: its number.
            loss: mean over the global batch.
            gradient_norm: of the summed gradient; None if it was not computed.
            last: whether the run ends with this step.
        """
        if self.not_finite(loss, gradient_norm):
            self._set_diverged(step)
        if self.spec.by_step and not last:
            self._tell(Figures(step=step, loss=loss, gradient_norm=gradient_norm))

    def after_validation(self, step: int, metrics: dict[str, float]) -> bool:
        """Whether the run ends at this step because of a validation; every worker calls it.

        Args:
            step: the last that was committed.
            metrics: the same on every worker.

        Returns:
            The same on every worker.

        Raises:
            SpecError: the metric that the rules watch is not among them.
            PeerError: the master or another worker is gone.
        """
        if not self.spec.by_metric:
            return False
        if self.spec.metric not in metrics:
            raise SpecError(_no_metric(self.spec.metric, metrics))
        self._tell(Figures(step=step, metrics=metrics))
        ends = torch.tensor([float(self.verdict())], device=self._device)
        self._comm.broadcast(ends)
        return bool(ends.item())

    def _tell(self, figures: Figures) -> None:
        if self._comm.rank == 0:
            if self.spec.rise is not None:  # its window is restored from the records
                self._member.records.flush()
            self._member.stops.tell(figures)
            self._asked.append(figures.step)


def check_rules(spec: StopSpec, recipe: Recipe) -> None:
    """Refuse a rule on a validation or a metric that the recipe does not have.

    Raises:
        SpecError: there is no validation set, or no such metric.
    """
    if not spec.by_metric:
        return
    key = f"target = {spec.target:g}" if spec.target is not None else f"patience = {spec.patience}"
    if recipe.validate is None:
        raise SpecError(
            f"stop.{key} watches validations, but the recipe has no validation set. "
            "Give Recipe(validate=...), or leave the key out."
        )
    if spec.metric not in (names := ["loss", *recipe.metrics]):
        raise SpecError(_no_metric(spec.metric, names))


def _no_metric(metric: str, names: Iterable[str]) -> str:
    return f"stop.metric = {metric!r}: no validation gives that. {near_miss(metric, names)}"
