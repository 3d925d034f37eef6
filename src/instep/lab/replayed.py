"""What a replay answers: is what was computed again what the run wrote down.

A pure comparison of a recorded run with the folders that its replay left, step
by step to the bit, and in words. It computes nothing and writes nothing; the
running is `lab/replay.py`'s. With `determinism = "order"` the order in which
numbers are added depends on the number of workers, so there figures are held
against each other to `TOLERANCE`, and parameters not at all.
Way in: `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep.errors import CheckpointError
from instep.state.compare import checkpoint_of, differences, saved
from instep.state.intact import check
from instep.store.run_folder import Records, RunFolder
from instep.words import plural

TOLERANCE = 1e-3
"""By which share a figure may differ with `determinism = "order"`: rounding, grown over steps."""


class Share(NamedTuple):
    """What one worker did of the step, in the recorded run."""

    worker: int
    epoch: int
    """Counts from 0."""
    first: int
    """Positions [first, stop) of the epoch's order."""
    stop: int


class Figures(NamedTuple):
    """One figure of every replayed step, recorded and computed."""

    name: str
    steps: int
    """In which it was recorded, so that it could be compared."""
    recorded: float | None
    """Of the last step; the one that differs, where workers wrote different ones."""
    computed: float
    """Of the last step."""
    differs: tuple[int, float, float] | None
    """The first step where it does, recorded and computed."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    run: Path
    step: int
    bits: bool
    """Whether the run promises the same bits; otherwise figures agree to `TOLERANCE`."""

    checkpoint: Path | None
    """From which it began; None where that was the beginning."""

    after: int
    """The first step computed is the one after this."""

    shares: tuple[Share, ...]
    figures: tuple[Figures, ...]
    """Of loss and gradient norm, as far as they were recorded."""

    parameters_sha256: str
    """Of the model after the step, as computed."""

    recorded_sha256: str | None
    """The same as the run wrote it down, where it saved its model after that step."""

    kept: Path | None
    """The run's own checkpoint of the step, where there is one that can be believed."""

    kept_tensors: int
    kept_differs: tuple[str, ...]
    """A sentence for each tensor of it that is not the same."""

    metrics: tuple[dict[str, Any], dict[str, Any]] | None
    """Of the validation after the step, recorded and computed; None where nothing is compared."""

    model: Path | None = None
    """Where the model after the step was written."""

    warnings: tuple[str, ...] = ()
    """What may have given other bits, as samples that can be read by now, and checkpoints that
    could not be believed."""

    @property
    def faults(self) -> list[str]:
        """Everything that is not the same, one sentence each, the earliest first."""
        found = sorted((f.differs[0], f.name, f.differs) for f in self.figures if f.differs)
        faults = [
            f"the {name} of step {step} was recorded as {was!r} and is computed as {now!r}"
            for _, name, (step, was, now) in found
        ]
        faults += self.kept_differs[:1]
        if self.recorded_sha256 not in (None, self.parameters_sha256):
            faults.append(
                f"the parameters after step {self.step} were recorded with the SHA-256 "
                f"{str(self.recorded_sha256)[:12]}... and are computed with "
                f"{self.parameters_sha256[:12]}..."
            )
        if self.metrics and self.metrics[0] != self.metrics[1]:
            faults.append(f"the validation after step {self.step} gives other metrics")
        return faults

    @property
    def compared(self) -> bool:
        """Whether the run recorded anything of these steps that could be compared."""
        looked = self.recorded_sha256 is not None or self.kept is not None or self.metrics
        return bool(looked) or any(each.steps for each in self.figures)

    @property
    def same(self) -> bool:
        """Whether something was compared, and all of it is the same."""
        return self.compared and not self.faults

    @property
    def fault(self) -> str:
        """What is not the same, as the one sentence that the command ends with."""
        if not self.compared:
            return (
                f"{self.run} recorded nothing of the steps up to {self.step} that could be "
                "compared. Replay a later one."
            )
        count = len(self.faults) - 1
        more = f" (and {plural(count, 'more difference')})" if count else ""
        why = f" Mind: {' '.join(self.warnings)}" if self.warnings else ""
        return f"not the same: {self.faults[0]}{more}.{why}"

    def as_table(self) -> dict[str, Any]:
        """All of it as plain data, for JSON; numbers that are not finite are text."""
        return {
            "run": str(self.run),
            "step": self.step,
            "same": self.same,
            "determinism": "bits" if self.bits else "order",
            "tolerance": 0.0 if self.bits else TOLERANCE,
            "from_step": self.after,
            "checkpoint": str(self.checkpoint) if self.checkpoint else None,
            "steps_computed": self.step - self.after,
            "shares": [share._asdict() for share in self.shares],
            **{each.name.replace(" ", "_"): _plain(each._asdict()) for each in self.figures},
            "parameters_sha256": self.parameters_sha256,
            "recorded_parameters_sha256": self.recorded_sha256,
            "compared_checkpoint": str(self.kept) if self.kept else None,
            "compared_tensors": self.kept_tensors,
            "metrics": _plain(list(self.metrics)) if self.metrics else None,
            "faults": self.faults,
            "warnings": list(self.warnings),
            "model": str(self.model) if self.model else None,
        }


def judge(
    run: RunFolder, computed: Sequence[RunFolder], step: int, *, checkpoint: Path | None, after: int
) -> Replayed:
    """Hold what was computed against what was recorded.

    Args:
        run: the recorded run.
        computed: the runs of one worker that computed the steps (`after`, `step`], in order.
        step: the last one, with which the last of them ended.
        checkpoint: from which the first of them began, or None.
        after: its step, or 0.
    """
    bits, last = run.spec.train.determinism == "bits", computed[-1]
    own = np.concatenate([each.steps for each in computed])
    of_run = run.steps[(run.steps["step"] > after) & (run.steps["step"] <= step)]
    figures = [_figures(name, column, of_run, own, step, bits=bits) for name, column in _COLUMNS]
    kept, tensors, differs = _kept(run, last, step) if bits else (None, 0, [])
    return Replayed(
        run=run.path,
        step=step,
        bits=bits,
        checkpoint=checkpoint,
        after=after,
        shares=_shares_of(run, step),
        figures=tuple(each for each in figures if each.name == "loss" or each.steps),
        parameters_sha256=str(last.last("model_saved")["parameters_sha256"]),
        recorded_sha256=_saved_sha256(run, step) if bits else None,
        kept=kept,
        kept_tensors=tensors,
        kept_differs=tuple(differs),
        metrics=_metrics(run, last, step) if bits else None,
        warnings=tuple(_skips(run, computed, step, after)),
    )


_COLUMNS = (("loss", "loss"), ("gradient norm", "gradient_norm"))


def _figures(
    name: str, column: str, recorded: Records, computed: Records, step: int, *, bits: bool
) -> Figures:
    agrees = _same_bits if bits else _close
    own = {int(row["step"]): row[column] for row in computed}
    rows = [(int(row["step"]), row[column]) for row in recorded]
    if name != "loss":  # NaN is where nobody asked for it
        rows = [(number, value) for number, value in rows if not math.isnan(value)]
    wrong = [(n, float(v), float(own[n])) for n, v in rows if not agrees(v, own[n])]
    here = [float(v) for n, v in rows if n == step]
    bad = [was for n, was, _ in wrong if n == step]
    shown = bad or here
    return Figures(
        name=name,
        steps=len({number for number, _ in rows}),
        recorded=shown[0] if shown else None,
        computed=float(own[step]),
        differs=wrong[0] if wrong else None,
    )


def _same_bits(one: Any, other: Any) -> bool:
    return bool(one.tobytes() == other.tobytes() or (np.isnan(one) and np.isnan(other)))


def _close(one: Any, other: Any) -> bool:
    with np.errstate(all="ignore"):
        return bool(np.isclose(one, other, rtol=TOLERANCE, atol=0.0, equal_nan=True))


def _kept(run: RunFolder, computed: RunFolder, step: int) -> tuple[Path | None, int, list[str]]:
    """The run's own checkpoint of the step, its tensors, and which of them are not the same."""
    theirs = checkpoint_of(run.path, step)
    try:
        check(theirs)
        tensors = sum(len(group) for _, group in saved(theirs))
        found = list(differences(theirs, checkpoint_of(computed.path, step)))
    except CheckpointError:  # none was kept, or it went meanwhile
        return None, 0, []
    return (
        theirs,
        tensors,
        [
            f"after step {step}, {tensor!r} of the {group} differs: {how}"
            for group, tensor, how in found
        ],
    )


def _saved_sha256(run: RunFolder, step: int) -> str | None:
    saved = [e for e in run.named("model_saved") if e.get("step") == step]
    return str(saved[-1]["parameters_sha256"]) if saved else None


def _metrics(
    run: RunFolder, computed: RunFolder, step: int
) -> tuple[dict[str, Any], dict[str, Any]] | None:
    was, now = (
        [e["metrics"] for e in each.validations if e.get("step") == step]
        for each in (run, computed)
    )
    return (was[-1], now[-1]) if was and now else None


def _skips(run: RunFolder, computed: Sequence[RunFolder], step: int, after: int) -> Iterator[str]:
    """Samples that were left out of a step in one of the two recordings only, in sentences."""
    runs = [[run], list(computed)]
    for name in ("training", "validation"):
        first = step if name == "validation" else after + 1
        was, now = (
            {(n, i) for each in side for n, i in each.left_out(name) if first <= n <= step}
            for side in runs
        )
        if only := sorted(was - now):
            yield f"{_named(only, name)} could not be read then, and can be read now."
        if only := sorted(now - was):
            yield f"{_named(only, name)} could be read then, and cannot be read now."


def _named(samples: Sequence[tuple[int, int]], dataset: str) -> str:
    shown = [f"{index} (step {step})" for step, index in samples[:_SHOWN]]
    more = [f"{len(samples) - _SHOWN} more"] if len(samples) > _SHOWN else []
    many = "samples" if len(samples) > 1 else "sample"
    return f"{dataset} {many} {', '.join([*shown, *more])}"


_SHOWN = 8
"""Samples that are named."""


def _shares_of(run: RunFolder, step: int) -> tuple[Share, ...]:
    rows = run.committed[run.committed["step"] == step]
    shares = {tuple(int(row[k]) for k in ("worker", "epoch", "first", "stop")) for row in rows}
    return tuple(sorted((Share(*each) for each in shares), key=lambda share: share.first))


def _plain(value: Any) -> Any:
    """As JSON can hold it: a number that is not finite as text."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value
