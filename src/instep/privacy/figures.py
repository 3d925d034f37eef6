"""Figures and sentences about a private run: what epsilon covers, and what it does not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from instep.errors import InstepError
from instep.job.privacy import PrivacySpec
from instep.job.spec import JobSpec
from instep.privacy.released import contents_by_commit
from instep.privacy.units import Units

ADJACENCY = {
    "sample": "one sample's content replaced by nothing, with the number of samples public",
    "participant": "all samples of one participant replaced by nothing, with the number of "
    "participants public",
}
"""Which datasets are neighbours, by what is protected."""

_MORE_OF_ONE = {
    "sample": "several samples of one person",
    "participant": "a person whose samples are with several participants",
}

NOT_COVERED = (
    "metrics of the validation, and what was chosen by them (checkpoints, early stops)",
    "what a callback, a print or a metric of yours writes",
    "choices made after other runs on the same data, such as the learning rate",
    "how long steps take",
    "who can read the secret of the run or the dataset",
)
"""Things that are published or chosen, and of which epsilon says nothing."""


def privacy_of(
    spec: PrivacySpec, run: Path, last_step: int, run_id: str = ""
) -> dict[str, Any] | None:
    """The figures of `summary.json`, with the last committed step; None where nothing is protected.

    Epsilon is None where it is not known what was published.
    """
    if not spec.on:
        return None
    try:
        contents = contents_by_commit(run, run_id)
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
        "adjacency": ADJACENCY[spec.protects],
        "accounted_steps": spec.accounted.get("steps"),
        "released": sum(contents.values()),
        "released_again": again,
        "released_beyond": beyond,
        "unrecorded": unrecorded,
        "not_covered": [*NOT_COVERED, _MORE_OF_ONE[spec.protects]],
    }


def privacy_figures(
    job: JobSpec, run: Path, run_id: str, last_step: int, training_s: float
) -> dict[str, Any]:
    """The figures of a summary that are others in a private run: places are recorded, not samples,
    and no losses.

    Args:
        job: of the run.
        run: the folder.
        run_id: names its secret.
        last_step: that is committed.
        training_s: seconds of its training.
    """
    found, known = privacy_of(job.privacy, run, last_step, run_id), job.privacy.accounted
    if found is None:
        return {"privacy": None}
    taken = round(last_step * Units.of_job(job, int(known["samples"])).taken) if known else 0
    per_second = taken / training_s if training_s > 0 else None
    return {"privacy": found, "loss": None, "samples": taken, "samples_per_second": per_second}


def privacy_words(found: dict[str, Any]) -> str:
    """Say in one sentence how much a run reveals."""
    what = found["protects"]
    step = "round" if what == "participant" else "step"
    how = {"allocation": f"each in one random {step} of each epoch"}
    sampled = how.get(found["sampling"], f"each in any {step} with one probability")
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
            "content after a return to a checkpoint, or by a copy of the run's folder"
        )
    return (
        f"epsilon {found['epsilon']:.3g} (not below {found['epsilon_lower']:.3g}) at delta "
        f"{found['delta']:g}, of {what}s that are {sampled}; noise {found['noise']:.4g}"
    )
