"""Checks, when a run is resumed, that its datasets are those it was trained on.

Worker 0 reads a few samples when a run starts, and logs their fingerprint; when the run is
resumed, it compares.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.data.loader import Loader
from instep.data.parts.order import PartsOrder
from instep.data.reading.streams.shares import AnyTurns
from instep.data.samples.fingerprint import REMEDY, Fingerprint, confirmed_fingerprint
from instep.data.shards.sets import sets_in
from instep.data.windowed import Windowed
from instep.engine.member import Member
from instep.errors import DataError
from instep.store.run_folder import RunFolder
from instep.words import is_url

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards


def check_datasets(
    member: Member, train: Loader, validation: Loader | None, dataset: Any = None
) -> int | None:
    """Compare the datasets with their fingerprints in the log, and log those of now.

    Args:
        member: this worker's membership in the run.
        train: reads the training set.
        validation: reads the validation set, if there is one.
        dataset: the training set, to log of which prepared folders it is made.

    Returns:
        A training sample that was different when it was read a second time, now or in an
        earlier session; None if all that were read twice were the same.

    Raises:
        DataError: a dataset has changed, and `data.changed` does not accept that; or the number
            of training samples has changed, or the shards that their order follows from, which is
            never accepted.
    """
    resumed = member.checkpoint is not None
    events = RunFolder(member.run).named("dataset_known") if resumed else []
    before = {
        event["dataset"]: Fingerprint.from_plain(
            [event["samples"], event["contents"], event["differed"]]
        )
        for event in events
    }
    shards = {event["dataset"]: event.get("shards") for event in events}
    differed: list[int] = []
    folders = [[_absolute(each), each.manifest.sha256] for each in sets_in(dataset)]
    for name, loader in (("training", train), ("validation", validation)):
        if loader is None:
            continue
        now = (
            confirmed_fingerprint(loader.fingerprint, before[name])
            if name in before
            else loader.fingerprint()
        )
        if name in before:
            _check_contents(member, name, before[name], now, _is_endless(loader))
        runs = loader.order.runs if isinstance(loader.order, Windowed | PartsOrder) else []
        if runs:
            _check_shards(member.run, shards.get(name, runs), runs)
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
            **({"prepared": folders} if name == "training" and folders else {}),
            **({"shards": runs} if runs else {}),
            **({"parts": loader.order.bounds} if isinstance(loader.order, PartsOrder) else {}),
        )
    return differed[0] if differed else None


def _is_endless(loader: Loader) -> bool:
    return isinstance(loader.order, AnyTurns) and loader.order.plan.sizes is None


def _check_contents(
    member: Member, name: str, before: Fingerprint, now: Fingerprint, endless: bool
) -> None:
    """Refuse a dataset whose samples have changed, or warn where the job accepts them."""
    if endless:  # so many as `train.steps` takes, which may have changed
        now = now._replace(samples=before.samples)
    if now.same_as(before):
        return
    text = _difference(name, before, now)
    if name == "training" and now.samples != before.samples:
        raise DataError(
            f"{text} The order of an epoch follows from this number, so the run cannot be "
            "resumed. Put the dataset back as it was; or start a new run from the model "
            f"of this one: --set start.model={member.run}"
        )
    if member.job.data.changed == "refuse":
        raise DataError(
            f"{text} Put it back as it was; or accept the dataset that is there now: "
            "--set data.changed=accept"
        )
    member.emit("warning", text=f"{text} Training continues with the dataset that is there now.")


def _check_shards(run: Path, before: object, now: object) -> None:
    """Refuse shards that have changed, from which the order of an epoch follows."""
    if before != now:
        raise DataError(
            "the training dataset stands in other shards than when the run was started, and "
            "the windowed order follows from them, so the run cannot be resumed. Put them back "
            "as they were; or start a new run from the model of this one: "
            f"--set start.model={run}"
        )


def _absolute(folder: Shards) -> str:
    return folder.name if is_url(folder.name) else str(Path(folder.name).absolute())


def unrepeatable(sample: int) -> str:
    """The verdict on a run whose training dataset is not repeatable, at any number of workers."""
    return (
        f"no: the training dataset is not repeatable (sample {sample} was different when it was "
        "read again): it draws random numbers that do not follow from the job's seed, and it is "
        f"read more often than by one machine. {REMEDY}"
    )


def _difference(name: str, before: Fingerprint, now: Fingerprint) -> str:
    if now.samples != before.samples:
        return (
            f"the {name} dataset had {before.samples:,} samples when the run was started and has "
            f"{now.samples:,} now."
        )
    other = before.changes(now)
    return (
        f"the {name} dataset is not what it was when the run was started: of "
        f"{len(before.comparable(now))} samples, {len(other)} are different (the first is "
        f"sample {other[0]}); the fingerprint was {before.digest} and is {now.digest}."
    )


def _not_repeatable(name: str, now: Fingerprint) -> str:
    return (
        f"the {name} dataset is not repeatable: sample {now.differed[0]} was different when it was "
        "read again with the same global generators (torch's, numpy's and Python's). It draws from "
        "another source, such as a generator of its own or the system's, so each run gets "
        "other values, and so does each number of workers. "
        f"{REMEDY}."
    )
