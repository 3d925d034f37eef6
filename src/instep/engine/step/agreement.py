"""What the workers agree on in a step beside the gradient, and the notes that it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from instep.engine.step.notes import Notes
from instep.errors import RecipeError, SpecError


class Weighed(NamedTuple):
    """Result of one pass."""

    total: float
    """Its loss: the mean times the weight."""
    weight: float
    """How much of what the loss is a mean of it holds: samples, unless the recipe says else."""


class Agreement(NamedTuple):
    """What the workers agreed on beside the gradient; the same on each."""

    loss: float
    """Mean over the global batch, by weight."""
    stop: bool
    """Whether any worker has been told to stop."""
    regroups: bool
    """Whether all leave the group after this step: its members change."""
    skipped: int = 0
    """Samples of the global batch that could not be read; the means are over the others."""
    saves: bool = False
    """Whether it is time for a checkpoint."""
    scale: float = 1.0
    """Factor by which the agreed gradient is still to be multiplied."""
    norm: float | None = None
    """Norm of the agreed gradient, where it lies on several ranks, and is wanted."""


def notes_of_a_step(
    size: int, parts: int, *, buffers: int, squares: int, meshed: bool, **more: int
) -> Notes:
    """Lay out what each worker says in a step.

    Args:
        size: members of the group.
        parts: micro-batches of a step.
        buffers: that passes may move.
        squares: ranks of a replica that say what they have of the norm.
        meshed: whether a replica has several ranks.
        more: further notes, by name.
    """
    return Notes(
        stop=1,  # who has been told to stop
        leaving=1,  # who has no further step
        regroups=1,  # who was told that the generation ends with this step
        saves=1,  # whether it is time for a checkpoint
        arrived=size,  # when each rank had done its passes, seconds since a common moment
        computing=size,  # how long each rank's passes took, seconds
        skipped=1,  # samples that could not be read
        left_out=1,  # and that the user's collate left out
        losses=parts,  # of each pass, times its weight: a place of its own, for one order
        weights=parts,
        buffers=buffers,  # who moved each
        # on a mesh: the squares of each rank's part of the gradient; whose did not fit
        squares=squares,
        again=int(meshed),
        **more,
    )


def agreement(said: Mapping[str, list[float]], samples: int, norm: float | None) -> Agreement:
    """Make the agreement of a step from the notes of all, summed.

    Args:
        said: the notes, by name.
        samples: of the global batch; 0 where all leave.
        norm: of the summed gradient, if it is known.

    Raises:
        RecipeError: nothing in the global batch counts.
    """
    missed = round(said["skipped"][0])
    weight = sum(said["weights"])
    if samples and not weight and missed < samples:
        raise RecipeError(
            f"the weight of the whole global batch of {samples} samples is 0: there is nothing "
            "in it that the loss could be a mean of (all targets are ignored, say). Leave such "
            "samples out of the dataset, or make steps larger (train.global_batch, or "
            "train.tokens_per_batch where that is set)."
        )
    scale = samples / weight if weight and weight != samples else 1.0
    return Agreement(
        sum(said["losses"]) / (weight or 1.0),
        said["stop"][0] > 0,
        regroups=said["regroups"][0] > 0,
        skipped=missed,
        saves=said["saves"][0] > 0,
        scale=scale,
        norm=norm * scale if norm is not None else None,
    )


def refuse_unequal_ends(left: float, ranks: int) -> None:
    """Refuse that some workers leave and some have another step.

    Raises:
        SpecError: they do.
    """
    if 0 < left < ranks:
        raise SpecError(
            "the processes' loops are not of the same length: "
            f"{left:.0f} of {ranks} left while the others had another step. "
            "Leave the loop at the same step everywhere, or use train.stop_after_steps. Where "
            "a variable of yours decides, let session.sum(...) of it decide: a worker that "
            "takes another's place begins with a new one."
        )
