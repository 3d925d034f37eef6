"""Did training get the same samples that a plain read of the dataset gives?

While a run trains, its workers record hashes of some samples, or of all (`check.content`).
Here the recipe's function is called as a worker calls it, and each of those samples is read
with `dataset[index]`, without a loader, thread or other process. Random transforms get the
same generators. Way in: `compare`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.data.order import AnyOrder, Order
from instep.data.parts.order import PartsOrder
from instep.data.reading import generators
from instep.data.reading.fetch import seed_for_sample
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.shares import turns_of
from instep.data.samples.contents import Selection, content_of
from instep.data.samples.unreadable import describe_error
from instep.data.shards.urls.remote import use_cache
from instep.data.windowed import Windowed
from instep.errors import RunError
from instep.events import CONTENTS, read_records
from instep.recipe.build import call
from instep.recipe.source_file import load_function
from instep.store.run_files import Records
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from instep.words import plural
from instep.worker.reading.data_split import split_data
from instep.worker.reading.planned_data import plan_data
from instep.worker.reading.streamed import with_stream
from instep.worker.rounds.own_data import divide

_SHOWN = 5


class Wrong(NamedTuple):
    """A sample that differs from a plain read."""

    epoch: int
    """Counts from 0."""
    sample: int
    """Its index in the dataset."""
    why: str


@dataclass(frozen=True, kw_only=True)
class ContentProof:
    """The result of the comparison."""

    due: int
    """Samples of committed steps whose content should have been recorded."""
    recorded: int
    """How many of those were recorded."""
    compared: int
    """Recorded samples that were read again and compared; also those of uncommitted steps."""
    wrong: tuple[Wrong, ...]
    unrepeatable: tuple[int, ...]
    """Indices of samples whose two plain reads differ, so that they cannot be compared."""

    @property
    def exact(self) -> bool:
        """Whether something was compared, and none of it was wrong."""
        return not self.wrong and self.compared > 0

    @property
    def fault(self) -> str:
        """What is wrong, in one sentence."""
        if not self.compared and self.unrepeatable:
            return (
                f"none of the {readable_count(len(self.unrepeatable))} samples could be compared: "
                "two plain reads of each differ, as the dataset uses a generator that instep does "
                "not seed."
            )
        if not self.compared:
            return (
                "no contents of samples were recorded, so none can be compared. Train with "
                "check.content = 'sample' or 'all'."
            )
        first = self.wrong[0]
        return (
            f"{readable_count(len(self.wrong))} of {plural(self.compared, 'sample')} handed to "
            f"training were not what a plain read of the dataset gives: sample {first.sample} in "
            f"epoch {first.epoch + 1} {first.why}. Either the data have changed since, or they "
            "were read wrongly."
        )

    def as_table(self) -> dict[str, Any]:
        """The result as plain data."""
        return {**asdict(self), "wrong": [each._asdict() for each in self.wrong]}

    def lines(self) -> list[str]:
        """The result for a person."""
        due, recorded = readable_count(self.due), readable_count(self.recorded)
        lines = [
            f"content {recorded} of {due} chosen samples recorded as they were handed to a step; "
            f"{readable_count(self.compared)} compared with a plain read, "
            f"{readable_count(len(self.wrong))} wrong"
        ]
        lines += [
            f"fault   sample {each.sample} in epoch {each.epoch + 1} {each.why}"
            for each in self.wrong[:_SHOWN]
        ]
        if self.unrepeatable:
            lines.append(
                f"content {plural(len(self.unrepeatable), 'sample')} could not be compared: two "
                "plain reads differ, as the dataset uses a generator that instep does not seed"
            )
        return lines


def compare(run: RunFolder, most: int | None = None) -> ContentProof:
    """Read the recorded samples again, plainly, and compare.

    Call it in a process that has not read from the dataset.

    Args:
        run: its folder.
        most: samples to compare; a choice by the seed if more were recorded. None: all.

    Raises:
        RunError: the run has no recipe that can be called again.
        RecipeError: the recipe cannot be called.
    """
    if run.spec.data.once:
        raise RunError(
            f"{run.path} was trained on a stream that gives each sample once (data.once = true), "
            "so nothing can be compared with a plain read. Leave --content out: the ledger shows "
            "whether each sample was used once."
        )
    rows = _recorded(run)
    due, recorded = _coverage(run, rows)
    if not len(rows):
        return ContentProof(due=due, recorded=0, compared=0, wrong=(), unrepeatable=())
    if most is not None and len(rows) > most:
        chosen = np.random.default_rng(run.spec.seed).choice(len(rows), most, replace=False)
        rows = rows[np.sort(chosen)]
    dataset, seed = _recipe(run).train, run.spec.seed
    torch.set_num_threads(1)  # as in a loader process: sums are cut among threads
    wrong, unrepeatable = [], []
    for epoch, index, content in rows.tolist():
        try:
            found = _plainly(dataset, seed, epoch, index)
            if found == content:
                continue
            if found != _plainly(dataset, seed, epoch, index):
                unrepeatable.append(index)
                continue
            why = f"was {content:016x} and is {found:016x}"
        except Exception as error:
            why = f"cannot be read: {describe_error(error)}"
        wrong.append(Wrong(epoch, index, why))
    return ContentProof(
        due=due,
        recorded=recorded,
        compared=len(rows) - len(unrepeatable),
        wrong=tuple(wrong),
        unrepeatable=tuple(unrepeatable),
    )


def _recorded(run: RunFolder) -> Records:
    files = sorted(run.path.glob("contents-*.bin"))
    parts = [read_records(file, CONTENTS) for file in files]
    return np.unique(np.concatenate([np.empty(0, CONTENTS), *parts]))


def _coverage(run: RunFolder, rows: Records) -> tuple[int, int]:
    """Samples of committed steps that were to be recorded, and how many were."""
    samples, which = run.plan.epoch_samples, run.spec.check.content
    if which == "off" or not samples:
        return 0, 0
    chosen, job = Selection(samples, run.spec.seed, which), run.spec
    own = divide(job, _recipe(run)) if job.own_data else None
    order = own.train if own is not None else _order(run, samples)
    due = recorded = 0
    for epoch in run.audit.epochs:
        begin = 0 if own is None else int(own.train.offsets[epoch.participant or 0])
        stop = begin + epoch.expected  # where samples come as often as planned, epochs differ
        part = epoch.epoch, begin, min(stop, samples) if own is not None else stop
        taken = order.indices(*part) if order is not None else np.arange(*part[1:])
        wanted = taken[chosen(*part)]
        due += len(wanted)
        recorded += int(np.isin(wanted, rows["index"][rows["epoch"] == epoch.epoch]).sum())
    return due, recorded


def _order(run: RunFolder, samples: int) -> AnyOrder | None:
    """The order of a run's epochs; None for that of the dataset."""
    job = run.spec
    if run.last("data_balanced") or run.last("data_lengths"):
        order = plan_data(job, split_data(job, _recipe(run)).recipe).how.order
        if order is not None:
            return order
    if isinstance(stream := _recipe(run).train, AnyStream):
        return turns_of(job, stream.plan)
    if job.data.order == "windowed":
        known = next(e for e in run.named("dataset_known") if e["dataset"] == "training")
        sizes, counts = np.array(known["shards"], np.int64).reshape(-1, 2).T
        if job.data.parts:
            return PartsOrder.of_job(job, np.repeat(sizes, counts), known["parts"])
        return Windowed.of_job(job, np.repeat(sizes, counts))
    return Order(samples, job.seed) if job.data.shuffled else None


def _recipe(run: RunFolder) -> Any:
    if run.joined:
        raise RunError(
            f"the processes of {run.path} called instep.join, so there is no recipe function to "
            "call for its dataset."
        )
    job = run.spec
    use_cache(job.data.cache, job.data.cache_gb)
    made = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
    return split_data(job, with_stream(job, made, run.path)).recipe


def _plainly(dataset: Any, seed: int, epoch: int, index: int) -> int:
    with generators.preserved():
        seed_for_sample(seed, epoch, index)
        if hasattr(dataset, "__getitem__"):
            return content_of(dataset[index])
        return content_of(dataset.__getitems__([index])[0])
