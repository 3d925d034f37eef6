"""Figures and sentences about a private run: what epsilon covers, and what it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from instep.errors import InstepError
from instep.job.privacy import PrivacySpec
from instep.privacy.released import contents_by_commit

ADJACENCY = "one sample's content replaced by nothing, with the number of samples public"

NOT_COVERED = (
    "metrics of the validation, and what was chosen by them (checkpoints, early stops)",
    "what a callback, a print or a metric of yours writes",
    "choices made after other runs on the same data, such as the learning rate",
    "how long steps take",
    "several samples of one person",
    "who can read the secret of the run or the dataset",
)
"""Things that are published or chosen, and of which epsilon says nothing."""


def privacy_of(spec: PrivacySpec, run: Path, last_step: int) -> dict[str, Any] | None:
    """The figures of `summary.json`, with the last committed step; None where nothing is protected.

    Epsilon is None where it is not known what was published.
    """
    if not spec.on:
        return None
    try:
        contents = contents_by_commit(run)
    except (OSError, InstepError):
        contents = {}
    again = sum(count - 1 for count in contents.values())
    beyond = sum(step > spec.accounted.get("steps", math.inf) for step in contents)
    unrecorded = last_step - sum(1 <= step <= last_step for step in contents)
    known = spec.accounted if not again and not beyond and not unrecorded else {}
    return {
        "protects": spec.protects,
        "epsilon": known.get("epsilon"),
        "epsilon_lower": known.get("epsilon_lower"),
        "delta": spec.delta,
        "noise": spec.noise,
        "clip": spec.clip,
        "sampling": spec.sampling,
        "adjacency": ADJACENCY,
        "accounted_steps": spec.accounted.get("steps"),
        "released": sum(contents.values()),
        "released_again": again,
        "released_beyond": beyond,
        "unrecorded": unrecorded,
        "not_covered": list(NOT_COVERED),
    }


def privacy_figures(
    spec: PrivacySpec, run: Path, last_step: int, training_s: float
) -> dict[str, Any]:
    """The figures of a summary that are others in a private run: places are recorded, not samples,
    and no losses.

    Args:
        spec: of the job.
        run: the folder.
        last_step: that is committed.
        training_s: seconds of its training.
    """
    found = privacy_of(spec, run, last_step)
    if found is None:
        return {"privacy": None}
    known = spec.accounted
    in_epoch = known.get("in_epoch")
    taken = round(last_step * known["samples"] / in_epoch) if in_epoch else 0
    per_second = taken / training_s if training_s > 0 else None
    return {"privacy": found, "loss": None, "samples": taken, "samples_per_second": per_second}


def privacy_words(found: dict[str, Any]) -> str:
    """Say in one sentence how much a run reveals."""
    how = {"allocation": "each in one random step of each epoch"}
    sampled = how.get(found["sampling"], "each in any step with one probability")
    if found["epsilon"] is None and found["released_beyond"]:
        return (
            f"epsilon is not known: steps after {found['accounted_steps']:.0f}, the last that is "
            "accounted, were published"
        )
    if found["epsilon"] is None and found["unrecorded"]:
        return (
            f"epsilon is not known: {found['unrecorded']} of the committed steps are not in the "
            "record of what was published, releases.bin"
        )
    if found["epsilon"] is None:
        return (
            f"epsilon is not known: {found['released_again']} steps were published with other "
            "content after a return to a checkpoint"
        )
    return (
        f"epsilon {found['epsilon']:.3g} (not below {found['epsilon_lower']:.3g}) at delta "
        f"{found['delta']:g}, of samples that are {sampled}; noise {found['noise']:.4g}"
    )
