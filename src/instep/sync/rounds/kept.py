"""What a strategy with rounds must know of what participants remember from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from instep.comm.base import Comm

KEPT = "kept/"
"""Begins the names of what `Kept` gives, in a strategy's state."""


class Kept(Protocol):
    """What participants remember from round to round: after a commit the same on every rank; or,
    where `stays`, on the rank that has computed them."""

    stays: bool

    def exchange(self, comm: Comm) -> None:
        """Give every rank what the participants of all ranks remember after this round."""

    def computed_here(self) -> Mapping[int, Tensor]:
        """What this rank's participants remember after this round, [n] float32."""

    def recall(self, states: Mapping[int, Tensor]) -> None:
        """Take up what `computed_here` gave, of those that this rank computes now."""

    def model_in(self, state: Tensor) -> Tensor:
        """The participant's own values of all that is trained, [elements] float32, in what
        `computed_here` gave; where participants have a model of their own."""

    def apply(self) -> None:
        """The round happens."""

    def abandon(self) -> None:
        """It does not."""

    def state(self) -> dict[str, Tensor]:
        """As of the last commit."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
