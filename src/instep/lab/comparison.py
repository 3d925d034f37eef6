"""What a replay answers: are the steps computed again the same as the run recorded them?

A pure comparison of a recorded run with the folders that its replay left, step by step to
the bit. It computes no step and writes nothing; `replay.py` runs the steps. With
`determinism = "order"` the order in which numbers are added depends on the number of
workers, so figures are compared to `TOLERANCE`, and parameters not at all. Way in: `judge`.
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
from instep.store.run_files import Records
from instep.store.run_folder import RunFolder
from instep.words import command, metrics_in_words, plural

TOLERANCE = 1e-3
"""Relative difference allowed with `determinism = "order"`: rounding, grown over the steps."""

_COLUMNS = {"loss": "loss", "gradient norm": "gradient_norm"}
_SHORT = {"loss": "loss", "gradient norm": "norm"}
_MOST_SAMPLES, _MOST_TENSORS = 8, 5  # that are named


def agree(one: Any, other: Any, *, bits: bool) -> Any:
    """Whether figures are the same, NaNs among them: element by element, to the bit or not."""
    with np.errstate(all="ignore"):
        if not bits:
            return np.isclose(one, other, rtol=TOLERANCE, atol=0.0, equal_nan=True)
        equal = (one == other) & (np.signbit(one) == np.signbit(other))
        return equal | (np.isnan(one) & np.isnan(other))


def on_processes(count: int) -> str:
    """`on one process`, `on 4 processes`."""
    return f"on {count} processes" if count > 1 else "on one process"


class Share(NamedTuple):
    """What one worker did in the step, in the recorded run."""

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
    """How many steps were compared."""
    recorded: float | None
    """Of the last step; the differing one, if workers recorded different figures."""
    computed: float
    """Of the last step."""
    differs: tuple[int, float, float] | None
    """The first step that differs, recorded and computed."""


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came of a replay."""

    run: Path
    step: int
    bits: bool
    """Whether the run promises the same bits; otherwise figures agree to `TOLERANCE`."""
    checkpoint: Path | None
    """The checkpoint it began with; None if that was the beginning."""
    after: int
    """The first step computed is the one after this."""
    processes: int = 1
    """How many computed the last step: those of a replica."""
    shares: tuple[Share, ...]
    figures: tuple[Figures, ...]
    """Loss and gradient norm, as far as they were recorded."""
    parameters_sha256: str
    """Of the model after the step, as computed."""
    recorded_sha256: str | None
    """The same as recorded, if the run saved its model after that step."""
    kept: Path | None
    """The run's own checkpoint of the step, if there is an intact one."""
    kept_tensors: int
    kept_differs: tuple[str, ...]
    """A sentence for each of its tensors that is not the same."""
    metrics: tuple[dict[str, Any], dict[str, Any]] | None
    """Of the validation after the step, recorded and computed; None if none is compared."""
    model: Path | None = None
    """Where the model after the step was written."""
    warnings: tuple[str, ...] = ()
    """What may cause other bits: samples that can be read only now, checkpoints that are
    damaged."""

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
        """Whether the run recorded anything about these steps that could be compared."""
        found = self.recorded_sha256 is not None or self.kept is not None or self.metrics
        return bool(found) or any(each.steps for each in self.figures)

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
        why = f" Note: {' '.join(self.warnings)}" if self.warnings else ""
        return f"not the same: {self.faults[0]}{more}.{why}"

    def as_table(self) -> dict[str, Any]:
        """The comparison as plain data, for JSON; numbers that are not finite are text."""
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
            **{_COLUMNS[each.name]: _plain(each._asdict()) for each in self.figures},
            "parameters_sha256": self.parameters_sha256,
            "recorded_parameters_sha256": self.recorded_sha256,
            "compared_checkpoint": str(self.kept) if self.kept else None,
            "compared_tensors": self.kept_tensors,
            "metrics": _plain(list(self.metrics)) if self.metrics else None,
            "faults": self.faults,
            "warnings": list(self.warnings),
            "model": str(self.model) if self.model else None,
        }

    def lines(self) -> Iterator[str]:
        """The comparison for a person; the last line is the next command."""
        steps = self.step - self.after
        range_ = f"{self.after + 1} to {self.step}" if steps > 1 else f"{self.step}"
        where = self.checkpoint or "the beginning"
        on = on_processes(self.processes)
        yield f"from    {where}: {plural(steps, 'step')} computed ({range_}), {on}"
        for share in self.shares:
            who = f"worker {share.worker} had positions [{share.first}, {share.stop})"
            yield f"ledger  step {self.step}: {who} of epoch {share.epoch + 1}"
        for each in self.figures:
            yield from self._figure_lines(each)
        yield from self._state_lines()
        yield from (f"warning {text}" for text in self.warnings)
        if self.model:
            yield f"model   {self.model}"
        yield f"verdict {self._conclusion()}"
        failed = self.compared and not self.same
        yield "next    " + (
            command("run", self.run / "job.toml", "--check-determinism")
            if failed
            else command("audit", self.run)
        )

    def _figure_lines(self, each: Figures) -> Iterator[str]:
        recorded = "not recorded" if each.recorded is None else f"{each.recorded!r} recorded"
        yield f"{_SHORT[each.name]:8}step {self.step}: {recorded}, {each.computed!r} computed"
        if each.differs:
            yield f"fault   the {each.name} differs, first at step {each.differs[0]}"
        elif each.steps:
            what = "the same bits" if self.bits else f"within {TOLERANCE:g} of each other"
            yield f"        {what} in {plural(each.steps, 'recorded step')}"

    def _state_lines(self) -> Iterator[str]:
        if self.kept:
            tensors = plural(self.kept_tensors, "tensor")
            found = f"{tensors}, each with the same bits"
            if self.kept_differs:
                found = f"{len(self.kept_differs)} of {tensors} differ"
            yield f"kept    {self.kept}: {found}"
            yield from (f"fault   {text}" for text in self.kept_differs[:_MOST_TENSORS])
        if self.metrics:
            was, now = (metrics_in_words({"metrics": each}) for each in self.metrics)
            same = self.metrics[0] == self.metrics[1]
            yield f"metrics {was}: " + ("the same bits" if same else f"but computed {now}")
        yield f"sha256  {self.parameters_sha256} of the parameters after step {self.step}"
        if self.recorded_sha256 is not None:
            same = self.recorded_sha256 == self.parameters_sha256
            yield "        the run's model has " + ("the same" if same else self.recorded_sha256)

    def _conclusion(self) -> str:
        if not self.compared:
            return "nothing was recorded that could be compared"
        if self.faults:
            return "not the same"
        if self.bits:
            return "the same bits"
        return (
            f"the same within {TOLERANCE:g}: determinism = 'order' allows other bits, so the "
            "parameters were not compared"
        )


def judge(
    run: RunFolder, computed: Sequence[RunFolder], step: int, *, checkpoint: Path | None, after: int
) -> Replayed:
    """Compare what was computed with what was recorded.

    Args:
        run: the recorded run.
        computed: the runs of one replica that computed the steps (`after`, `step`], in order.
        step: the last step of the last of them.
        checkpoint: the one that the first of them began with, or None.
        after: its step, or 0.
    """
    bits, last = run.spec.train.determinism == "bits", computed[-1]
    own = np.concatenate([each.steps for each in computed])
    of_run = run.steps[(run.steps["step"] > after) & (run.steps["step"] <= step)]
    figures = [_figures(name, of_run, own, step, bits=bits) for name in _COLUMNS]
    kept, tensors, differs = _kept(run, last, step) if bits else (None, 0, [])
    saves = [e["parameters_sha256"] for e in run.named("model_saved") if e.get("step") == step]
    return Replayed(
        run=run.path,
        step=step,
        bits=bits,
        checkpoint=checkpoint,
        after=after,
        processes=last.spec.workers,
        shares=_shares_of(run, step),
        figures=tuple(each for each in figures if each.name == "loss" or each.steps),
        parameters_sha256=str(last.last("model_saved")["parameters_sha256"]),
        recorded_sha256=str(saves[-1]) if saves and bits else None,
        kept=kept,
        kept_tensors=tensors,
        kept_differs=tuple(differs),
        metrics=_metrics(run, last, step) if bits else None,
        warnings=tuple(_skips(run, computed, step, after)),
    )


def _figures(name: str, recorded: Records, computed: Records, step: int, *, bits: bool) -> Figures:
    column = _COLUMNS[name]
    own = {int(row["step"]): row[column] for row in computed}
    rows = [(int(row["step"]), row[column]) for row in recorded]
    if name != "loss":  # NaN means that the norm was not recorded
        rows = [(number, value) for number, value in rows if not math.isnan(value)]
    wrong = [(n, float(v), float(own[n])) for n, v in rows if not agree(v, own[n], bits=bits)]
    here = [was for n, was, _ in wrong if n == step] or [float(v) for n, v in rows if n == step]
    return Figures(
        name=name,
        steps=len({number for number, _ in rows}),
        recorded=here[0] if here else None,
        computed=float(own[step]),
        differs=wrong[0] if wrong else None,
    )


def _kept(run: RunFolder, computed: RunFolder, step: int) -> tuple[Path | None, int, list[str]]:
    """The run's own checkpoint of the step, its tensors, and which of them are not the same."""
    theirs = checkpoint_of(run.path, step)
    try:
        check(theirs)
        tensors = sum(len(group) for _, group in saved(theirs))
        found = list(differences(theirs, checkpoint_of(computed.path, step)))
    except CheckpointError:  # none was kept, or the run deleted it meanwhile
        return None, 0, []
    text = f"after step {step}, {{!r}} of the {{}} differs: {{}}"
    return theirs, tensors, [text.format(tensor, group, how) for group, tensor, how in found]


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
    for name, first in (("training", after + 1), ("validation", step)):
        was, now = (
            {(n, i) for each in side for n, i in each.left_out(name) if first <= n <= step}
            for side in ([run], computed)
        )
        if only := sorted(was - now):
            yield f"{_named(only, name)} could not be read then, and can be read now."
        if only := sorted(now - was):
            yield f"{_named(only, name)} could be read then, and cannot be read now."


def _named(samples: Sequence[tuple[int, int]], dataset: str) -> str:
    shown = [f"{index} (step {step})" for step, index in samples[:_MOST_SAMPLES]]
    if len(samples) > _MOST_SAMPLES:
        shown.append(f"{len(samples) - _MOST_SAMPLES} more")
    return f"{dataset} sample{'s' if len(samples) > 1 else ''} {', '.join(shown)}"


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
