"""What a job will be trained on: both sides of its split, what is on both, and participants' parts.

The recipe is called here, in this process, and its dataset is read as far as that needs. Way in:
`about_data`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from instep.data.parts.cut import parts_order
from instep.data.reading.streams.stream import Stream
from instep.data.samples.duplicates import Duplicates, duplicates
from instep.data.shard_sizes import Lot
from instep.data.shards.sets import sets_in
from instep.data.shards.urls.remote import use_cache
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.lab.look import every_content, look
from instep.recipe.build import call
from instep.recipe.recipe import Recipe
from instep.recipe.source_file import load_function
from instep.report.figures.dataset import DataPart, divergence
from instep.report.figures.lengths import PartLengths, lengths_of
from instep.worker.reading.data_split import SplitData, split_data
from instep.worker.reading.streamed import with_stream
from instep.worker.rounds.own_data import divide

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards

MOST_READ, MOST_MEASURED = 2000, 500
"""Samples of each side whose contents are compared; that are read for lengths without a split."""

Told = Callable[[], None]

MOST_ASKED = 20_000
"""Samples that a function of labels is called for."""


class AboutData(NamedTuple):
    """What a job will be trained on."""

    train: int
    validate: int
    """Samples of each side; 0 where nothing is validated on."""
    left_out: int
    """Samples on neither side, as those of a gap."""
    split: str
    classes: tuple[dict[str, int], dict[str, int]] | None
    """How often each label is on each side; None where nobody says the labels."""
    twins: Duplicates | None
    """What is on both sides: of all samples, or of at most `MOST_READ` of each."""
    parts: list[DataPart]
    lengths: list[PartLengths]
    """Sizes of what differs in length, in samples of the training side."""
    measured: int
    """How many samples those are."""
    sample: Any
    folders: list[Shards]
    """Prepared folders that the training side is made of."""
    read: list[tuple[int, Any]]
    """The first sample of the training side that was read, with its position; or none."""
    why_no_classes: str

    def as_table(self) -> dict[str, Any]:
        """For `--json`."""
        twins = self.twins
        return {
            "train": self.train,
            "validate": self.validate,
            "left_out": self.left_out,
            "split": self.split,
            "classes": list(self.classes) if self.classes else None,
            "compared": twins.looked_at if twins else None,
            "on_both_sides": len(twins.twins) if twins else None,
            "parts": [{k: v for k, v in p._asdict().items() if k != "classes"} for p in self.parts],
            "lengths": {each.name: each.as_table() for each in self.lengths},
            "measured": self.measured,
        }


def about_data(
    job: JobSpec, sample: int | None = None, compare: Callable[[int], Told] | None = None
) -> AboutData:
    """Look at the dataset of a job.

    Args:
        job: the job; its paths are absolute.
        sample: which sample of the training side is shown; it has to be on this machine.
        compare: compare the contents of all samples of both sides, not of a choice. It is called
            with their number, and gives what is called after each.

    Raises:
        InstepError: the recipe cannot be called, or its dataset not be divided.
        SpecError: there is no such sample, or nothing to compare.
    """
    use_cache(job.data.cache, job.data.cache_gb)
    made = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
    split = split_data(job, with_stream(job, made))
    recipe = split.recipe
    samples, validated = len(recipe.train), len(recipe.validate or ())
    if sample is not None and not 0 <= sample < samples:
        raise SpecError(f"--sample {sample}: the training side has {samples:,} samples.")
    trained = look(recipe.train, job.seed, MOST_READ if validated else MOST_MEASURED)
    twins = None
    if compare:
        twins = _of_all(recipe, compare)
    elif validated:
        twins = duplicates(trained.contents, look(recipe.validate, job.seed, MOST_READ).contents)
    labels = _labels(job, made, split)
    return AboutData(
        train=samples,
        validate=validated,
        left_out=split.samples - samples - validated if split.sides is not None else 0,
        split=job.data.split,
        classes=_classes(labels, split),
        twins=twins,
        parts=list(_parts(job, recipe, labels, split)),
        lengths=lengths_of(trained.sizes),
        measured=len(trained.sizes),
        sample=None if sample is None else recipe.train[sample],
        folders=list(sets_in(recipe.train)),
        read=trained.first,
        why_no_classes="" if labels else _why_no_labels(job, made),
    )


def _of_all(recipe: Recipe, compare: Callable[[int], Told]) -> Duplicates:
    if not recipe.validate:
        raise SpecError(
            "--duplicates compares the samples to train on with those to validate on, and there "
            "are none. Give the job a split, or Recipe(validate=...), or leave it out."
        )
    if isinstance(recipe.train, Stream):
        raise SpecError(
            "--duplicates reads all samples, and a stream may have no end. Leave it out: the "
            f"contents of {MOST_READ:,} are compared."
        )
    told = compare(len(recipe.train) + len(recipe.validate))
    return duplicates(every_content(recipe.train, told), every_content(recipe.validate, told))


def _labels(job: JobSpec, recipe: Recipe, split: SplitData) -> Callable[[int], Hashable] | None:
    """The label of a sample of the whole dataset; None where nobody says it, or not cheaply."""
    given, dataset = job.data.labels or recipe.labels, recipe.train
    if given is None:
        return None
    if callable(given):
        if split.samples > MOST_ASKED:
            return None
        return lambda index: _plain(given(dataset, index))
    values: Sequence[Any] = dataset.column(given) if isinstance(given, str) else given
    return lambda index: _plain(values[index])


def _why_no_labels(job: JobSpec, recipe: Recipe) -> str:
    if (job.data.labels or recipe.labels) is None:
        return "nobody says the labels. Set data.labels to a column, or give Recipe(labels=...)."
    return (
        f"Recipe.labels is a function, which is not called for more than {MOST_ASKED:,} samples. "
        "Give a value for each sample."
    )


def _plain(label: Any) -> Hashable:
    found: Hashable = label.item() if hasattr(label, "item") else label
    return found


def _classes(
    labels: Callable[[int], Hashable] | None, split: SplitData
) -> tuple[dict[str, int], dict[str, int]] | None:
    if labels is None:
        return None
    trained: Any = range(split.samples) if split.sides is None else split.sides.train.tolist()
    validated: Any = () if split.sides is None else split.sides.validate.tolist()
    return _counted(map(labels, trained)), _counted(map(labels, validated))


def _counted(labels: Iterator[Hashable]) -> dict[str, int]:
    return {str(name): count for name, count in sorted(Counter(labels).items(), key=str)}


def _parts(
    job: JobSpec,
    recipe: Recipe,
    labels: Callable[[int], Hashable] | None,
    split: SplitData,
) -> Iterator[DataPart]:
    own = divide(job, recipe)
    if own is None:
        if job.data.parts:
            yield from _on_hosts(job, recipe)
        return
    train, sizes = own.train, own.train.sizes.tolist()
    whole: Counter[Hashable] = Counter()
    each: list[Counter[Hashable]] = []
    for number in range(len(sizes)):
        begin = int(train.offsets[number])
        found: Counter[Hashable] = Counter()
        if labels is not None:
            indices = train.indices(0, begin, begin + sizes[number])
            if split.sides is not None:
                indices = split.sides.train[indices]
            found = Counter(map(labels, np.asarray(indices).tolist()))
        each.append(found)
        whole += found
    lots = own.rounds.lots
    places = list(map(_files(recipe), lots)) if lots else [(0, 0, "", "")] * len(sizes)
    for size, found, lying in zip(sizes, each, places, strict=True):
        skew = divergence(found, whole) if labels is not None else None
        counts = {str(name): count for name, count in found.items()}
        yield DataPart(size, size / sum(sizes), skew, *lying, classes=counts)


def _on_hosts(job: JobSpec, recipe: Recipe) -> Iterator[DataPart]:
    """The parts of a dataset that lie on hosts, and what of them is here."""
    order, files = parts_order(job, recipe.train), _files(recipe)
    for size, lot in zip(order.part_sizes.tolist(), order.lots, strict=True):
        yield DataPart(size, size / order.samples, None, *files(lot))


def _files(recipe: Recipe) -> Callable[[Lot], tuple[int, int, str, str]]:
    """Tell how many files some samples are in, how many of them are here; the first and the last.

    What is here is looked at once, for all parts.
    """
    folder = next(sets_in(recipe.train), None)
    held = np.frombuffer(b"" if folder is None else folder.held, "u1")
    here = np.unpackbits(held, bitorder="little")

    def of(lot: Lot) -> tuple[int, int, str, str]:
        shards = lot[0].tolist()
        if folder is None or not shards:
            return len(shards), 0, "", ""
        first, last = (folder.manifest.shards[shards[at]].file for at in (0, -1))
        return len(shards), int(here[shards].sum()), first, last

    return of
