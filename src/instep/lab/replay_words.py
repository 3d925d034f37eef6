"""What a replay found, in the lines that `instep replay` prints.

The judging is `replayed.py`'s. Way in: `lines`.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.lab.replayed import TOLERANCE, Figures, Replayed
from instep.words import command, metrics_in_words, plural

_KEYS = {"loss": "loss", "gradient norm": "norm"}
_SHOWN = 5  # tensors that are named


def lines(found: Replayed) -> list[str]:
    """What a replay found, for a person; the last line is the next command."""
    return [
        _from(found),
        *_shares(found),
        *(line for each in found.figures for line in _figure(found, each)),
        *_state(found),
        *(f"warning {text}" for text in found.warnings),
        *([f"model   {found.model}"] if found.model else []),
        f"verdict {_verdict(found)}",
        f"next    {_next(found)}",
    ]


def _from(found: Replayed) -> str:
    where = f"{found.checkpoint}" if found.checkpoint else "the beginning"
    steps = found.step - found.after
    range_ = f"{found.after + 1} to {found.step}" if steps > 1 else f"{found.step}"
    return f"from    {where}: {plural(steps, 'step')} computed ({range_}), on one process"


def _shares(found: Replayed) -> Iterator[str]:
    for share in found.shares:
        who = f"worker {share.worker} had positions [{share.first}, {share.stop})"
        yield f"ledger  step {found.step}: {who} of epoch {share.epoch + 1}"


def _figure(found: Replayed, each: Figures) -> Iterator[str]:
    recorded = "not recorded" if each.recorded is None else f"{each.recorded!r} recorded"
    yield f"{_KEYS[each.name]:8}step {found.step}: {recorded}, {each.computed!r} computed"
    if each.differs:
        yield f"fault   the {each.name} differs, first at step {each.differs[0]}"
    elif each.steps:
        what = "the same bits" if found.bits else f"within {TOLERANCE:g} of each other"
        yield f"        {what} in {plural(each.steps, 'recorded step')}"


def _state(found: Replayed) -> Iterator[str]:
    if found.kept:
        verdict = f"{plural(found.kept_tensors, 'tensor')}, each with the same bits"
        if found.kept_differs:
            verdict = f"{len(found.kept_differs)} of {plural(found.kept_tensors, 'tensor')} differ"
        yield f"kept    {found.kept}: {verdict}"
        yield from (f"fault   {text}" for text in found.kept_differs[:_SHOWN])
    if found.metrics:
        was, now = ({"metrics": each} for each in found.metrics)
        same = found.metrics[0] == found.metrics[1]
        yield f"metrics {metrics_in_words(was)}: " + (
            "the same bits" if same else f"but computed {metrics_in_words(now)}"
        )
    yield f"sha256  {found.parameters_sha256} of the parameters after step {found.step}"
    if found.recorded_sha256 is not None:
        same = found.recorded_sha256 == found.parameters_sha256
        yield "        the run's model has " + ("the same" if same else found.recorded_sha256)


def _verdict(found: Replayed) -> str:
    if not found.compared:
        return "nothing was recorded that could be compared"
    if found.faults:
        return "not the same"
    if found.bits:
        return "the same bits"
    return (
        f"the same within {TOLERANCE:g}: determinism = 'order' promises no bits, so the "
        "parameters were not compared"
    )


def _next(found: Replayed) -> str:
    if found.same or not found.compared:
        return command("audit", found.run)
    return command("run", found.run / "job.toml", "--check-determinism")
