"""What a run is held against: distances to plain loops, and what it said of itself.

Pure: figures and words in, complaints out.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from pair import Honest, Pair, Refused, Said, Same
from plain import State, Trained
from torch import Tensor

NEAR = 1e-9
"""Largest distance in float64."""

TIMES = 3.0
"""In float32, how often the distance between two plain loops it may be."""

EPSILON = 2.0**-23
"""Of float32. Where permuting a batch rounds nothing otherwise, as with embeddings whose rows
occur once in it, plain loops are closer than this; a mean of means still rounds."""


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors.values()))


def _less(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A buffer that was not there at the start counts as 0 then."""
    assert one.keys() >= other.keys()
    before = {name: other.get(name, torch.zeros(())).double() for name in one}
    return {name: one[name].double() - before[name] for name in one}


def apart(one: Mapping[str, Tensor], plain: Mapping[str, Tensor], start: Mapping[str, Tensor]):
    """The 2-norm of `one - plain`, over that of `plain - start`; nan counts as infinitely far."""
    far, way = _norm(_less(one, plain)), _norm(_less(plain, start))
    if far == 0:
        return 0.0
    return far / way if way and math.isfinite(far / way) else math.inf


@dataclass(frozen=True)
class Distance:
    """How far a loop ended from a plain one."""

    trained: float
    other: float
    """Of buffers and frozen parameters."""
    loss: float = 0.0
    """Of the losses of its steps, the largest, relative."""

    def __str__(self) -> str:
        return f"{self.trained:.1e} (buffers {self.other:.1e}, losses {self.loss:.1e})"


def distance(one: Trained, plain: Trained) -> Distance:
    """How far `one` ended from `plain`, which began at the same place."""
    assert one.end.other.keys() == plain.end.other.keys(), "other buffers"
    assert apart(one.start.trained, plain.start.trained, plain.end.trained) == 0, "another start"
    both = zip(one.losses, plain.losses, strict=False)  # a run may have stopped before its end
    losses = [abs(a - b) / max(abs(b), 1e-12) for a, b in both]
    return Distance(
        apart(one.end.trained, plain.end.trained, plain.start.trained),
        apart(one.end.other, plain.end.other, plain.start.other),
        max(x if math.isfinite(x) else math.inf for x in losses),
    )


def spread(loops: list[Trained]) -> Distance:
    """The largest distance between two of several plain loops."""
    found = [distance(a, b) for i, a in enumerate(loops) for b in loops[:i]]
    return Distance(*(max(getattr(d, n) for d in found) for n in ("trained", "other", "loss")))


def bound(loops: list[Trained]) -> Distance:
    """How far a run may be from plain loops in float32 that differ by rounding alone."""
    among = spread(loops)
    return Distance(
        *(TIMES * max(far, EPSILON) for far in (among.trained, among.other, among.loss))
    )


def same_state(one: State, other: State) -> bool:
    """Whether two models hold the same bits."""
    return all(
        torch.equal(torch.nan_to_num(a[name]), torch.nan_to_num(b[name]))
        for a, b in ((one.trained, other.trained), (one.other, other.other))
        for name in a
    )


@dataclass
class Outcome:
    """What came of one run."""

    workers: int
    micro_batches: int
    dtype: str
    ended: bool = True
    """All its processes, by themselves."""
    error: str = ""
    error_kind: str = ""
    ours: bool = False
    """Whether the error is one of instep's."""
    verdict: str = ""
    """`same_as_one_machine`; empty where the run says nothing."""
    said_before: bool = False
    """Whether it was said before the first step."""
    agree: bool = True
    """Whether all workers hold the same bits."""
    steps: int = 0
    run: Path | None = None
    """The folder of the run."""
    trained: Trained | None = None
    """What its first worker has."""
    distance: Distance | None = None
    bound: Distance = field(default_factory=lambda: Distance(NEAR, NEAR))

    def __str__(self) -> str:
        many = f"{self.workers} workers, {self.micro_batches} micro-batches, {self.dtype}"
        return many if self.workers > 1 else many.replace("workers", "worker", 1)


def complaints(pair: Pair, outcome: Outcome) -> list[str]:
    """What is wrong with a run; nothing, if it kept its promise."""
    alone, expected = outcome.workers == outcome.micro_batches == 1, pair.expected
    if isinstance(expected, Honest):
        expected = _as_it_was(expected, outcome)
    if isinstance(expected, Refused) and (expected.alone or not alone):
        found = _not_refused(expected, outcome)
    else:
        found = _broken(outcome, pair.steps) or _unlike(expected, outcome, alone)
    return [f"{outcome}: {text}" for text in found]


def _as_it_was(expected: Honest, outcome: Outcome) -> Refused | Said | Same:
    if outcome.error:
        return Refused(word=expected.word)
    return Same() if outcome.verdict == "yes" else Said(word=expected.word, alone=True)


def _broken(outcome: Outcome, steps: int) -> list[str]:
    if not outcome.ended:
        return ["it did not end"]
    if outcome.error:
        return [f"it failed: {outcome.error_kind}: {outcome.error}"]
    return [f"it stopped after {outcome.steps} steps"] if outcome.steps != steps else []


def _not_refused(expected: Refused, outcome: Outcome) -> list[str]:
    if not outcome.ended:
        return ["it did not end"]
    if not outcome.error:
        return ["it ran, but should have been refused"]
    if not outcome.ours or outcome.error_kind != "RecipeError":
        return [f"it should be refused by a RecipeError, but: {outcome.error}"]
    if not re.search(expected.word, outcome.error, re.I):
        return [f"its refusal does not speak of {expected.word!r}: {outcome.error}"]
    return [f"refused only after {outcome.steps} steps"] if outcome.steps else []


def _unlike(expected: Same | Said | Refused, outcome: Outcome, alone: bool) -> list[str]:
    found = []
    says = outcome.verdict
    if not outcome.agree:
        found.append("its workers hold different models")
    if not says:
        found.append("it does not say whether it is the same as one machine")
    elif not outcome.said_before:
        found.append("it says so, but not before its first step")
    if isinstance(expected, Said) and (expected.alone or not alone):
        if says == "yes":
            found.append(f"it says yes, and is {outcome.distance} away")
        elif says and not re.match(r"(no|not shown): ", says):
            found.append(f"its verdict is none: {says!r}")
        elif says and not re.search(expected.word, says, re.I):
            found.append(f"its verdict does not speak of {expected.word!r}: {says!r}")
        return found
    assert isinstance(expected, Same) or alone
    if says and says != "yes":
        found.append(f"it says {says!r}")
    return found + _too_far(outcome)


LOSS = 1e-5
"""The loss of a step is for people: it travels as a note, in float32 at times."""


def _too_far(outcome: Outcome) -> list[str]:
    there, bound = outcome.distance, outcome.bound
    assert there is not None
    found = []
    if not there.trained <= bound.trained:
        found.append(f"its parameters are {there.trained:.2e} away, {bound.trained:.2e} allowed")
    if not there.other <= bound.other:
        found.append(f"its buffers are {there.other:.2e} away, {bound.other:.2e} allowed")
    if not there.loss <= LOSS + bound.loss:
        found.append(f"the losses it tells are {there.loss:.2e} away")
    return found
