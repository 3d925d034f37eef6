"""Draw `docs/pictures/killed.svg`: a run whose workers are killed, beside one that is left alone.

python docs/make_picture.py             break a run of the digits, and draw it (half a minute)
python docs/make_picture.py RUN         draw a run that `instep chaos` has broken before

The picture says nothing that the two runs did not record: when each worker trained, when one
was killed, how long all of them took to train again, and the loss of every step of both.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep.cli import main as instep
from instep.report.figures.summary import summarise
from instep.store.run_files import Floats, step_ends
from instep.store.run_folder import RunFolder

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "killed.svg"
CHAOS = (
    *("chaos", str(ROOT / "examples" / "01_digits" / "job.toml"), "--kills", "3"),
    *("--roles", "worker", "--seed", "2", "--workers", "3", "--set", "train.determinism=bits"),
)

LEFT, RIGHT, TOP, LANE, CURVE = 84, 836, 64, 26, 128
"""Pixels: where lanes begin and end, where the first is, how far they are apart, and how high the
losses are."""

PAUSE_S = 0.06
"""Steps that are further apart than this are drawn apart."""

STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#24292f}.small{font-size:12px;fill:#57606a}"
    ".title{font-size:15px;font-weight:600}.trains{fill:#2da44e}.kill{stroke:#cf222e;"
    "stroke-width:2}.said{fill:#cf222e;font-size:12px}.broken{stroke:#2da44e;fill:none;"
    "stroke-width:2}.whole{stroke:#24292f;fill:none;stroke-width:1;stroke-dasharray:2 4}"
    ".axis{stroke:#d0d7de}.paper{fill:#ffffff;stroke:#d0d7de}"
)


class Kill(NamedTuple):
    """A worker that was killed, and how long until all trained again."""

    worker: int
    time: float
    recovery_s: float


def kills_of(run: RunFolder) -> list[Kill]:
    """As `instep chaos` wrote them down."""
    broken: list[dict[str, Any]] = json.loads((run.path / "chaos.json").read_text())["each"]
    return [Kill(each["number"], each["time"], each["recovery_s"]) for each in broken]


def spans(ends: Floats, begins: Floats) -> Iterator[tuple[float, float]]:
    """Times in which one step follows the other, from begin to end."""
    if len(ends):
        cuts = np.flatnonzero(begins[1:] - ends[:-1] > PAUSE_S) + 1
        for part in np.split(np.arange(len(ends)), cuts):
            yield float(begins[part[0]]), float(ends[part[-1]])


def losses(run: RunFolder) -> tuple[Floats, Floats]:
    """Steps, and the loss of each over the whole global batch."""
    steps, at = np.unique(run.steps["step"], return_index=True)
    return steps.astype(np.float64), run.steps["loss"][at].astype(np.float64)


def line(x: Floats, y: Floats, kind: str) -> str:
    """A curve through these points, in pixels."""
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    return f'<polyline class="{kind}" points="{points}"/>'


def lanes(run: RunFolder, kills: list[Kill], first: float, last: float) -> Iterator[str]:
    """When each worker trained, and when it was killed."""
    per_s = (RIGHT - LEFT) / (last - first)
    ends, begins = step_ends(run.steps), run.steps["begin"]
    for lane, worker in enumerate(run.members.numbers):
        y, own = TOP + LANE * lane, run.steps["worker"] == worker
        order = np.argsort(begins[own])
        yield f'<text class="small" x="16" y="{y + 13}">worker {worker}</text>'
        for start, stop in spans(ends[own][order], begins[own][order]):
            x, width = LEFT + (start - first) * per_s, max((stop - start) * per_s, 1.0)
            yield f'<rect class="trains" x="{x:.1f}" y="{y}" width="{width:.1f}" height="16"/>'
    for kill in kills:
        x, y = (
            LEFT + (kill.time - first) * per_s,
            TOP + LANE * run.members.numbers.index(kill.worker) + 8,
        )
        for to in (6, -6):
            yield f'<path class="kill" d="M{x - 6:.1f} {y - to}L{x + 6:.1f} {y + to}"/>'
        after = f"{kill.recovery_s * 1000:.0f} ms"
        yield f'<text class="said" x="{x:.1f}" y="{TOP - 8}" text-anchor="middle">{after}</text>'


def curves(broken: RunFolder, whole: RunFolder, top: float) -> Iterator[str]:
    """The loss of each step, of both runs, on a logarithmic axis."""
    both = [losses(run) for run in (broken, whole)]
    every = np.log10(np.concatenate([loss for _, loss in both]))
    low, high = float(every.min()), float(every.max())
    yield f'<path class="axis" d="M{LEFT} {top}V{top + CURVE}H{RIGHT}" fill="none"/>'
    yield f'<text class="small" x="16" y="{top + 12}">loss {10**high:.2g}</text>'
    yield f'<text class="small" x="16" y="{top + CURVE}">{10**low:.2g}</text>'
    for (steps, loss), kind in zip(both, ("broken", "whole"), strict=True):
        x = LEFT + (steps - 1) / max(steps[-1] - 1, 1) * (RIGHT - LEFT)
        yield line(x, top + (high - np.log10(loss)) / (high - low) * CURVE, kind)


def picture(broken: RunFolder, whole: RunFolder) -> str:
    """The picture, as SVG."""
    kills = kills_of(broken)
    summary = {run.path: summarise(run) for run in (broken, whole)}
    (mine, theirs) = (each["parameters_sha256"] for each in summary.values())
    same = "the same bits" if mine == theirs else "OTHER BITS"
    first, last = float(broken.steps["begin"].min()), float(step_ends(broken.steps).max())
    top = TOP + LANE * len(broken.members.numbers) + 34
    bottom = top + CURVE
    audit = broken.audit
    figures = (
        f"{len(kills)} workers killed in {last - first:.1f} s   ·   "
        f"{audit.repeated} samples repeated, {audit.missing} missing   ·   "
        f"parameters after step {broken.last_step}: {same} ({mine[:12]})"
    )
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 {bottom + 46:.0f}">',
        f"<style>{STYLE}</style>",
        f'<rect class="paper" x=".5" y=".5" width="859" height="{bottom + 45:.0f}" rx="8"/>',
        f'<text class="title" x="16" y="26">{len(broken.members.numbers)} workers train;'
        f" {len(kills)} times one of them is killed</text>",
        f'<text class="said" x="{RIGHT}" y="26" text-anchor="end">&#215; kill -9, and the time'
        " until all train again</text>",
        *lanes(broken, kills, first, last),
        f'<text class="small" x="{LEFT}" y="{top - 10}">loss of each step, of this run (line) and'
        " of one that was left alone (dots)</text>",
        *curves(broken, whole, top),
        f'<text x="16" y="{bottom + 28:.0f}">{figures}</text>',
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


def main(arguments: list[str]) -> int:
    """Break a run unless one is given, and draw it."""
    with tempfile.TemporaryDirectory() as folder:
        if arguments:
            path = Path(arguments[0])
        else:
            path = Path(folder) / "digits-disturbed"
            if code := instep([*CHAOS, "--runs", folder]):
                return code
        whole = path.with_name(path.name.replace("-disturbed", "-undisturbed"))
        PICTURE.parent.mkdir(exist_ok=True)
        PICTURE.write_text(picture(RunFolder(path), RunFolder(whole)))
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
