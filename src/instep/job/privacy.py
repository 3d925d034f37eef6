"""The table `[privacy]` of a job, and how many are drawn into its private steps."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Meta, field

from instep.job.base import Section

LEAST_BATCH = 32
"""Samples of a step, on average: with fewer, steps without any would not be rare."""

_SPARE = 9.0
"""Standard deviations of how many are drawn that the places of a step leave room for."""

Above0 = Annotated[float, Meta(gt=0)]


class PrivacySpec(Section, frozen=True, kw_only=True):
    """Limits on how much a model reveals of the data that it is trained on."""

    protects: Literal["nothing", "sample", "participant"] = "nothing"
    """`sample`: train so that the parameters reveal hardly anything of any one training sample
    (DP-SGD). `participant`: of all samples of any one participant of a strategy with rounds that
    has data of its own (DP-FedAvg). Needs `delta`, and `epsilon` or `noise`."""

    epsilon: Above0 | None = None
    """The budget: how much the parameters of all steps may reveal. Without `noise`, the noise
    follows from it and from the planned steps; with `noise`, the run ends with the last step that
    is within it."""

    noise: Above0 | None = None
    """Standard deviation of the noise, relative to what one sample, or participant, can change of
    a sum."""

    delta: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """With this probability `epsilon` may not hold; well below 1 / (number of samples, or of
    participants)."""

    clip: Above0 = 1.0
    """Limit of the norm of each sample's gradient, or of how far each participant comes in a
    round; over all parameters."""

    sampling: Literal["allocation", "poisson"] = "allocation"
    """`allocation`: each sample in one step of each epoch, drawn at random. `poisson`: each sample
    in each step with the same probability, independently. In both, the steps of an epoch are
    as many as `train.global_batch` gives, and their sizes vary around it. With `participant`, so
    are participants drawn into the rounds of an epoch, of which there are 1 /
    `sync.options.fraction`."""

    accounted: dict[str, float] = field(default_factory=dict)
    """Figures that a run has written down when it began: samples, steps, and bounds of epsilon. Not
    to be set by hand."""

    @property
    def on(self) -> bool:
        """Whether anything is protected."""
        return self.protects != "nothing"

    @property
    def of_participants(self) -> bool:
        """Whether participants are protected, with all their samples."""
        return self.protects == "participant"

    def __post_init__(self) -> None:
        if not self.on:
            given = [each for each in ("epsilon", "noise", "delta") if getattr(self, each)]
            if given:
                raise ValueError(
                    f"privacy.{given[0]} = {getattr(self, given[0]):g}, and privacy.protects = "
                    "'nothing'. Set privacy.protects = 'sample' or 'participant', or leave it out."
                )
            return
        if self.delta is None:
            raise ValueError(
                f"privacy.protects = {self.protects!r} without privacy.delta. Set it well below 1 "
                f"/ (number of {self.protects}s), such as 1e-6."
            )
        if self.epsilon is None and self.noise is None:
            raise ValueError(
                f"privacy.protects = {self.protects!r} with neither privacy.epsilon nor "
                "privacy.noise. Set the budget, epsilon = 3.0 say, and the noise follows."
            )


def steps_of(units: int, size: int) -> int:
    """Steps of an epoch in which each of `units` is drawn once, if steps are of about `size`."""
    return max(1, math.ceil(units / size))


def places_of(units: int, size: int) -> int:
    """Room of a step, in units: more than are drawn into it, but for a chance below 1e-15."""
    planned = units / steps_of(units, size)
    return min(units, math.ceil(planned + _SPARE * math.sqrt(planned) + _SPARE))
