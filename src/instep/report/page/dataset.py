"""Pictures of some data: sides, classes, lengths, parts, shards, and tables of the rest.

Each is a function from figures to a part of a page, empty where there is nothing to draw. Way in:
`pictures`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.shards.manifest import Shard, Source
from instep.report.figures.data_of_run import of_run
from instep.report.figures.dataset import (
    DataFigures,
    DataPart,
    PreparedFolder,
    bad_records,
    values_of,
)
from instep.report.figures.identity import flat
from instep.report.figures.lengths import MOST_BINS, PartLengths, histogram_of
from instep.report.figures.pixels import Pixels
from instep.report.figures.sample import in_words
from instep.report.page.bars import MOST_WORKERS, histogram, image, stacked_bars
from instep.report.page.markup import (
    MOST_ROWS,
    Html,
    figure,
    hash_of,
    join,
    listing,
    more,
    section,
    shortened,
    table,
    tag,
)
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_share
from instep.words import plural

MOST_CLASSES, _COLOURS = 20, 8
"""Classes that have a bar; labels that have a colour, the last one for all others."""


class Picture(NamedTuple):
    """A part of a page."""

    title: str
    note: str
    body: Html


def as_sections(data: DataFigures) -> Iterator[Html]:
    """All of them, each a section of its own."""
    for each in pictures(data):
        yield section(each.title, each.body, note=each.note)


def data_of(folder: RunFolder) -> Html:
    """The data of a run in one section; nothing where its log has no more than sizes."""
    data = of_run(folder)
    drawn = (
        []
        if data is None
        else [
            join([tag("h3", each.title), tag("p", each.note, class_="note"), each.body])
            for each in pictures(data)
        ]
    )
    return section("Data", *drawn) if drawn else Html("")


def tiles_of(data: DataFigures) -> Html:
    """The few figures that everybody looks for first."""
    shown = {side: readable_count(samples) for side, samples in data.sides.items()}
    for what, by_side in data.classes.items():
        names = {name for classes in by_side.values() for name in classes}
        shown[f"classes: {what}"] = readable_count(len(names))
    if data.parts:
        shown[f"{data.holders}s"] = readable_count(len(data.parts))
    for each in data.folders[:1]:
        manifest = each.manifest
        shown |= {"shards": readable_count(len(manifest.shards))}
        shown |= {"bytes": readable_bytes(manifest.bytes)}
        shown |= {"bad records": readable_count(manifest.bad)}
    cells = [tag("div", tag("dt", name), tag("dd", value)) for name, value in shown.items()]
    return tag("dl", *cells[:8], class_="tiles")


def pictures(data: DataFigures) -> Iterator[Picture]:
    """Draw what there is, in the order of a page."""
    if len(data.sides) > 1:
        yield _sides(data)
    for what, by_side in data.classes.items():
        if any(count > 0 for classes in by_side.values() for count in classes.values()):
            yield _classes(what, by_side)
    for lengths in data.lengths:
        yield _lengths(lengths, data.measured)
    if data.parts:
        yield _parts(data.parts, data.holders)
    for folder in data.folders:
        where = f" of {folder.path}" if len(data.folders) > 1 else ""
        yield _shards(folder.manifest.shards, where)
        yield _columns(folder, where)
        yield from _values(folder, where)
        if folder.manifest.bad:
            yield _bad(folder, where)
        yield _origin(folder, where)
    if data.sample is not None:
        yield _sample(data.sample, data.images)
    if data.unknown:
        unknown = tag("ul", *(tag("li", text) for text in data.unknown))
        yield Picture("Not known", "This cannot be shown here.", unknown)


def _sides(data: DataFigures) -> Picture:
    bars = stacked_bars([("samples", data.sides)], list(data.sides), data.sides, readable_count)
    leaks = tag("p", data.leaks, class_="leaks") if data.leaks else Html("")
    return Picture("Sides", data.split, join([bars, leaks]))


def _classes(what: str, by_side: Mapping[str, Mapping[str, int]]) -> Picture:
    whole: Counter[str] = Counter()
    for classes in by_side.values():
        whole.update(classes)
    whole = +whole  # without those that no side has
    shown = whole.most_common(MOST_CLASSES)
    sides = [side for side, classes in by_side.items() if classes]
    rows = [(name, {side: by_side[side].get(name, 0) for side in sides}) for name, _ in shown]
    totals = {side: sum(by_side[side].values()) for side in sides if len(sides) > 1}
    beside = [f"{readable_count(n)} ({readable_share(n, whole.total())})" for _, n in shown]
    bars = stacked_bars(rows, sides, totals, readable_count, beside)
    largest, least = max(whole.values()), min(whole.values())
    note = (
        f"{readable_count(len(whole))} classes; the largest has {figure(largest / least)} "
        "times as many samples as the smallest."
        if len(whole) > 1
        else "All samples are of one class."
    )
    return Picture(f"Classes: {what}", note, join([bars, more(len(whole), len(shown), "classes")]))


def _lengths(lengths: PartLengths, measured: str) -> Picture:
    told = lengths.as_table()
    counts, edges = histogram_of(lengths.values)
    mean, median = figure(told["mean"]), figure(float(np.median(lengths.values)))
    note = (
        f"{readable_count(told['least'])} to {readable_count(told['largest'])}, mean {mean}, "
        f"median {median}, deviation {figure(told['deviation'])}; {measured}. "
    )
    note += _logarithmic(edges.tolist())
    drawn = histogram(counts.tolist(), edges.tolist(), "sample")
    return Picture(f"Lengths: {lengths.name}", note, drawn)


def _logarithmic(edges: Sequence[int]) -> str:
    return "The axis is about logarithmic." if len(set(np.diff(edges).tolist())) > 1 else ""


def _parts(parts: Sequence[DataPart], holder: str) -> Picture:
    shown = parts[:MOST_WORKERS]
    whole: Counter[str] = Counter()
    for part in parts:
        whole.update(part.classes)
    named = [name for name, _ in whole.most_common(_COLOURS)]
    names = named if len(whole) <= _COLOURS else named[:-1]
    rest, one = "other labels", "samples"

    def split(counts: Mapping[str, int], samples: int) -> dict[str, float]:
        if not whole:
            return {one: samples}
        found: dict[str, float] = {name: counts.get(name, 0) for name in names}
        other = sum(counts.values()) - sum(found.values())
        return found | ({rest: other} if len(whole) > len(names) else {})

    rows = [
        (f"{holder} {number}", split(part.classes, part.samples))
        for number, part in enumerate(shown)
    ]
    total = split(whole, sum(part.samples for part in parts))
    legend = total if whole else {}
    bars = stacked_bars(rows, list(total), legend, readable_count, list(map(_beside, shown)))
    note = "Samples of each and their share"
    if any(part.skew is not None for part in parts):
        note += (
            ", coloured by label; and the Kullback-Leibler divergence of its labels from those of "
            "all, in nats: 0 where they are distributed as in all"
        )
    title = f"{holder.capitalize()}s"
    return Picture(title, f"{note}.", join([bars, more(len(parts), len(shown), f"{holder}s")]))


def _beside(part: DataPart) -> str:
    text = f"{readable_count(part.samples)} ({part.share:.1%})"
    if part.skew is not None:
        text += f", {part.skew:.3f} nats"
    return text + (f", {part.here} of {plural(part.shards, 'shard')} here" if part.shards else "")


def _shards(shards: Sequence[Shard], where: str) -> Picture:
    sizes = np.array([shard.samples for shard in shards], np.int64)
    size = readable_bytes(sum(shard.bytes for shard in shards))
    note = f"{plural(len(shards), 'file')}, {size}. "
    if len(shards) > MOST_WORKERS:
        counts, edges = histogram_of(sizes)
        note += "How many have so many samples."
        drawn = histogram(counts.tolist(), edges.tolist(), "shard")
    else:
        rows = [(shard.file, {"samples": shard.samples}) for shard in shards]
        beside = [
            f"{readable_count(shard.samples)}, {readable_bytes(shard.bytes)}" for shard in shards
        ]
        drawn = stacked_bars(rows, ["samples"], {}, readable_count, beside)
    return Picture(f"Shards{where}", note, drawn)


def _columns(folder: PreparedFolder, where: str) -> Picture:
    manifest = folder.manifest

    def row(column: Any) -> list[str]:
        told = manifest.statistics.get(column.name, {})
        told, of = (told["lengths"], "lengths") if "lengths" in told else (told, "values")
        values = [_shown(told.get(name)) for name in ("least", "largest", "mean", "deviation")]
        shown = [tag("span", value, class_="unbroken") for value in values]
        return [shortened(column.name, 100), str(column), of, *shown]

    head = ["column", "type", "of", "least", "largest", "mean", "deviation"]
    rows = listing(head, manifest.columns, row, "columns", numbers_from=3)
    note = "Of text, and of arrays that differ in it, the lengths; of others all numbers."
    return Picture(f"Columns{where}", note, rows)


def _values(folder: PreparedFolder, where: str) -> Iterator[Picture]:
    """Histograms of whole numbers that are no classes, such as times and widths."""
    for name, values in values_of(folder.manifest).items():
        binned = values.bins(MOST_BINS)
        if binned is not None:
            counts, edges = (each.tolist() for each in binned)
            note = f"{plural(len(values.counts), 'different value')}. {_logarithmic(edges)}"
            yield Picture(f"Values: {name}{where}", note, histogram(counts, edges, "sample"))


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    whole = abs(value) < 1e15 and value == int(value)
    return readable_count(value) if whole else figure(value)


def _bad(folder: PreparedFolder, where: str) -> Picture:
    manifest = folder.manifest
    note = f"{plural(manifest.bad, 'record')} left out, in {folder.path}/{manifest.bad_file}."
    try:
        found = bad_records(folder)
    except OSError as error:
        found, note = [], f"{note} It cannot be read: {error.strerror or error}."
    head = ["where", "what is wrong"]
    rows = [[shortened(place, 300), shortened(text, 500)] for place, text in found]
    drawn = [table(head, rows, numbers_from=9)] if rows else []
    return Picture(
        f"Bad records{where}", note, join([*drawn, more(manifest.bad, len(rows), "records")])
    )


def _origin(folder: PreparedFolder, where: str) -> Picture:
    manifest = folder.manifest

    def row(source: Source) -> list[str]:
        hashed = tag("code", source.hash[:16])
        return [shortened(source.path, 300), readable_bytes(source.bytes), hashed]

    head = ["source", "size", "hash"]
    size = readable_bytes(sum(source.bytes for source in manifest.sources))
    note = f"{plural(len(manifest.sources), 'source')}, {size}."
    body = [listing(head, manifest.sources, row, "sources", numbers_from=1)]
    made = [
        [name, tag("code", shortened(text, 300))]
        for name, text in flat(manifest.made_by)
        if text not in ("", "null", "{}", "[]") and name != "asked.sources"
    ]
    if made:
        head = ["made by", ""]
        body.append(table(head, made[:MOST_ROWS], numbers_from=9))
    body.append(tag("p", "sha256 of all samples ", hash_of(manifest.sha256), class_="note hash"))
    return Picture(f"Where it came from{where}", note, join(body))


def _sample(sample: Mapping[str, Any], images: Mapping[str, Pixels]) -> Picture:
    rows = [
        [shortened(name, 100), tag("code", shortened(in_words(summary), 400))]
        for name, summary in list(sample["values"].items())[:MOST_ROWS]
    ]
    return Picture(
        f"Sample {sample['number']}",
        "As the dataset returns it; of an array its first values.",
        join(
            [*map(image, list(images.values())[:4]), table(["part", "value"], rows, numbers_from=9)]
        ),
    )
