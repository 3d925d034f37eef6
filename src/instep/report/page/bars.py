"""The drawn parts of the report page: throughput strips, stacked bars, histograms, images.

Each is a function to markup that needs no script, of a run or of figures. At most
`MOST_WORKERS` workers are drawn one by one, to keep the page small.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from instep.report.figures.curves import throughput
from instep.report.figures.pixels import Pixels
from instep.report.figures.summary import mean_split, time_split
from instep.report.page.markup import Html, join, more, section, tag
from instep.store.run_files import PARTS
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds, readable_share
from instep.words import member, plural

MOST_WORKERS = 48
"""Workers drawn one by one."""

_MOST_MARKS = 40  # on one strip


def throughput_strips(folder: RunFolder) -> Html:
    """Samples per second of each worker over the time of the run, on one scale.

    Of the processes of a replica that compute the same samples, one has them in its records.
    """
    counted = folder.steps["worker"][folder.steps["samples"] > 0]
    workers = [int(w) for w in np.unique(counted) if w not in folder.members.servers]
    speeds = {worker: throughput(folder, worker) for worker in workers[:MOST_WORKERS]}
    top = max((float(speed.max()) for speed in speeds.values()), default=0.0)
    if top <= 0:
        return Html("")
    rows = []
    for worker, speed in speeds.items():
        active_s = folder.times.training_seconds(worker)
        mean = float(folder.steps_of(worker)["samples"].sum()) / max(active_s, 1e-9)
        rows += [
            tag("span", f"worker {worker}", class_="who"),
            _strip(speed / top, _marks(folder, worker)),
            tag("span", f"{readable_count(mean)}/s", class_="num"),
        ]
    axis = tag(
        "div", tag("span", "0"), tag("span", readable_seconds(folder.times.seconds)), class_="axis"
    )
    note = (
        f"Samples per second over the time of the run; full height is {readable_count(top)}. "
        "Lines mark new generations (dotted), checkpoints (thin) and failures (red)."
    )
    if folder.spec.mesh.same_batch > 1:
        note += " Of the workers that compute the same micro-batches, one is drawn."
    body = tag("div", *rows, tag("span"), axis, class_="strips")
    return section("Throughput", body, more(len(workers), MOST_WORKERS, "workers"), note=note)


def _strip(heights: Any, marks: list[Html]) -> Html:
    width = 1000 / len(heights)
    points = [f"{(i + 0.5) * width:.0f},{40 - 38 * h:.1f}" for i, h in enumerate(heights)]
    area = f"M0,40L{'L'.join(points)}L1000,40Z"
    drawn = [tag("path", d=area, class_="area"), *marks]
    return Html(
        f'<svg viewBox="0 0 1000 40" preserveAspectRatio="none" class="strip">{join(drawn)}</svg>'
    )


def _marks(folder: RunFolder, worker: int) -> list[Html]:
    chosen = [(e, "generation") for e in folder.members.generations[1:]]
    chosen += [(e, "checkpoint") for e in folder.named("checkpoint_saved")]
    chosen += [(e, "failure") for e in folder.members.failures if e.get("worker") == worker]
    seconds = max(folder.times.seconds, 1e-9)
    lines = []
    for event, kind in chosen[-_MOST_MARKS:]:
        x = round(1000 * float(folder.times.elapsed(event["time"])) / seconds)
        lines.append(tag("line", x1=x, x2=x, y1=0, y2=40, class_=kind))
    return lines


def time_spent(runs: list[RunFolder], names: list[str]) -> Html:
    """Stacked bars: where each worker's time went, in one run or in each of two."""
    rows, parts = [], [*PARTS, "other"]
    for folder, name in zip(runs, names, strict=True):
        prefix = f"{name}, " if len(runs) > 1 else ""
        workers = [int(w) for w in np.unique(folder.steps["worker"])]
        for worker in workers[: MOST_WORKERS // len(runs)]:
            who = member(worker, folder.members.servers)
            rows.append((f"{prefix}{who}", time_split(folder, worker)))
    if not rows:
        return Html("")
    mean_of = f" The means are of {names[0]}." if len(runs) > 1 else ""
    note = "Training time of each worker, from its first step to its last. "
    note += "Exchange that overlaps the backward pass is inside backward; other is validation and "
    note += "everything between steps." + mean_of
    whole = sum(len(np.unique(folder.steps["worker"])) for folder in runs)
    bars = stacked_bars(rows, parts, mean_split(runs[0]))
    return section("Where the time went", bars, more(whole, len(rows), "workers"), note=note)


def start_up(folder: RunFolder) -> Html:
    """Stacked bars: from the command to the first step, by phase."""
    newest = {int(e["worker"]): e.get("phases") or {} for e in folder.named("worker_ready")}
    servers = folder.members.servers
    rows = [(member(w, servers), p) for w, p in sorted(newest.items()) if p][:MOST_WORKERS]
    if not rows:
        return Html("")
    parts = list(dict.fromkeys(phase for _, phases in rows for phase in phases))
    mean = {p: sum(float(row.get(p, 0.0)) for _, row in rows) / len(rows) for p in parts}
    bars = stacked_bars(rows, parts, mean)
    note = "From the command until each worker was ready."
    return section("Start-up", bars, more(len(newest), len(rows), "workers"), note=note)


def stacked_bars(
    rows: Sequence[tuple[str, Mapping[str, float]]],
    parts: Sequence[str],
    whole: Mapping[str, float],
    show: Callable[[float], str] = readable_seconds,
    beside: Sequence[str] = (),
) -> Html:
    """Rows of one scale, and a legend.

    Args:
        rows: the name of each, and its parts by name; one that is left out is 0.
        parts: names in the order of their colours.
        whole: of each part, for the legend; empty for none.
        show: a figure as text.
        beside: text at the right of each row; by default the sum of its parts.
    """
    longest = max((sum(split.values()) for _, split in rows), default=0.0) or 1.0
    drawn = []
    for number, (label, split) in enumerate(rows):
        pieces = [
            tag(
                "i",
                class_=f"c{at % 8}",
                style=f"width:{100 * split.get(part, 0.0) / longest:.3f}%",
                title=f"{label}: {part} {show(split.get(part, 0.0))}",
            )
            for at, part in enumerate(parts)
            if split.get(part, 0.0) > 0
        ]
        text = beside[number] if beside else show(sum(split.values()))
        drawn += [tag("span", label, class_="who", title=label)]
        drawn += [tag("div", *pieces, class_="bar"), tag("span", text, class_="num")]
    total = sum(whole.values())
    legend = [
        tag(
            "li",
            tag("i", class_=f"c{at % 8}"),
            tag("span", part),
            tag("b", show(whole[part]) if whole[part] else "0"),
            tag("em", readable_share(whole[part], total)),
        )
        for at, part in enumerate(parts if whole else ())
    ]
    below = [tag("ul", *legend, class_="legend")] if legend else []
    return join([tag("div", *drawn, class_="bars"), *below])


def histogram(counts: Sequence[int], edges: Sequence[int], noun: str) -> Html:
    """Bars of equal width, one for each bin, with the bin and its count when pointed at.

    Args:
        counts: of each bin.
        edges: whole numbers, one more; bin k has those from edge k to below edge k + 1.
        noun: of what is counted, singular.
    """
    width, top = 1000 / len(counts), max(counts) or 1
    drawn = []
    for number, count in enumerate(counts):
        first, last = readable_count(edges[number]), readable_count(edges[number + 1] - 1)
        which = first if first == last else f"{first} to {last}"
        height = 100 * count / top
        bar = tag(
            "rect",
            x=f"{number * width + width / 20:.1f}",
            y=f"{100 - height:.2f}",
            width=f"{0.9 * width:.1f}",
            height=f"{height:.2f}",
        )
        drawn.append(tag("g", tag("title", f"{which}: {plural(count, noun)}"), bar))
    frame = 'viewBox="0 0 1000 100" preserveAspectRatio="none" class="histogram"'
    end = len(counts)
    places = sorted({0, end // 4, end // 2, 3 * end // 4, end})
    ticks = [
        tag(
            "span",
            readable_count(edges[at] - (at == end)),
            style=f"left:{100 * at / end:.2f}%",
        )
        for at in places
    ]
    return join([Html(f"<svg {frame}>{join(drawn)}</svg>"), tag("div", *ticks, class_="ticks")])


def image(pixels: Pixels) -> Html:
    """A small picture, [height, width, 3]; equal pixels beside each other are one rectangle."""
    height, width = pixels.shape[:2]
    drawn = []
    for y, row in enumerate(pixels.tolist()):
        x = 0
        for (red, green, blue), equal in groupby(row):
            count = len(list(equal))
            colour = f"#{red:02x}{green:02x}{blue:02x}"
            drawn.append(tag("rect", x=x, y=y, width=count, height=1, fill=colour))
            x += count
    frame = f'viewBox="0 0 {width} {height}" shape-rendering="crispEdges" class="image"'
    return Html(f"<svg {frame}>{join(drawn)}</svg>")
