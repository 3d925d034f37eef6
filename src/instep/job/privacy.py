"""The table `[privacy]` of a job."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from instep.job.base import Section

LEAST_BATCH = 32
"""Samples of a step, on average: with fewer, steps without any would not be rare."""

Above0 = Annotated[float, Meta(gt=0)]


class PrivacySpec(Section, frozen=True, kw_only=True):
    """Limits on how much a model reveals of the data that it is trained on."""

    protects: Literal["nothing", "sample"] = "nothing"
    """`sample`: train so that the parameters reveal hardly anything of any one training sample
    (DP-SGD). Needs `delta`, and `epsilon` or `noise`."""

    epsilon: Above0 | None = None
    """The budget: how much the parameters of all steps may reveal. Without `noise`, the noise
    follows from it and from the planned steps; with `noise`, the run ends with the last step that
    is within it."""

    noise: Above0 | None = None
    """Standard deviation of the noise, relative to what one sample can change of a sum."""

    delta: Annotated[float, Meta(gt=0, lt=1)] | None = None
    """With this probability `epsilon` may not hold; well below 1 / (number of samples)."""

    clip: Above0 = 1.0
    """Limit of the norm of each sample's gradient, over all parameters."""

    sampling: Literal["allocation", "poisson"] = "allocation"
    """`allocation`: each sample in one step of each epoch, drawn at random. `poisson`: each sample
    in each step with the same probability, independently. In both, the steps of an epoch are
    as many as `train.global_batch` gives, and their sizes vary around it."""

    accounted: dict[str, float] = field(default_factory=dict)
    """Figures that a run has written down when it began: samples, steps, and bounds of epsilon. Not
    to be set by hand."""

    @property
    def on(self) -> bool:
        """Whether anything is protected."""
        return self.protects != "nothing"

    def __post_init__(self) -> None:
        if not self.on:
            given = [each for each in ("epsilon", "noise", "delta") if getattr(self, each)]
            if given:
                raise ValueError(
                    f"privacy.{given[0]} = {getattr(self, given[0]):g}, and privacy.protects = "
                    "'nothing'. Set privacy.protects = 'sample', or leave it out."
                )
            return
        if self.delta is None:
            raise ValueError(
                "privacy.protects = 'sample' without privacy.delta. Set it well below 1 / (number "
                "of samples), such as 1e-6."
            )
        if self.epsilon is None and self.noise is None:
            raise ValueError(
                "privacy.protects = 'sample' with neither privacy.epsilon nor privacy.noise. Set "
                "the budget, epsilon = 3.0 say, and the noise follows."
            )
