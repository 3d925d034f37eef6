"""A worker's duties to a stream that cannot be read again.

It tells how far the run has come, and leaves parts to the worker that has them next. Way in:
`ReadOnce`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from instep.data.loader import Loader, Slice
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.once import TRIED, KeptSamples
from instep.data.reading.streams.stream import LET_GO
from instep.engine.member import Member
from instep.errors import InstepError, SpecError
from instep.job.spec import JobSpec
from instep.store.run_folder import RunFolder


def refusals(job: JobSpec, parts: int) -> Iterator[InstepError]:
    """The reasons why a job cannot train on a stream that is read once.

    Args:
        job: `data.once` is set.
        parts: of the stream.
    """
    if job.train.steps is None:
        yield SpecError(
            "data.once = true with train.epochs: nobody knows how many samples a stream has that "
            "is read once. Set train.steps."
        )
    if job.launch.count or job.launch.launcher != "local":
        yield SpecError(
            "data.once = true keeps what was read in the memory of one machine, and workers on "
            f"others ({job.launch.launcher}) do not see it. Leave launch out; or write what comes "
            "to files, and read these."
        )
    batch, cuts = job.per_commit.global_batch, job.per_commit.micro_batches
    if parts % cuts or batch % parts:
        nearest = next(n for n in range(cuts, 0, -1) if not batch % n)
        yield SpecError(
            f"data.once = true has one worker read each part, so that a micro-batch is of whole "
            f"parts: train.micro_batches = {cuts} needs to divide data.parts = {parts}, and that "
            f"the {batch} samples of a step. Set both to {nearest}, for example."
        )


def memory_of(file: int) -> KeptSamples:
    """The samples that are kept in a file that outlives this process, or in one of its own."""
    return KeptSamples(file if file >= 0 else os.memfd_create("instep-alone"))


class ReadOnce:
    """Its own part in that.

    Args:
        member: of the run.
        loader: of what is trained on.
        kept: what was read and is not committed.
    """

    def __init__(self, member: Member, loader: Loader, kept: KeptSamples) -> None:
        self._loader, self._kept = loader, kept
        self._batch = member.job.per_commit.global_batch
        if member.checkpoint is not None and not kept.committed:
            self.committed(RunFolder(member.run).last_step)

    @classmethod
    def of(cls, member: Member, loader: Loader, train: Any) -> ReadOnce | None:
        """That of a worker; None where samples can be read again."""
        once = train.once if isinstance(train, AnyStream) else None
        return cls(member, loader, once) if once is not None else None

    def committed(self, step: int) -> None:
        """Tell that a step is committed."""
        self._kept.commit(step * self._batch)

    def let_go(self) -> None:
        """Leave the parts that this worker reads to those that have them in this generation."""
        self._loader.ask(Slice(*LET_GO))

    @contextmanager
    def trying(self) -> Iterator[None]:
        """While a trial reads: what it takes for the first samples are those that come next."""
        self._loader.put_in_place(lambda part: part._replace(epoch=TRIED))
        try:
            yield
        finally:
            self._loader.put_in_place()
