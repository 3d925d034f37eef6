"""Figures of the data of a run: from its log, and from the manifests of the shards it read.

A run of an older instep has less of it in its log, or nothing. Way in: `of_run`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from instep.data.shards.manifest import read_manifest
from instep.data.sources.shards import shards
from instep.errors import DataError
from instep.report.figures.dataset import (
    DataFigures,
    DataPart,
    PreparedFolder,
    classes_in,
    divergence,
)
from instep.report.figures.lengths import PartLengths
from instep.report.figures.shard_lengths import lengths_in
from instep.store.run_files import Event
from instep.store.run_folder import RunFolder
from instep.units import readable_count
from instep.words import is_url, shown_url

_SIDES = ("train", "validate")


def of_run(folder: RunFolder) -> DataFigures | None:
    """Figures of the data that a run was trained on; None if its log has no more than sizes."""
    split = folder.last("data_split")
    known = [e for e in folder.named("dataset_known") if e["dataset"] == "training"]
    folders, unknown = _folders(known[-1].get("prepared") or [] if known else [])
    divided, placed = folder.last("data_divided"), folder.last("parts_placed")
    parts = _parts(divided.get("sizes") or placed.get("sizes") or [], divided.get("labels") or [])
    balanced = folder.last("data_balanced")
    if not (split or folders or unknown or parts or balanced):
        return None
    classes = _classes(split) or classes_in(folders)
    if balanced.get("names"):
        names, sides = balanced["names"], [s for s in ("before", "planned") if balanced[s]]
        classes = classes | {
            "in an epoch": {side: dict(zip(names, balanced[side], strict=True)) for side in sides}
        }
    if parts and parts[0].skew is None:
        unknown.append("Labels of each: instep data JOB --html FILE counts and draws them.")
    lengths, measured = _lengths(folders)
    fold = f", fold {split['fold'] + 1} of {split['folds']}" if split.get("folds") else ""
    return DataFigures(
        sides=_sides(folder, split, known),
        split=f"By data.split = {split.get('split')!r}{fold}." if split else "Given by the recipe.",
        leaks=_leaks(folder),
        classes=classes,
        lengths=lengths,
        measured=measured,
        parts=parts,
        holders="participant" if divided else "part",
        folders=folders,
        unknown=unknown,
    )


def _sides(folder: RunFolder, split: Event, known: list[Event]) -> dict[str, int]:
    if split:
        sides = {"train": split["train"], "validate": split["validation"]}
        sides["neither"] = split["samples"] - sum(sides.values())
    else:
        sides = {
            "train": int(known[-1]["samples"]) if known else folder.plan.epoch_samples,
            "validate": folder.last("worker_ready").get("validation_samples") or 0,
        }
    return {side: samples for side, samples in sides.items() if samples > 0}


def _classes(split: Event) -> dict[str, Mapping[str, Mapping[str, int]]]:
    found = split.get("classes") or []
    if len(found) != len(_SIDES) or not all(map(_are_counts, found)):
        return {}
    return {"labels": dict(zip(_SIDES, found, strict=True))}


def _are_counts(counts: Any) -> bool:
    return isinstance(counts, dict) and all(isinstance(n, int) and n >= 0 for n in counts.values())


def _leaks(folder: RunFolder) -> str:
    compared = [e for e in folder.named("data_split") if len(e.get("looked_at") or []) == 2]
    if not compared:
        return ""
    event = compared[-1]
    trained, validated = event["looked_at"]
    text = (
        f"{readable_count(event.get('duplicates') or 0)} of {readable_count(validated)} samples to "
        f"validate on that were compared have the content of one of {readable_count(trained)} to "
        "train on."
    )
    if len(example := event.get("example") or []) == 2:
        text += f" The first: sample {example[0]} of the dataset is sample {example[1]}."
    return text


def _lengths(folders: list[PreparedFolder]) -> tuple[list[PartLengths], str]:
    """Lengths of some samples of each folder whose files are whole, and which those are."""
    found, measured = list[PartLengths](), list[str]()
    for folder in folders:
        where = f" of {folder.path}" if len(folders) > 1 else ""
        with suppress(DataError):  # also where pyarrow is not installed
            lengths, of = lengths_in(shards(folder.path))
            found += [PartLengths(f"{each.name}{where}", each.values) for each in lengths]
            measured.append(of)
    return found, measured[0] if len(set(measured)) == 1 else "of samples chosen at random"


def _parts(sizes: list[Any], labels: list[Any]) -> list[DataPart]:
    counts = [size for size in sizes if isinstance(size, int) and size >= 0]
    whole = sum(counts) or 1
    if len(labels) != len(counts) or not all(map(_are_counts, labels)):
        return [DataPart(size, size / whole, None) for size in counts]
    of_all: Counter[str] = Counter()
    for own in labels:
        of_all.update(own)
    return [
        DataPart(size, size / whole, divergence(own, of_all), classes=own)
        for size, own in zip(counts, labels, strict=True)
    ]


def _folders(prepared: list[Any]) -> tuple[list[PreparedFolder], list[str]]:
    """The manifests that are still those of the run, and sentences on others."""
    found, unknown = list[PreparedFolder](), list[str]()
    for each in prepared:
        if not (
            isinstance(each, list) and len(each) == 2 and all(isinstance(e, str) for e in each)
        ):
            continue
        path, sha256 = each
        if is_url(path):
            unknown.append(f"Shards and columns: {shown_url(path)} is not read for a report.")
            continue
        try:
            manifest = read_manifest(path)
        except DataError as error:
            unknown.append(f"Shards and columns: {error}")
            continue
        if manifest.sha256 == sha256:
            found.append(PreparedFolder(path, manifest))
        else:
            unknown.append(
                f"Shards and columns: {path} has other samples now than when the run was trained."
            )
    return found, unknown
