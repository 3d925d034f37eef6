"""What a strategy is: a few moments in a step at which replicas may talk.

A strategy sees the parameters that this rank owns and a `Comm` to the ranks
that own the same ones in the other replicas. It knows nothing of models,
data or optimizers. Every rank reaches the same moments in the same order.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, cast

from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.errors import SpecError, near_miss
from instep.sync import STRATEGIES


class Price(NamedTuple):
    """What one rank sends for one step, for the planner to add up."""

    sent_bytes: float
    messages: float


class Strategy(Protocol):
    """How replicas agree.

    In each step a rank runs any number of backward passes, also none. Each is
    announced with its weight: the share of the global batch that it stands
    for. Over all ranks and passes of a step the weights add up to 1.
    """

    progress: int
    """Gradients taken in so far: a sign of life."""

    def start(
        self, parameters: Sequence[Parameter], comm: Comm, *, notes: int, parts: int = 0
    ) -> None:
        """Training is about to begin; every rank holds the same parameters.

        Args:
            parameters: those that are trained, in the same order everywhere.
            comm: the ranks that agree.
            notes: length of the vector that will travel with every step.
            parts: 0 for sums that are equal to rounding. Above it, the agreed
                gradient must have the same bits however the passes are dealt
                to ranks; a step has at most so many over all ranks, each with
                at most about its share of the weight.
        """

    def before_backward(self, weight: float, *, last: bool) -> None:
        """A backward pass is about to run whose gradient counts `weight`.

        `last` says that this rank runs no other in this step, so what is
        ready may be sent while the pass goes on.
        """

    def after_backward(self, notes: Tensor) -> Tensor | None:
        """This rank's passes are done; parameters have not moved.

        Args:
            notes: [notes] float64 on the CPU, whatever the roles want summed.

        Returns:
            The notes, summed over the ranks (to about 1e-7 relative; where
            there are `parts`, to that of float64), the same bits on each.
            When this returns, each parameter's `.grad` is the agreed gradient,
            or None if no rank had one.

            Or None, on every rank, where there are `parts`: the same passes
            must run once more. It takes no more than one repetition.

        Raises:
            PeerError: a rank went away; the step did not happen.
        """

    def after_step(self, step: int) -> None:
        """Parameters have moved. `step` counts from 1."""

    def stop(self) -> None:
        """Let go of the parameters; a second call does nothing."""

    def state(self) -> dict[str, Tensor]:
        """What has to survive a restart, by name; empty for a strategy without memory."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, before `start`."""

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """What a step costs each rank."""


def make_strategy(name: str, options: Mapping[str, Any]) -> Strategy:
    """A strategy by its name in the job file, with its options checked.

    Raises:
        SpecError: there is no such strategy, or it has no such option, or the
            option's value is refused.
    """
    factory = STRATEGIES[name]
    known = list(inspect.signature(factory).parameters)
    for option in options:
        if option not in known:
            raise SpecError(
                f"sync.options: {name} has no option {option!r}. {near_miss(option, known)}"
            )
    return cast(Strategy, factory(**options))
