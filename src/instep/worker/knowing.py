"""Whether a run that goes on still reads the dataset it was trained on.

The first worker reads a few samples when the run begins, and tells the log by what
the dataset is known again; when the run goes on, it compares.
"""

from __future__ import annotations

from instep.data.loader import Loader
from instep.data.samples.fingerprint import Fingerprint, confirmed_fingerprint
from instep.errors import DataError
from instep.store.run_folder import RunFolder
from instep.worker.member import Member


def check_datasets(member: Member, train: Loader, validation: Loader | None) -> int | None:
    """Compare with what the run has read before, and tell by what its datasets are known.

    Returns:
        A sample of the training that held something else when it was read again, now or
        before; None where each that was read twice repeated.

    Raises:
        DataError: one has changed since, and `data.changed` does not accept that; or the number
            of samples to train on has, which nothing accepts.
    """
    before = (
        {
            event["dataset"]: Fingerprint.from_plain(
                [event["samples"], event["contents"], event["differed"]]
            )
            for event in RunFolder(member.run).named("dataset_known")
        }
        if member.checkpoint is not None
        else {}
    )
    differed: list[int] = []
    for name, loader in (("training", train), ("validation", validation)):
        if loader is None:
            continue
        now = (
            confirmed_fingerprint(loader.fingerprint, before[name])
            if name in before
            else loader.fingerprint()
        )
        if name in before and not now.same_as(before[name]):
            text = _changed(name, before[name], now)
            if loader is train and now.samples != before[name].samples:
                raise DataError(
                    f"{text} Which samples an epoch has left follows from their number, so the run "
                    "cannot go on. Put the dataset back as it was; or start a new run from this "
                    f"one's model: --set start.model={member.run}"
                )
            if member.job.data.changed == "refuse":
                raise DataError(
                    f"{text} Put it back as it was; or train on with what it is now: "
                    "--set data.changed=accept"
                )
            member.emit("warning", text=f"{text} It goes on with what it is now.")
        if name == "training":
            differed = now.differed or (before[name].differed if name in before else [])
        if now.differed and name not in before:
            member.emit("warning", text=_not_repeatable(name, now))
        member.emit(
            "dataset_known",
            dataset=name,
            samples=now.samples,
            contents=now.contents,
            differed=now.differed,
        )
    return differed[0] if differed else None


def not_as_read_once(sample: int) -> str:
    """The verdict on a run whose training dataset does not repeat; no number of workers helps."""
    return (
        f"no: the training dataset is not repeatable (sample {sample} held something else when it "
        "was read again): it draws from a place that no key reaches, and is read more often than "
        f"by one machine. {_REMEDY}"
    )


_REMEDY = "Draw from a global generator, or give the random part as Recipe.augment"


def _changed(name: str, before: Fingerprint, now: Fingerprint) -> str:
    if now.samples != before.samples:
        return (
            f"the {name} dataset had {before.samples:,} samples when the run was started and has "
            f"{now.samples:,} now."
        )
    other = before.changes(now)
    return (
        f"the {name} dataset is not what it was when the run was started: of "
        f"{len(before.comparable(now))} samples, {len(other)} hold something else (the first is "
        f"sample {other[0]}); the fingerprint was {before.digest} and is {now.digest}."
    )


def _not_repeatable(name: str, now: Fingerprint) -> str:
    return (
        f"the {name} dataset is not repeatable: sample {now.differed[0]} held something else when "
        "it was read again with the same generators (torch's, numpy's and Python's global ones). "
        "It draws from another place, such as a generator of its own or the system's; so the same "
        "run gives other values each time, and at another number of workers. "
        f"{_REMEDY}."
    )
