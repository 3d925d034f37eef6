"""What alternatives of one job came to, turn by turn, and which of them pays.

An alternative is compared with the unchanged job in each turn, in which both had the same seed and
samples. It pays if it needs less time to the same validation loss: to the lowest that both have
reached. Ways in: `outcome_of`, `judge`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from instep.report.figures.curves import validation_points
from instep.report.figures.ratios import Ratio, ratio_of
from instep.report.figures.summary import finite, summarise
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_seconds
from instep.words import short_number

WORSE = 1.01
"""A final loss that is certainly more than so many times as high is a worse one."""


class Outcome(NamedTuple):
    """One run in figures."""

    seconds: float
    """From the begin of its first step to the end of its last."""
    sent_bytes: int
    samples: int
    training_loss: float | None
    curve: tuple[tuple[float, float], ...]
    """Of each validation, seconds since the first step began, and the loss."""

    @property
    def loss(self) -> float | None:
        """Of the last validation; the training loss where there was none."""
        return self.curve[-1][1] if self.curve else self.training_loss

    @property
    def best(self) -> float:
        """The lowest loss of a validation; infinite where there was none."""
        return min((loss for _, loss in self.curve), default=math.inf)

    def time_to(self, loss: float) -> float | None:
        """Seconds until a validation had a loss as low as this; between two, in proportion."""
        before = None
        for seconds, value in self.curve:
            if value <= loss:
                if before is None:
                    return seconds
                share = (before[1] - loss) / (before[1] - value)
                return before[0] + share * (seconds - before[0])
            if before is None or value < before[1]:
                before = (seconds, value)
        return None


def outcome_of(folder: RunFolder) -> Outcome:
    """The figures of a run that has ended."""
    summary = summarise(folder)
    return Outcome(
        seconds=folder.times.training_seconds(),
        sent_bytes=summary["wire_bytes"],
        samples=summary["samples"],
        training_loss=summary["loss"],
        curve=tuple(validation_points(folder)),
    )


class Judged(NamedTuple):
    """An alternative beside the unchanged job. Figures are medians of its turns."""

    name: str
    failed: str
    """Why its runs failed; empty if they did not."""
    turns: int
    seconds: float = 0.0
    sent_bytes: float = 0.0
    samples: float = 0.0
    training_loss: float | None = None
    loss: float | None = None
    of_seconds: Ratio | None = None
    """Its time over that of the unchanged job; None for that job itself, as all ratios."""
    of_bytes: Ratio | None = None
    of_loss: Ratio | None = None
    to_loss: Ratio | None = None
    """Its time to the same validation loss over that of the unchanged job."""

    @property
    def decisive(self) -> Ratio | None:
        """By what it is judged: the time to the same loss, or where that is not known, the time."""
        return self.to_loss or self.of_seconds

    @property
    def pays(self) -> bool:
        """Whether it certainly needs less time."""
        return self.decisive is not None and self.decisive.high < 1

    @property
    def ends_worse(self) -> bool:
        """Whether it certainly ends at a higher loss."""
        return self.of_loss is not None and self.of_loss.known and self.of_loss.low > WORSE

    @property
    def verdict(self) -> str:
        """What can be said about it, as one sentence."""
        if self.failed:
            return f"{self.name} failed: {self.failed}"
        if self.decisive is None:
            return f"{self.name} is what the others are compared with"
        what = "of the time to the same validation loss" if self.to_loss else "of the time"
        figure = f"{self.decisive} {what}{self._bytes}"
        if not self.decisive.known:
            return f"{self.name}: {figure}; one turn says nothing about certainty"
        if self.pays:
            worse = f", but ends at {self.of_loss} times its loss" if self.ends_worse else ""
            return f"{self.name} pays: {figure}{worse}"
        if self.decisive.low > 1:
            return f"{self.name} does not pay: {figure}"
        if not self.decisive.told:
            return f"{self.name}: not known: {figure}; more turns would tell (--repeats)"
        return f"{self.name}: no difference is shown: {figure}"

    @property
    def _bytes(self) -> str:
        return f", {self.of_bytes.value:.2g} of the bytes" if self.of_bytes else ""

    def cells(self) -> list[str]:
        """Its row of a table, under `HEAD`."""
        if self.failed:
            return [self.name, "failed", *[""] * (len(HEAD) - 2)]
        ratios = (self.of_seconds, self.to_loss)
        return [
            self.name,
            readable_seconds(self.seconds),
            readable_bytes(self.sent_bytes),
            short_number(self.loss),
            *("" if each is None else str(each) for each in ratios),
        ]

    def as_table(self) -> dict[str, Any]:
        """The same for `--json`; every value is valid JSON."""
        ratios = ("of_seconds", "of_bytes", "of_loss", "to_loss")
        found = {name: getattr(self, name) for name in ratios}
        plain = {name: each and each._asdict() for name, each in found.items()}
        words = {"pays": self.pays, "ends_worse": self.ends_worse, "verdict": self.verdict}
        table: dict[str, Any] = finite({**self._asdict(), **plain, **words})
        return table


HEAD = ("alternative", "time", "sent", "loss", "of the time", "of the time to the same loss")


def judge(
    names: Sequence[str], turns: Sequence[Sequence[Outcome | None]], failed: Sequence[str]
) -> list[Judged]:
    """Judge alternatives, of which the first is the unchanged job.

    Args:
        names: of the alternatives.
        turns: in each, the outcome of every alternative; None if it failed.
        failed: why, for each alternative; empty if it did not.
    """
    base = [turn[0] for turn in turns]
    among = max(1, len(names) - 1)
    return [
        _judged(name, [turn[at] for turn in turns], base, why, among=among, is_base=at == 0)
        for at, (name, why) in enumerate(zip(names, failed, strict=True))
    ]


def _judged(
    name: str,
    mine: Sequence[Outcome | None],
    base: Sequence[Outcome | None],
    failed: str,
    *,
    among: int,
    is_base: bool,
) -> Judged:
    pairs = [(a, b) for a, b in zip(mine, base, strict=True) if a is not None and b is not None]
    if failed or not pairs:
        return Judged(name, failed or "no turn is complete", len(pairs))
    ours = [a for a, _ in pairs]
    plain = Judged(
        name,
        "",
        len(pairs),
        seconds=statistics.median(each.seconds for each in ours),
        sent_bytes=statistics.median(each.sent_bytes for each in ours),
        samples=statistics.median(each.samples for each in ours),
        training_loss=_median([each.training_loss for each in ours]),
        loss=_median([each.loss for each in ours]),
    )
    if is_base:
        return plain
    goals = [max(a.best, b.best) for a, b in pairs]

    def ratio(of: Sequence[tuple[float | None, float | None]]) -> Ratio | None:
        return ratio_of([a for a, _ in of], [b for _, b in of], among=among)

    return plain._replace(
        of_seconds=ratio([(a.seconds, b.seconds) for a, b in pairs]),
        of_bytes=ratio([(a.sent_bytes, b.sent_bytes) for a, b in pairs]),
        of_loss=ratio([(a.loss, b.loss) for a, b in pairs]),
        to_loss=ratio(
            [(a.time_to(g), b.time_to(g)) for (a, b), g in zip(pairs, goals, strict=True)]
        ),
    )


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def conclusion(judged: Sequence[Judged]) -> str:
    """Which alternative pays most, in a sentence; or that none does."""
    paying = [each for each in judged if each.pays and each.decisive is not None]
    if not paying:
        return "nothing is shown to pay: keep the job as it is"
    best = min(paying, key=lambda each: each.decisive.value if each.decisive else math.inf)
    assert best.decisive is not None
    worse = "; its loss at the end is higher" if best.ends_worse else ""
    return f"{best.name} pays most: {1 / best.decisive.value:.2g} times as fast{worse}"
