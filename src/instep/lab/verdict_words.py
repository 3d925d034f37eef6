"""The verdict on a broken run, in the lines that `instep chaos` prints.

The judging is `verdict.py`'s. Way in: `lines`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from instep.lab.verdict import Verdict
from instep.units import readable_count, readable_seconds
from instep.words import command, plural


def lines(verdict: Verdict) -> list[str]:
    """What became of the run, for a person; the last line is the next command."""
    return [
        _injected(verdict),
        f"run     {verdict.run}: {verdict.outcome}, {plural(verdict.steps, 'step')}",
        *_result(verdict),
        *_samples(verdict),
        *_recovery(verdict),
        *(f"fault   {fault}" for fault in verdict.faults),
        f"verdict {_holds(verdict)}",
        f"next    {_next(verdict)}",
    ]


def _injected(verdict: Verdict) -> str:
    counted = Counter(f"{each.kind} {each.role}" for each in verdict.done)
    sorts = ", ".join(f"{sort} {count}" for sort, count in sorted(counted.items()))
    return f"broken  {len(verdict.done)} of {len(verdict.injected)} times" + (
        f": {sorts}" if sorts else ""
    )


def _result(verdict: Verdict) -> Iterator[str]:
    sha256 = verdict.parameters_sha256
    if verdict.undisturbed is None:
        why = "the run goes on" if verdict.going_on else "there is no other run"
        why += "; a step of it can be replayed" if verdict.bits else ""
        yield f"hash    nothing to compare with: {why}"
        return
    if not verdict.bits:
        yield (f"hash    {str(sha256)[:12]}, not compared: determinism = 'order' promises no bits")
    elif sha256 == verdict.wanted_sha256:
        yield f"hash    {sha256}: the same as undisturbed"
    if verdict.other_loss is None:
        how = "the same bits as undisturbed" if verdict.bits else "the same to rounding"
        yield f"losses  of {plural(verdict.losses, 'step')}: {how}"


def _samples(verdict: Verdict) -> Iterator[str]:
    audit = verdict.proof.audit
    counts = {"repeated": audit.repeated, "missing": audit.missing, "not due": audit.stray}
    words = ", ".join(f"{readable_count(n)} {what}" for what, n in counts.items())
    yield f"samples {readable_count(audit.used)} used, {words}"
    back, all_ = len(verdict.gone_back), len(verdict.twice)
    more = f", {back} of them after going back to a checkpoint" if back else ""
    yield f"twice   {plural(all_, 'step')} computed again after a worker had committed it{more}"


def _recovery(verdict: Verdict) -> Iterator[str]:
    for kind, role in verdict.sorts:
        found = verdict.recovery_of(role, kind)
        shown = ", ".join(f"{name} {readable_seconds(s)}" for name, s in found.items())
        yield f"stood   {kind} {role}: {shown or 'no step of all workers followed'}"


def _holds(verdict: Verdict) -> str:
    if not verdict.holds:
        return "does not hold"
    if verdict.undisturbed is None:
        return "holds as far as can be told without an undisturbed run"
    return "holds: as if nothing had been" if verdict.bits else "holds, to rounding"


def _next(verdict: Verdict) -> str:
    if verdict.undisturbed is None and verdict.bits and verdict.steps:
        return command("replay", verdict.run, f"--step {verdict.steps}")
    if verdict.undisturbed is None:
        return command("report", verdict.run)
    return (
        f"{command('report', verdict.run)} {command('', verdict.undisturbed).split(maxsplit=1)[1]}"
    )
