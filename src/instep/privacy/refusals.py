"""Settings that would reveal more than is accounted: they do not go with `[privacy]`.

Pairs that are refused whatever their values are in `sync/clashes.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.errors import SpecError
from instep.job.privacy import LEAST_BATCH
from instep.job.spec import JobSpec
from instep.job.sync.rounds import SHARED


def refusals(job: JobSpec) -> Iterator[SpecError]:
    """The reasons why a job cannot be private; none where it does not ask for it."""
    if job.privacy.on:
        yield from (SpecError(f"[privacy] with {text}") for asked, text in _table(job) if asked)


def repeated(job: JobSpec, what: str) -> Iterator[SpecError]:
    """The reasons why a command cannot run a job once more, and find the same.

    Args:
        job: of the run.
        what: the command.
    """
    if job.privacy.on:
        yield SpecError(
            f"{what} runs a job more than once and compares, and each private run has a secret of "
            "its own, so samples and noise are others. Leave [privacy] out for the comparison."
        )
    if job.data.once:
        yield SpecError(
            f"{what} runs a job more than once and compares, and data.once = true gives each "
            "sample to one run. Write some to files, and read these for the comparison."
        )


def _table(job: JobSpec) -> Iterator[tuple[bool, str]]:
    train, data = job.train, job.data
    yield from _of_participants(job) if job.privacy.of_participants else _of_samples(job)
    yield (
        train.determinism != "bits",
        f"train.determinism = {train.determinism!r}: sums are of whole numbers, and noise follows "
        "from their bits. Set train.determinism = 'bits'.",
    )
    yield (
        bool(job.launch.count or job.launch.on),
        "[launch] or [cluster]: the secret of a run does not leave its machine. Train on one "
        "machine.",
    )
    yield (
        train.precision != "float32",
        f"train.precision = {train.precision!r}: it needs float32.",
    )
    yield (
        data.unreadable != "stop",
        f"data.unreadable = {data.unreadable!r}: the log would name samples. Leave it out.",
    )
    yield (
        job.stop.rise is not None,
        "stop.rise: the training loss is not told to anybody. Use a rule that looks at the "
        "validation.",
    )


def _of_samples(job: JobSpec) -> Iterator[tuple[bool, str]]:
    train, data = job.train, job.data
    yield (
        train.global_batch < LEAST_BATCH,
        f"train.global_batch = {train.global_batch}: steps have random sizes, and some would be "
        f"empty. Set it to {LEAST_BATCH} or more.",
    )
    yield (
        data.order != "global",
        f"data.order = {data.order!r}: epsilon is of steps whose samples are drawn at random; "
        "shuffled or windowed batches reveal more, up to ten times. Leave data.order out.",
    )


def _of_participants(job: JobSpec) -> Iterator[tuple[bool, str]]:
    rounds, sync = job.sync.rounds, job.sync
    protects = "privacy.protects = 'participant'"
    if rounds is None:
        yield (
            True,
            f"{protects} and sync.name = {sync.name!r}, which has no participants. Set sync.name = "
            "'averaging', or privacy.protects = 'sample'.",
        )
        return
    yield (
        rounds.partition == SHARED,
        f"{protects} and without sync.options.partition: participants without data of their own "
        "have nothing to protect. Set it to 'owner', say.",
    )
    yield (
        rounds.local_optimizers == "kept",
        "sync.options.local_optimizers = 'kept': the state of each participant's optimizer would "
        "be in the checkpoints as it is. Set it to 'reset'.",
    )
    yield (
        rounds.secure_sums and sync.taking_part < sync.participants,
        f"sync.options.secure_sums = true and sync.options.fraction = {rounds.fraction:g}: how "
        "many are drawn into a round varies, and the sum of too few would tell workers what one "
        "gave. Leave sync.options.fraction out.",
    )
