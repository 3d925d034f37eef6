"""Says in sentences what a plan found; each figure in them stands in its table or follows from it.

Ways in: `explain`, `table_of`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from instep.plan.machine import Machines
from instep.plan.measured import JobFigures
from instep.plan.pricing import Priced
from instep.plan.search import Ranking
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import listed


def table_of(found: Ranking, job: JobFigures) -> list[dict[str, Any]]:
    """Rows for `--json` and for a terminal: ways with the same result first, the fastest first."""
    best = found.best
    return [_row(each, found, job, best) for each in (*found.same, *found.other)]


def _row(each: Priced, found: Ranking, job: JobFigures, best: Priced | None) -> dict[str, Any]:
    way = each.way
    row: dict[str, Any] = {
        "way": way.name,
        "workers": way.workers,
        "servers": way.servers,
        "strategy": way.strategy,
        "codec": way.codec,
        "changes": list(way.changes),
        "same_result": way.same,
        "measured": each.measured,
        "step_s": each.seconds,
        "low_s": each.low,
        "high_s": each.high,
        "parts_s": dict(each.parts._asdict()),
        "commit_s": each.parts.seconds,
        "worker_bytes": each.worker_bytes,
        "server_bytes": each.server_bytes,
        "sent_bytes": each.sent_bytes,
        "sent_by_server": each.sent_by_server,
        "run_s": each.seconds * job.steps,
        "fits": each in found.fits or not way.same,
    }
    if not way.same and best is not None:
        row["break_even_factor"] = best.seconds / each.seconds
    return row


def explain(found: Ranking, machines: Machines) -> list[tuple[str, str]]:
    """Lines with their labels: best, pays, why not."""
    return [*_lines(found, machines)]


def _lines(found: Ranking, machines: Machines) -> Iterator[tuple[str, str]]:
    best, alone = found.best, found.alone
    if best is None:
        yield "best", "none: nothing that has the result of one machine fits or could be priced"
        return
    yield "best", _best(found, best)
    if alone is not None:
        yield "pays", _pays(found, machines)
    for each in _families(found, best):
        yield "why not", _why_not(each, best)
    if len(near := found.undecided) > 1:
        names = listed([each.way.name for each in near[1:]], 3)
        yield "unsure", f"{names}: within the interval of the best; `instep compare` settles it"
    if alone is None:
        yield "unsure", "one worker could not be priced, so whether it pays is not known"


def _best(found: Ranking, best: Priced) -> str:
    alone = found.alone
    if alone is None:
        return best.way.name
    if best is alone:
        rival = found.rival
        if rival is None:
            return best.way.name
        times = rival.seconds / alone.seconds
        return f"1 worker: {rival.way.name} takes {times:.2f} times as long"
    times = alone.seconds / best.seconds
    low, high = alone.low / best.high, alone.high / best.low
    share = 100 * times / best.way.workers
    return (
        f"{best.way.name}: {times:.2f} times as fast as one worker ({low:.2f} to {high:.2f}), "
        f"{share:.0f} % of {best.way.workers}"
    )


def _pays(found: Ranking, machines: Machines) -> str:
    parts = ["yes" if found.pays else "no"]
    if found.rival is None:
        return "no: one worker is the only way"
    name = found.rival.way.name
    if found.break_even_rate is not None:
        parts.append(f"{name} from {readable_rate(found.break_even_rate)} on")
    elif machines.link is not None and machines.hosts > 1:
        parts.append(f"{name} at no rate of the links")
    if found.break_even_batch is not None:
        parts.append(f"from a batch of {readable_count(found.break_even_batch)} on")
    elif found.batches:
        parts.append("at no batch that was looked at")
    if found.next_gain is not None:
        gain = 100 * (found.next_gain - 1)
        parts.append(f"more workers gain {f'{gain:.0f} %' if gain >= 0.5 else 'nothing'}")
    return "; ".join(parts)


def _families(found: Ranking, best: Priced) -> list[Priced]:
    """The fastest way of each other strategy with the same result."""
    first: dict[str, Priced] = {}
    for each in found.same:
        first.setdefault("1" if each.way.is_plain else each.way.strategy, each)
    own = "1" if best.way.is_plain else best.way.strategy
    return [each for family, each in first.items() if family != own]


def _why_not(each: Priced, best: Priced) -> str:
    """The part of its step in which it loses most."""
    name, slower = each.way.name, each.seconds / best.seconds
    if each.seconds < best.seconds:
        return f"{name}: it does not fit into memory"
    mine, theirs = each.parts._asdict(), best.parts._asdict()
    part = max(mine, key=lambda key: mine[key] - theirs[key])
    return (
        f"{name}: {slower:.2f} times as long; {_WORDS[part]} {readable_seconds(mine[part])} "
        f"instead of {readable_seconds(theirs[part])}"
    )


_WORDS: Mapping[str, str] = {
    "passes": "its passes take",
    "waits": "waiting for the slowest takes",
    "wire": "the exchange that no pass hides takes",
    "update": "the update takes",
    "rest": "what is left takes",
}


def factor_words(row: Mapping[str, Any]) -> str:
    """When a way with another result pays."""
    factor = row["break_even_factor"]
    if factor <= 1:
        return f"does not pay, unless it needs fewer than {factor:.2f} times the steps"
    return f"pays if it needs fewer than {factor:.2f} times the steps"


def readable_rate(bits_per_s: float) -> str:
    """`310000000` -> `'310 Mbit/s'`."""
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits_per_s >= 0.9995 * size:
            value = bits_per_s / size
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{bits_per_s / 1e3:.0f} kbit/s"


def memory_words(row: Mapping[str, Any]) -> str:
    """Resident memory of each role."""
    worker, server = row["worker_bytes"], row["server_bytes"]
    text = readable_bytes(worker) if worker else "?"
    return f"{text} + {readable_bytes(server)}" if server else text
