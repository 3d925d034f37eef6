"""How a job's participants are summed where each is clipped."""

from __future__ import annotations

import hashlib

import msgspec

from instep.job.spec import JobSpec
from instep.privacy.secure.clipped import ClippedMean


def clipped_mean(job: JobSpec, clip: float) -> ClippedMean:
    """The sum of a job with `sync.options.clip`."""
    told = msgspec.json.encode((job.seed, job.recipe, job.sync, job.arguments), enc_hook=str)
    return ClippedMean(
        clip,
        job.sync.participants,
        least=job.sync.sealed,
        job=hashlib.sha256(told).digest(),
        bucket_mb=job.sync.all_options.get("bucket_mb", 8.0),
    )
