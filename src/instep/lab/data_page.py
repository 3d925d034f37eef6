"""The page of `instep data --html`: what the command prints, drawn, of a job or a prepared folder.

No more of a dataset is read than the command reads, but for the lengths in a few files of a
prepared folder, which are read without the samples. Ways in: `of_job`, `of_folder`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from instep.errors import DataError
from instep.job.spec import JobSpec
from instep.lab.about_data import AboutData
from instep.report.figures.dataset import DataFigures, PreparedFolder, classes_in, classes_of
from instep.report.figures.lengths import PartLengths
from instep.report.figures.pixels import pixels_in
from instep.report.figures.sample import sample_table
from instep.report.figures.shard_lengths import lengths_in
from instep.units import readable_count
from instep.words import plural

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards


def of_job(job: JobSpec, about: AboutData, sample: Mapping[str, Any] | None) -> DataFigures:
    """Figures of a job.

    Args:
        job: the job.
        about: what `about_data` has found.
        sample: of `sample_table`; None for the first one that was read.
    """
    sides = {"train": about.train, "validate": about.validate, "neither": about.left_out}
    folders = [PreparedFolder(str(each.folder), each.manifest) for each in about.folders]
    classes: dict[str, Mapping[str, Mapping[str, int]]] = {}
    if about.classes:
        classes["labels"] = dict(zip(("train", "validate"), about.classes, strict=True))
    else:
        classes = classes_in(folders)
    if sample is None and about.read:
        sample = sample_table(*about.read[0])
    return DataFigures(
        sides={side: samples for side, samples in sides.items() if samples},
        split=f"By data.split = {about.split!r}." if about.split else "Given by the recipe.",
        leaks=_leaks(about),
        classes=classes,
        lengths=about.lengths,
        measured=f"of {plural(about.measured, 'sample')} that were read",
        parts=about.parts,
        holders="part" if job.data.parts else "participant",
        folders=folders,
        sample=sample,
        images=pixels_in(about.read[0][1] if about.sample is None and about.read else about.sample),
        unknown=list(_unknown_of_job(job, about, sample)),
    )


def _leaks(about: AboutData) -> str:
    twins = about.twins
    if twins is None:
        return ""
    trained, validated = map(readable_count, twins.looked_at)
    text = (
        f"{readable_count(len(twins.twins))} of {validated} samples to validate on have the "
        f"content of one of {trained} to train on."
    )
    if twins.twins:
        validation, train = twins.twins[0]
        text += f" The first: sample {validation} of the validation side is sample {train} of the "
        text += "training side, and the validation looks better than it is."
    return text


def _unknown_of_job(
    job: JobSpec, about: AboutData, sample: Mapping[str, Any] | None
) -> Iterator[str]:
    if about.classes is None:
        yield f"Classes of the sides: {about.why_no_classes}"
    if not about.validate:
        yield (
            "Leaks: nothing is validated on. Set data.split, or give Recipe(validate=...), and the "
            "two sides are compared."
        )
    if about.parts and all(part.skew is None for part in about.parts):
        yield "How far the labels of each are from all: for that, labels have to be known."
    if not about.lengths:
        yield (
            f"Lengths: {plural(about.measured, 'sample')} were read, and all have one size."
            if about.measured
            else "Lengths: no sample could be read."
        )
    if not about.folders:
        yield (
            "Shards, bad records and sources: the dataset is no folder of instep prepare, or "
            "does not say so."
        )
    if sample is None:
        yield "A sample: none could be read."


def of_folder(path: str, folder: Shards, number: int | None) -> DataFigures:
    """Figures of a prepared folder.

    Args:
        path: of the folder, as it was typed.
        folder: the samples.
        number: of the sample that is shown; None for the first one, if it is here.
    """
    manifest, unknown = folder.manifest, []
    classes = {name: {"all": counts} for name, counts in classes_of(manifest).items()}
    if not classes:
        unknown.append(
            "Classes: no column of whole numbers or short text has at most 1,000 different values."
        )
    lengths, measured = list[PartLengths](), ""
    try:
        lengths, measured = lengths_in(folder)
        if not lengths:
            unknown.append("Lengths: each column has the same size in all samples.")
    except DataError as error:
        unknown.append(f"Lengths: {error}")
    sample, images = None, {}
    try:
        if manifest.samples:
            read = folder[number or 0]
            sample, images = sample_table(number or 0, read), pixels_in(read)
    except DataError as error:
        if number is not None:
            raise
        unknown.append(f"A sample: {error}")
    unknown.append(
        "Sides, leaks and parts: those are a job's. instep data JOB --html FILE draws them."
    )
    return DataFigures(
        sides={"samples": manifest.samples},
        classes=classes,
        lengths=lengths,
        measured=measured,
        folders=[PreparedFolder(path, manifest)],
        sample=sample,
        images=images,
        unknown=unknown,
    )
