"""The part of the report page that says who did how much, and how work was dealt.

A function from a run to markup; `page.py` puts it in its place.
"""

from __future__ import annotations

import numpy as np

from instep.report.markup import Html, figure, more, section, shortened, table, tag
from instep.store.run_folder import Event, RunFolder
from instep.units import readable_count, readable_share

_MOST_ROWS = 40  # of any table


def who_did_what(folder: RunFolder) -> Html:
    """Samples of each worker, from the ledger; how fast it computes; and each new deal."""
    done = folder.committed
    if not len(done):
        return Html("")
    workers, place = np.unique(done["worker"], return_inverse=True)
    samples = np.bincount(place, weights=done["stop"] - done["first"])
    rows = [
        _row(folder, int(worker), int(count), int(samples.sum()))
        for worker, count in zip(workers[:_MOST_ROWS], samples, strict=False)
    ]
    head = ["worker", "samples", "share", "samples/s of its own computing"]
    body = [table(head, rows), more(len(workers), _MOST_ROWS, "workers")]
    if dealt := folder.named("work_dealt"):
        head = ["from step", "why", "micro-batches of each worker"]
        rows = [_deal(event) for event in dealt[-_MOST_ROWS:]]
        body += [tag("h3", "Dealt anew"), table(head, rows, numbers_from=9)]
        body.append(more(len(dealt), _MOST_ROWS, "deals"))
    note = "Counted from the ledger of committed steps. Who is slow is given less."
    return section("Who did how much", *body, note=note)


def _row(folder: RunFolder, worker: int, samples: int, whole: int) -> list[str]:
    steps = folder.steps_of(worker)
    busy_s = sum(float(steps[part].sum()) for part in ("load_s", "forward_s", "backward_s"))
    speed = float(steps["samples"].sum()) / busy_s if busy_s > 0 else None
    return [
        f"worker {worker}",
        readable_count(samples),
        readable_share(samples, whole),
        figure(speed, readable_count),
    ]


def _deal(event: Event) -> list[str]:
    members, counts = event.get("members"), event.get("micro_batches")
    if not (isinstance(members, list) and isinstance(counts, list)):
        return [shortened(event.get(key, "")) for key in ("step", "reason", "micro_batches")]
    each = [f"{worker}: {count}" for worker, count in zip(members, counts, strict=False)]
    step = readable_count(event.get("step") or 0)
    return [step, shortened(event.get("reason", "")), shortened(", ".join(each), 200)]
