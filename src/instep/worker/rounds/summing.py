"""How a job's participants are summed where each is clipped."""

from __future__ import annotations

import hashlib
from typing import TypedDict

import msgspec

from instep.job.spec import JobSpec
from instep.privacy.secure.clipped import ClippedMean

VOID = (
    "round {} moves nothing: its sums had been opened with a participant whose host was lost then, "
    "and a second sum could tell what that one gave."
)
"""Tells a person of such a round."""


class HowSummed(TypedDict):
    """Settings of a job that its sums need."""

    least: int
    job: bytes
    bucket_mb: float


def how_summed(job: JobSpec) -> HowSummed:
    """How the sums of a job are masked, bound to it, and sent."""
    told = msgspec.json.encode((job.seed, job.recipe, job.sync, job.arguments), enc_hook=str)
    return HowSummed(
        least=job.sync.sealed,
        job=hashlib.sha256(told).digest(),
        bucket_mb=job.sync.all_options.get("bucket_mb", 8.0),
    )


def clipped_mean(job: JobSpec, clip: float) -> ClippedMean:
    """The sum of a job with `sync.options.clip`."""
    return ClippedMean(clip, job.sync.participants, **how_summed(job))
