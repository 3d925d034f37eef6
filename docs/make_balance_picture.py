"""Draw `docs/pictures/balance.svg`: what each way of balance does to the batches of one real set.

python docs/make_balance_picture.py             write picture and table, and print their figures
python docs/make_balance_picture.py --check     exit 1 if one is not what would be written

The table, of the same batches, is in `docs/guides/unbalanced-classes.md`.

The set is that of the digits of scikit-learn, of which 18 images of an eight and 6 of a nine are
left. Each column of a panel is a global batch of 64 of the first epoch, as a run with seed 1 plans
it, and each stretch of a column is a class.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import WeightedRandomSampler

from instep.data.balance import (
    ClassOrder,
    InProportion,
    Members,
    Wished,
    class_weights,
    planned_counts,
)
from instep.data.order import Order
from instep.data.splits.columns import Classes, Column

DOCS = Path(__file__).resolve().parent
PICTURE, GUIDE = DOCS / "pictures" / "balance.svg", DOCS / "guides" / "unbalanced-classes.md"
BATCH, SEED, LEFT = 64, 1, {8: 18, 9: 6}
"""Samples of a batch, seed of the job, and how many images of a class are left."""

WIDE, HIGH, GAP, MARGIN, TOP, MOST = 12, 96, 44, 20, 76, 30
"""Pixels: a batch, a panel, between panels, left of them, above the first. Batches of a panel."""

COLOURS = ("#57606a", "#8c959f")
RARE = ("#d4a72c", "#cf222e")
STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}"
    ".title{font-size:15px;font-weight:600}.paper{fill:#ffffff;stroke:#d0d7de}"
)

Counts = np.ndarray[Any, np.dtype[np.float64]]
Labels = np.ndarray[Any, np.dtype[np.int64]]


class Panel(NamedTuple):
    """One way."""

    name: str
    counts: Counts
    """[batches, classes], in the loss: samples, or what they weigh."""
    said: str


def labels() -> np.ndarray[Any, np.dtype[np.int64]]:
    """The class of each image that is left, in the order of the set."""
    every = load_digits().target
    kept = np.ones(len(every), np.bool_)
    for each, count in LEFT.items():
        kept[np.flatnonzero(every == each)[count:]] = False
    found: np.ndarray[Any, np.dtype[np.int64]] = every[kept]
    return found


def orders_of(classes: Labels) -> dict[str, Any]:
    """The order of a run's epochs, by the way of balance."""
    members = Members(Classes.of(Column("labels", classes), len(classes)).codes)
    every = planned_counts(members.counts, "inverse")
    return {
        "none": Order(len(classes), SEED),
        "stratified": InProportion(members, SEED),
        "resample": ClassOrder(members, every, SEED),
        "sampler": Wished(wishes(classes), SEED),
    }


def wishes(classes: Labels) -> Counts:
    """How often a `WeightedRandomSampler` for classes in balance wants each image."""
    even = 1 / np.bincount(classes)[classes]
    found: Counts = even / even.sum() * len(classes)
    return found


def panels() -> list[Panel]:
    """All ways, in their order."""
    classes = labels()
    weights = class_weights(np.bincount(classes), "inverse")
    found = {name: batches(order, classes) for name, order in orders_of(classes).items()}
    return [
        Panel("no balance", found["none"], "each image once, batches as chance has them"),
        Panel("stratified", found["stratified"], "each image once, classes in proportion"),
        Panel("resample, augment", found["resample"], "a nine comes 30 times in the epoch"),
        Panel(
            "reweight",
            weighed(found["none"], weights),
            "each image once; heights are shares of the loss",
        ),
        Panel("WeightedRandomSampler", found["sampler"], "as it wishes, planned"),
    ]


def batches(order: Any, classes: np.ndarray[Any, Any]) -> Counts:
    """How much of each class each batch of the first epoch has."""
    positions = order.positions(0) if hasattr(order, "positions") else order.samples
    rows = [
        np.bincount(classes[order.indices(0, n, min(n + BATCH, positions))], minlength=10)
        for n in range(0, positions, BATCH)
    ]
    return np.array(rows, np.float64)


def table() -> str:
    """The rows of the guide."""
    classes = labels()
    orders = orders_of(classes)
    draw = torch.Generator().manual_seed(SEED)
    drawn = WeightedRandomSampler(wishes(classes).tolist(), len(classes), generator=draw)
    epochs = {
        "none": [taken(orders["none"])],
        "`stratified`": [taken(orders["stratified"])],
        "`resample`": [taken(orders["resample"])],
        "a `WeightedRandomSampler` in torch": [np.array([*drawn])],
        "the same sampler, planned": [taken(orders["sampler"], epoch) for epoch in (0, 1)],
    }
    return "".join(row(name, each, classes) for name, each in epochs.items())


def taken(order: Any, epoch: int = 0) -> Any:
    """The images of an epoch, in their order."""
    positions = order.positions(epoch) if hasattr(order, "positions") else order.samples
    return order.indices(epoch, 0, positions)


def row(name: str, epochs: list[Any], classes: Labels) -> str:
    """A row of the table: of the first epoch, and what two leave out where there are two."""
    first = epochs[0]
    counts = np.array(
        [
            np.bincount(classes[first[n : n + BATCH]], minlength=10)
            for n in range(0, len(first), BATCH)
        ]
    )
    low, high = counts.min(0), counts.max(0)
    without = 100 * float((counts[:, 9] == 0).mean())
    unseen = [
        100 * (1 - len(np.unique(np.concatenate(epochs[:n]))) / len(classes))
        for n in range(1, len(epochs) + 1)
    ]
    said = f"{unseen[0]:.0f} %"
    if unseen[1:]:
        said += f" in this epoch, {unseen[1]:.0f} % after two"
    most = int(np.bincount(first).max())
    ranges = " | ".join(f"{low[each]} to {high[each]}" for each in (8, 9))
    return f"| {name} | {len(counts)} | {ranges} | {without:.0f} % | {said} | {most} |\n"


def guide() -> str:
    """The guide with this table."""
    text = GUIDE.read_text(encoding="utf-8")
    begin = text.index("\n", text.index("\n", text.index("| way | steps | eights")) + 1) + 1
    return text[:begin] + table() + text[text.index("\n\n", begin) + 1 :]


def weighed(counts: Counts, weights: Counts) -> Counts:
    """The share that each class has of the loss of a batch, times its samples."""
    mass = counts * weights
    share: Counts = mass / mass.sum(1, keepdims=True) * counts.sum(1, keepdims=True)
    return share


def drawn(found: list[Panel]) -> str:
    """The picture."""
    width, height = MARGIN + MOST * WIDE + 310, TOP + len(found) * (HIGH + GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" role="img" aria-label="Classes in the batches of five ways">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        '<text class="title" x="20" y="30">The digits, with 18 eights and 6 nines left: each '
        "column is a global batch of 64</text>",
        f'<rect x="20" y="42" width="12" height="12" fill="{RARE[0]}"/>'
        '<text class="small" x="38" y="52">eights</text>'
        f'<rect x="100" y="42" width="12" height="12" fill="{RARE[1]}"/>'
        '<text class="small" x="118" y="52">nines</text>'
        f'<rect x="180" y="42" width="12" height="12" fill="{COLOURS[0]}"/>'
        '<text class="small" x="198" y="52">the other eight digits</text>',
    ]
    for number, panel in enumerate(found):
        parts += _panel(panel, TOP + number * (HIGH + GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel, top: float) -> list[str]:
    parts = [f'<text x="20" y="{top + 12}">{panel.name}</text>']
    top += 20
    for column, counts in enumerate(panel.counts):
        at, x = top + HIGH, MARGIN + column * WIDE
        for each in (9, 8, *range(8)):
            high = HIGH * counts[each] / BATCH
            colour = RARE[each - 8] if each > 7 else COLOURS[each % 2]
            at -= high
            if high > 0:
                parts.append(
                    f'<rect x="{x}" y="{at:.2f}" width="{WIDE - 2}" height="{high:.2f}" '
                    f'fill="{colour}"/>'
                )
    said = MARGIN + MOST * WIDE + 12
    for line, text in enumerate((panel.said, *figures(panel))):
        parts.append(f'<text class="small" x="{said}" y="{top + 30 + 18 * line}">{text}</text>')
    return parts


def figures(panel: Panel) -> list[str]:
    """Figures of a panel in words."""
    nines = panel.counts[:, 9] / panel.counts.sum(1)
    return [
        f"nines: {100 * nines.min():.0f} to {100 * nines.max():.0f} % of a batch",
        f"batches without one: {100 * float((nines == 0).mean()):.0f} %",
    ]


def main() -> int:
    """Write the picture, or compare it."""
    found = panels()
    picture = drawn(found)
    text = guide()
    if "--check" in sys.argv[1:]:
        same = PICTURE.read_text(encoding="utf-8"), GUIDE.read_text(encoding="utf-8")
        return int(same != (picture, text))
    PICTURE.write_text(picture, encoding="utf-8")
    GUIDE.write_text(text, encoding="utf-8")
    for panel in found:
        print(panel.name, len(panel.counts), *figures(panel), sep="; ")
    return 0


if __name__ == "__main__":
    sys.exit(main())
