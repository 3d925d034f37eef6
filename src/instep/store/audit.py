"""Checks in the ledger that every sample was used exactly once in every epoch.

Pure functions of ledger records, events and two numbers of the job. They know nothing of
files or runs. The order of an epoch is a permutation, so "each sample once" and "each
position once" are the same statement; positions are what is counted. Way in: `audit`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from instep.data.batches import Batches
from instep.data.participants import OwnRounds

Integers = NDArray[np.int64]

_SHOWN = 5  # stretches of one epoch that are named


class Stretch(NamedTuple):
    """Neighbouring positions [first, stop) of an epoch with one thing wrong."""

    what: str
    """`missing`, `repeated`, or `stray`."""

    first: int
    stop: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochAudit:
    """What the ledger says of one epoch, in samples."""

    epoch: int
    """Counts from 0."""

    participant: int | None = None
    """Whose data and epoch it is; None where all share them."""

    expected: int
    """Positions `[0, expected)` should be in the ledger, each once."""

    used: int
    """Samples in the ledger, repeats counted."""

    repeated: int
    """Uses beyond the first of an expected position."""

    missing: int
    """Expected positions that are not in the ledger."""

    stray: int
    """Uses of positions that are not expected: beyond the end, or not yet due."""

    faults: tuple[Stretch, ...] = ()
    """Where the first few faults lie, in the order of positions."""

    @property
    def exact(self) -> bool:
        """Every sample that was due was used once, and nothing else was."""
        return not (self.repeated or self.missing or self.stray)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the ledger says of a whole run."""

    epochs: tuple[EpochAudit, ...]

    sha256: str
    """Of the multiset of (epoch, position), whichever worker used it in whichever share."""

    @property
    def repeated(self) -> int:
        """Uses of samples beyond the first in an epoch."""
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def missing(self) -> int:
        """Samples that should have been used by now and were not."""
        return sum(epoch.missing for epoch in self.epochs)

    @property
    def stray(self) -> int:
        """Samples used that were not due."""
        return sum(epoch.stray for epoch in self.epochs)

    @property
    def used(self) -> int:
        """Samples in the ledger."""
        return sum(epoch.used for epoch in self.epochs)

    @property
    def exact(self) -> bool:
        """Every sample that was due was used once, and nothing else was."""
        return all(epoch.exact for epoch in self.epochs)


def audit(ledger: np.ndarray[Any, Any], batches: Batches, *, last_step: int | None = None) -> Audit:
    """Count, for every epoch up to where training stopped, how often each position was used.

    Finished epochs are due completely, the last one up to the end of `last_step`.
    Takes a few seconds for 10 million records.

    Args:
        ledger: [records] of `events.LEDGER`, in any order; empty shares are allowed.
        batches: what each step takes.
        last_step: the last committed step, from 1; the highest in `ledger` if not given.

    Returns:
        One entry for each epoch that was due or that the ledger mentions.
        Deterministic; equal for any two ledgers that hold the same positions.
    """
    if last_step is None:
        last_step = int(ledger["step"].max(initial=0))
    real = ledger[ledger["stop"] > ledger["first"]]
    epochs = real["epoch"].astype(np.int64)
    if np.any(epochs[1:] < epochs[:-1]):
        order = np.argsort(epochs, kind="stable")
        real, epochs = real[order], epochs[order]
    due = batches.due(last_step)
    mentioned = [int(epoch) for epoch in np.unique(epochs)]
    digest, entries = hashlib.sha256(), []
    for epoch in sorted({*mentioned, *range(len(due))}):
        begin, end = np.searchsorted(epochs, [epoch, epoch + 1])
        first, stop, count = _segments(real["first"][begin:end], real["stop"][begin:end])
        expected = due[epoch] if 0 <= epoch < len(due) else 0
        entries.append(_entry(epoch, expected, first, stop, count))
        rows = np.stack([np.full_like(first, epoch), first, stop, count], axis=1)
        digest.update(rows.astype("<i8").tobytes())
    return Audit(tuple(entries), digest.hexdigest())


def audit_own(ledger: np.ndarray[Any, Any], own: OwnRounds, last_step: int) -> Audit:
    """The same where participants have data of their own: each is audited like a whole run.

    Args:
        ledger: as above; the positions say whose data they are.
        own: what participants take in each round.
        last_step: the last committed round.

    Returns:
        One entry for each epoch of each participant, whose positions count from the first of its
        region.
    """
    region = np.searchsorted(own.offsets[1:-1], ledger["first"], side="right")
    order = np.argsort(region, kind="stable")
    ledger, ends = ledger[order], np.searchsorted(region[order], np.arange(1, len(own.sizes)))
    digest, entries = hashlib.sha256(), list[EpochAudit]()
    rounds, sizes = own.rounds(last_step).tolist(), own.sizes.tolist()
    for number, records in enumerate(np.split(ledger, ends)):
        for end in ("first", "stop"):
            records[end] -= own.offsets[number]
        found = audit(records, Batches(sizes[number], own.portion), last_step=rounds[number])
        entries += [replace(entry, participant=number) for entry in found.epochs]
        digest.update(found.sha256.encode())
    return Audit(tuple(entries), digest.hexdigest())


def skipped_in(
    events: Iterable[dict[str, Any]], ledger: np.ndarray[Any, Any]
) -> list[dict[str, Any]]:
    """`sample_skipped` events of training whose step was committed, each sample of a step once.

    A worker reports a skipped sample before its step is committed. If the step fails, another
    generation computes it again and reports its own skips. So an event counts if the ledger
    has its step with its generation. The ledger itself names positions, read or not.

    Args:
        events: of a run, oldest first.
        ledger: [records] of `events.LEDGER`, of committed steps.
    """
    reported = {
        (e["step"], e["generation"], e["index"]): e
        for e in events
        if e["event"] == "sample_skipped" and e["dataset"] == "training"
    }
    mine = ledger[np.isin(ledger["step"], [step for step, _, _ in reported])]
    committed = set(zip(mine["step"].tolist(), mine["generation"].tolist(), strict=True))
    return [event for key, event in reported.items() if key[:2] in committed]


def _segments(first: Integers, stop: Integers) -> tuple[Integers, Integers, Integers]:
    """Ranges as longest stretches of equal count: [n] first, [n] stop, [n] count above 0.

    A sweep: at each range's first position the count rises, at its stop it falls.
    """
    moments = np.sort(np.concatenate([first * 2 + 1, stop * 2]).astype(np.int64))
    position, change = moments >> 1, (moments & 1) * 2 - 1
    count = np.cumsum(change)
    last_here = np.append(position[1:] != position[:-1], True)[: len(position)]
    position, count = position[last_here], count[last_here]
    before = np.concatenate([[0], count[:-1]])
    position, count = position[count != before], count[count != before]
    covered = count[:-1] > 0
    return position[:-1][covered], position[1:][covered], count[:-1][covered]


def _entry(
    epoch: int, expected: int, first: Integers, stop: Integers, count: Integers
) -> EpochAudit:
    used = int(((stop - first) * count).sum())
    inside = np.clip(stop, 0, expected) - np.clip(first, 0, expected)
    covered, used_inside = int(inside.sum()), int((inside * count).sum())
    return EpochAudit(
        epoch=epoch,
        expected=expected,
        used=used,
        repeated=used_inside - covered,
        missing=expected - covered,
        stray=used - used_inside,
        faults=_faults(expected, first, stop, count),
    )


def _faults(expected: int, first: Integers, stop: Integers, count: Integers) -> tuple[Stretch, ...]:
    """The first few of each kind among the stretches of `_segments` and between them."""
    twice = count > 1
    kinds = {
        "missing": (np.append(0, stop).clip(0), np.append(first, expected).clip(None, expected)),
        "repeated": (first[twice].clip(0), stop[twice].clip(None, expected)),
        "stray": (
            np.append(first, first.clip(expected)),
            np.append(stop.clip(None, 0), stop),
        ),
    }
    found = []
    for what, (low, high) in kinds.items():
        at = np.flatnonzero(low < high)[:_SHOWN]
        found += [Stretch(what, int(low[n]), int(high[n])) for n in at]
    return tuple(sorted(found, key=lambda stretch: stretch.first)[:_SHOWN])
