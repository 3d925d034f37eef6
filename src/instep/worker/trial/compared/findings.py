"""Findings of a comparison of spots, and the verdict that follows from them alone."""

from __future__ import annotations

import math
from typing import NamedTuple

from instep.engine.trial_result import Trial
from instep.recipe.forward import Forward
from instep.worker.trial import first_batch
from instep.worker.trial.compared.spots import Spot
from instep.worker.trial.shapes import differ

REMEDY = "With workers = 1 and train.micro_batches = 1 the run gives the result of one machine"


class SpotFindings(NamedTuple):
    """Findings of all spots together."""

    loss: str
    """Name of the loss."""
    known: bool
    """Whether it is known what that is a mean of."""
    derived: str
    """A mean, named as in `Trial`."""
    differs: list[str]
    """Sentences on what is another result for parts than for the whole."""
    drew_elsewhere: bool
    """Whether something draws, and not from torch's generators."""
    compared: int
    """How many spots."""
    untried: str
    """Why there may be none."""
    shows_little: bool
    """Whether the numbers are too short to show a difference."""
    not_cut: str
    """Why draws could not be made for each part; empty where they could."""
    counted: str
    """Name of what each pass changes in Python."""
    set_by_first: str
    """Name of what the first pass sets there by its batch."""
    set_by_parameters: str
    """Name of what it sets by the parameters."""
    uncounted: str
    """A buffer that passes move, if the samples of batches cannot be counted."""
    moved: bool
    """Whether passes move buffers."""
    drew: bool
    """Whether passes draw random numbers."""

    def trial(self) -> Trial:
        """Judge: the first finding that counts decides."""
        if self.differs and self.drew_elsewhere:
            return Trial.not_shown(
                "something draws from numpy's or Python's generators, so it gives other results "
                "each time it is tried. Draw with torch's",
                self.derived,
            )
        if self.differs:
            why = "; ".join(self.differs)
            return Trial(False, why, f"no: {why}. {REMEDY}", self.derived)
        if not self.compared:
            return Trial.not_shown(self.untried)
        if self.shows_little:
            return Trial.not_shown(
                "the model can only be tried in its own 16 bits, which do not show a difference of "
                "a per cent",
                self.derived,
            )
        return self._unknown_mean() or self._kept() or self._alike()

    def _unknown_mean(self) -> Trial | None:
        """Judge a loss of which nobody says what it is a mean of."""
        if self.known:
            return Trial.not_shown(self.not_cut) if self.not_cut else None
        why = (
            f"{self.loss} is your own function, and what it is a mean of may depend on the "
            "contents of a batch"
        )
        verdict = (
            f"not shown: {why}. Say it with Recipe.weight (where it is the samples of an "
            "(inputs, target), weight=lambda batch: len(batch[0])), or return "
            "instep.WeightedLoss(total, weight)"
        )
        return Trial(False, why, verdict)

    def _kept(self) -> Trial | None:
        """Judge what passes keep, where no checkpoint has it or nobody can take its mean."""
        if how := first_batch.in_words(self.counted, self.set_by_first):
            return Trial.not_shown(
                f"{how}: a step calls it once for each micro-batch, and no checkpoint has it. "
                f"{first_batch.REMEDY}",
                self.derived,
            )
        if self.set_by_parameters:
            why = first_batch.by_parameters(self.set_by_parameters)
            return Trial.not_shown(why, self.derived)
        if self.uncounted:
            return Trial.not_shown(
                f"the buffer {self.uncounted!r} is a mean over samples, and the batches that "
                "collate makes do not show how many they have. Let each tensor of a batch have "
                "them in its first dimension",
                self.derived,
            )
        return None

    def _alike(self) -> Trial:
        """Say whether micro-batches may be merged, which give the result of one batch."""
        if self.moved:
            return Trial(False, "the model's buffers follow its batches", "yes", self.derived)
        if self.drew:
            reason = "the forward pass draws random numbers, as dropout does"
            return Trial(False, reason, "yes", self.derived)
        return Trial(True, "a trial showed no difference", "yes", self.derived)


class LossPair(NamedTuple):
    """A loss, as the mean of parts and of the whole, that is not the same; or its gradient."""

    name: str
    apart: float
    whole: float
    worst: str
    """The parameter whose gradient differs most, if the losses are equal; else empty."""
    packed: str
    """The shape of a batch without a row for each sample; else empty."""

    def in_words(self, spot: Spot, forward: Forward, batch: int) -> str:
        """Say how the loss differs, and by what it may.

        Args:
            spot: that was compared.
            forward: computes the loss.
            batch: samples that one machine would see.
        """
        many = len(spot.parts)
        counted, each = ("two", "both") if many == 2 else (str(many), "all")
        what = f"is {self.apart:.6g} for {counted} micro-batches and {self.whole:.6g} for {each}"
        if self.worst:
            what = f"has another gradient, of {self.worst!r}, for {counted} micro-batches than for "
            what += each
        return (
            f"{self.name} {what} as one batch: {self._cause(spot, forward)}. It sees "
            f"{spot.sizes[0]} samples at a time; on one machine it would see {batch}"
        )

    def _cause(self, spot: Spot, forward: Forward) -> str:
        if self.packed:
            return (
                f"collate packs samples ({sum(spot.sizes)} of them into the shape {self.packed}), "
                "and it is a mean of their contents, such as tokens: Recipe.weight can say of how "
                "many"
            )
        if forward.recipe.collates and differ(spot.each()):
            return (
                "collate gives samples other shapes in other batches, as one does that pads to the "
                "longest, and what it adds counts. Pad to one length, or leave padding out of the "
                "loss with a mask and compute_loss, which may return instep.WeightedLoss(total, "
                "weight). Or it is a mean of something else (class weights, targets that are not "
                "ignored), which Recipe.weight can say, or of several things; or collate draws"
            )
        if self.apart and math.isclose(self.whole, len(spot.sizes) * self.apart, rel_tol=1e-4):
            return (
                "it is a sum, and a step takes the mean of its micro-batches: divide it by what it "
                "is a sum of, or return instep.WeightedLoss(total, weight)"
            )
        if forward.recipe.weight:
            return (
                "Recipe.weight is not what it is a mean of, or it compares the samples of a batch"
            )
        return (
            "it compares the samples of a batch, or is a mean of something else than samples, "
            "which Recipe.weight can say"
        )
