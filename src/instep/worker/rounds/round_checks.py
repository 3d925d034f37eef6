"""What rounds ask of a job, and what a run with rounds says about itself."""

from __future__ import annotations

from instep.data.batches import Batches
from instep.errors import SpecError
from instep.job.spec import JobSpec


def check_length(job: JobSpec, samples: int) -> None:
    """Refuse rounds that are longer than an epoch, or that never begin.

    Raises:
        SpecError: they are, or do not.
    """
    length = Batches.of_job(job, samples).length(job)
    if length <= job.start_after:
        raise SpecError(
            f"sync.options.start_after = {job.start_after}: the run has {length} steps, so no "
            f"round would begin. Set it to at most {length - 1}, or train longer."
        )
    if job.own_data:  # a participant's round ends with its epoch
        return
    batch = job.train.global_batch
    most = -(-samples // batch)
    if job.local_steps > most:
        raise SpecError(
            f"sync.options.local_steps = {job.local_steps}: the {samples} samples of an epoch are "
            f"{most} local steps of train.global_batch = {batch}, and a round does not go beyond "
            f"its epoch. Set sync.options.local_steps to at most {most}."
        )


def updates(job: JobSpec, commits: int) -> int:
    """Steps of an optimizer and its scheduler in so many commits."""
    early = min(commits, job.start_after)
    return early + (commits - early) * job.local_steps


def verdict(job: JobSpec) -> str:
    """Whether a run gives the result of one machine, where participants take steps of their own."""
    sync = job.sync
    some = f"{sync.taking_part} of " if sync.taking_part < sync.participants else ""
    pulled = ", each drawn back to the round's beginning" if sync.row.pulls else ""
    outer = ", and an optimizer takes a step of that" if sync.row.outer else ""
    own = f" with data of their own ({job.own_data!r})" if job.own_data else ""
    after = f"{job.local_steps} local steps of each"
    if sync.rounds is not None and sync.streams:
        fragments = sync.rounds.fragments
        after = f"every {job.local_steps} local steps, one of {fragments} fragments at a time"
    own += f", from step {job.start_after + 1} on," if job.start_after else ""
    return (
        f"no: sync.name = {sync.name!r} averages {some}{sync.participants} participants{own} after "
        f"{after}{pulled}{outer}. With sync.name = 'all_reduce' the "
        "run takes the steps of one machine"
    )
