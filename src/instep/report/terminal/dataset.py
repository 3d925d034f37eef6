"""What a prepared folder holds, for a terminal: samples, columns, classes, lengths, shards.

Way in: `dataset_lines`, and `sample_lines` for one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from instep.data.shards.manifest import Manifest
from instep.report.figures.dataset import values_of
from instep.report.figures.sample import in_words
from instep.report.figures.values import CountedValues
from instep.units import readable_bytes, readable_share
from instep.words import plural, printable, short_number

_MOST_CLASSES, _SOME = 12, 5
"""Of more classes, the largest few are shown."""

_BINS = 8
"""Bars of numbers that are no classes."""

_WIDTH = 30
"""Characters of the longest bar."""


def dataset_lines(folder: Path, manifest: Manifest) -> list[str]:
    """The lines for one folder."""
    return [printable(line) for line in _lines(folder, manifest)]


def _lines(folder: Path, manifest: Manifest) -> Iterator[str]:
    sizes = [shard.samples for shard in manifest.shards]
    yield f"data       {folder}"
    spread = f", {min(sizes):,} to {max(sizes):,} samples each" if len(sizes) > 1 else ""
    shards = f"{plural(len(sizes), 'shard')}, {readable_bytes(manifest.bytes)}{spread}"
    yield f"samples    {manifest.samples:,} in {shards}"
    counted = values_of(manifest)
    for column in manifest.columns:
        told = manifest.statistics.get(column.name, {})
        yield f"column     {column.name}: {column}{_told(told)}"
        if column.name in counted:
            yield from _values(counted[column.name], manifest.samples)
    if manifest.bad:
        of = folder / manifest.bad_file
        yield f"bad        {plural(manifest.bad, 'record')} left out, in {of}"
    size = readable_bytes(sum(source.bytes for source in manifest.sources))
    predicted = manifest.made_by.get("predict", {})
    if predicted:
        yield f"from       predictions of {predicted['of']} for {predicted['data']}"
    else:
        yield f"from       {plural(len(manifest.sources), 'source')}, {size}"
    asked = manifest.made_by.get("asked", {})
    if asked.get("map"):
        yield f"by         {asked['map']}"
    yield f"sha256     {manifest.sha256}"


def _told(told: Mapping[str, Any]) -> str:
    parts = []
    if "mean" in told:
        least, largest = _number(told["least"]), _number(told["largest"])
        mean, deviation = short_number(told["mean"]), short_number(told["deviation"])
        parts.append(f"{least} to {largest}, mean {mean}, deviation {deviation}")
    if lengths := told.get("lengths"):
        parts.append(f"length {_length(lengths)}")
    return f"; {'; '.join(parts)}" if parts else ""


def _length(lengths: Mapping[str, Any]) -> str:
    least, largest = _number(lengths["least"]), _number(lengths["largest"])
    return f"{least} to {largest}, mean {short_number(lengths['mean'])}"


def _number(value: float) -> str:
    return f"{int(value):,}" if value == int(value) else short_number(value)


def _values(values: CountedValues, samples: int) -> Iterator[str]:
    """Bars of classes, or of bins; of an identifier only how many there are."""
    if values.are_classes:
        yield from _classes(values.counts, samples)
        return
    yield f"           {len(values.counts):,} different values"
    if (binned := values.bins(_BINS)) is None:
        return
    counts, edges = (each.tolist() for each in binned)
    edges[-1] = max(map(int, values.counts)) + 1
    for number, count in enumerate(counts):
        first, last = edges[number], edges[number + 1] - 1
        name = f"{first:,}" if first == last else f"{first:,} to {last:,}"
        yield _bar(name, count, max(counts), samples)


def _bar(name: str, count: int, most: int, samples: int) -> str:
    bar = "#" * (max(1, round(_WIDTH * count / most)) if count else 0)
    share = readable_share(count, samples)
    return f"           {name[:20]:20} {bar:{_WIDTH}} {count:,} ({share})"


def _classes(classes: Mapping[str, int], samples: int) -> Iterator[str]:
    if not classes:
        return
    most = max(classes.values())
    few = len(classes) <= _MOST_CLASSES
    shown = sorted(classes.items(), key=lambda each: -each[1])[: _MOST_CLASSES if few else _SOME]
    for name, count in shown:
        yield _bar(name, count, most, samples)
    if len(classes) > len(shown):
        yield f"           and {len(classes) - len(shown):,} more classes"


def sample_lines(sample: Mapping[str, Any]) -> list[str]:
    """One sample, of `figures.sample.sample_table`."""
    lines = [f"sample     {sample['number']}"]
    for name, summary in sample["values"].items():
        lines.append(f"           {name}: {in_words(summary)}")
    return [printable(line) for line in lines]


def job_lines(about: Mapping[str, Any]) -> list[str]:
    """What a job will be trained on; `about` is of `lab.about_data`, for `--json`."""
    return [printable(line) for line in _job_lines(about)]


def _job_lines(about: Mapping[str, Any]) -> Iterator[str]:
    yield f"train      {plural(about['train'], 'sample')}"
    if about["validate"]:
        split = f", by data.split = {about['split']!r}" if about["split"] else ""
        yield f"validate   {plural(about['validate'], 'sample')}{split}"
    if about["left_out"]:
        yield f"left out   {plural(about['left_out'], 'sample')}, on neither side"
    if about["classes"]:
        for side, classes in zip(("train", "validate"), about["classes"], strict=True):
            if classes:
                yield f"classes    {side}"
                yield from _classes(classes, sum(classes.values()))
    if about["compared"]:
        trained, validated = about["compared"]
        found = about["on_both_sides"]
        yield (
            f"leaks      {found} of {validated:,} samples to validate on are among {trained:,} to "
            "train on"
        )
    looked = f"of {plural(about['measured'], 'sample')} that were read"
    for name, lengths in about["lengths"].items():
        yield f"lengths    {name}: {_length(lengths)} ({looked})"
    if about["measured"] and not about["lengths"]:
        yield f"lengths    the same in all {looked}"
    for number, part in enumerate(about["parts"]):
        yield f"part {number:<6}{part['samples']:,} samples ({part['share']:.1%}){_more(part)}"


def _more(part: Mapping[str, Any]) -> str:
    """The skew of a part, or where it lies."""
    found = f", labels {part['skew']:.3f} nats from all" if part["skew"] is not None else ""
    if part["shards"]:
        found += f", {part['here']} of {plural(part['shards'], 'shard')} here"
    return found + (f": {part['first']} to {part['last']}" if part["first"] else "")
