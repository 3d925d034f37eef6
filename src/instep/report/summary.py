"""A run in two dozen figures: `summary.json`, and the lines a run ends with.

Figures come from the files of the run alone. What was not measured is `None`,
and a line of the verdict appears only where there is something true to say.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from instep.store.run_folder import PARTS, Records, RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds, readable_share
from instep.words import (
    LAST_STEPS,
    command,
    corruption_in_words,
    of_what,
    short_number,
    start_in_words,
    stop_words,
)

_MOST_GAPS = 5


def summarise(folder: RunFolder) -> dict[str, Any]:
    """The contents of `summary.json`: every value is valid JSON, `None` where unknown.

    Seconds, samples and bytes are plain numbers in those units. `loss` is the
    mean over the samples of the last epoch, or over the last 100 steps of a job
    that counts steps; `time` is seconds by part, mean over the workers.
    """
    proof = folder.audit
    training_s = folder.training_seconds()
    metrics = folder.last("validated").get("metrics") or {}
    summary = {
        "name": folder.spec.name,
        "run": str(folder.path),
        "outcome": folder.outcome,
        "rule": folder.ending.get("rule"),
        "rule_text": _not_finite(folder) or _rule_text(folder),
        "diverged": bool(_not_finite(folder)) or folder.ending.get("rule") == "diverged",
        "steps": folder.last_step,
        "epochs": _finished_epochs(folder),
        "samples": proof.used,
        "loss": _final_loss(folder),
        "metrics": dict(metrics),
        "workers": folder.team,
        "seconds": folder.seconds,
        "samples_per_second": folder.timed_samples / training_s if training_s > 0 else None,
        "unrecorded_steps": len(folder.unrecorded),
        "wire_bytes": sum(moved.sent_bytes for moved in folder.traffic.values()),
        "time": mean_split(folder),
        "parameters_sha256": folder.last("model_saved").get("parameters_sha256"),
        "generations": len(folder.generations),
        "repeated_samples": proof.repeated + proof.stray,
        "missing_samples": proof.missing,
        "skipped_samples": len(folder.skipped),
        "same_as_one_machine": folder.last("same_as_one_machine").get("verdict"),
        "corruptions": len(folder.named("corruption_found")),
    }
    cleaned: dict[str, Any] = finite(summary)
    return cleaned


def _not_finite(folder: RunFolder) -> str | None:
    """From which step on every loss was no finite number, if the last one was none."""
    step, loss = committed_losses(folder)
    good = np.flatnonzero(np.isfinite(loss))
    since = int(good[-1]) + 1 if len(good) else 0
    if since == len(loss):
        return None
    return f"the loss was {loss[since]} from step {readable_count(step[since])} on"


def _rule_text(folder: RunFolder) -> str | None:
    """Why the run stopped where it did, as whoever asked for it said; None if it ran its length."""
    rule = folder.ending.get("rule")
    asked = [e for e in folder.stop_requests if e["rule"] == rule and e.get("why")]
    if not asked:
        return None
    by_clock = rule in ("time_limit", "interrupted")  # then the step became known only later
    return stop_words({**asked[0], "step": folder.last_step} if by_clock else asked[0])


def time_split(folder: RunFolder, worker: int) -> dict[str, float]:
    """Seconds of one worker by part of the step; `other` is training time in none of them."""
    steps = folder.steps_of(worker)
    split = {part: float(steps[f"{part}_s"].sum(dtype=np.float64)) for part in PARTS}
    split["other"] = max(0.0, folder.training_seconds(worker) - sum(split.values()))
    return split


def mean_split(folder: RunFolder) -> dict[str, float]:
    """`time_split`, mean over the workers that recorded a step."""
    splits = [time_split(folder, int(worker)) for worker in np.unique(folder.steps["worker"])]
    share = 1 / max(1, len(splits))
    return {part: sum(split[part] for split in splits) * share for part in (*PARTS, "other")}


def committed_losses(folder: RunFolder) -> tuple[Records, Records]:
    """As `loss_per_step`, of the steps that are committed."""
    step, loss = loss_per_step(folder)
    kept = step <= folder.last_step
    return step[kept], loss[kept]


def loss_per_step(folder: RunFolder) -> tuple[Records, Records]:
    """Steps in order, and for each the loss of its global batch: [steps] and [steps].

    Where a step was computed twice, the later one counts: it is the committed one.
    """
    steps = folder.steps
    order = np.lexsort((steps["begin"], steps["step"]))
    number = steps["step"][order]
    newest = np.append(number[1:] != number[:-1], True)[: len(number)]
    return number[newest], steps["loss"][order][newest]


def _final_loss(folder: RunFolder) -> float | None:
    step, loss = committed_losses(folder)
    if folder.spec.train.steps is None and len(folder.committed):
        newest = folder.committed["epoch"].max()
        kept = np.isin(step, folder.committed["step"][folder.committed["epoch"] == newest])
    else:
        kept = step > folder.last_step - LAST_STEPS
    if not kept.any():
        return None
    weight = _samples_of(folder, step[kept])
    return float(np.average(loss[kept], weights=weight if weight.any() else None))


def _samples_of(folder: RunFolder, steps: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Samples of each of these steps (ascending), over all workers, [steps]."""
    mine = folder.committed[np.isin(folder.committed["step"], steps)]
    where = np.searchsorted(steps, mine["step"])
    taken = np.bincount(where, weights=mine["stop"] - mine["first"], minlength=len(steps))
    missed = [event["step"] for event in folder.skipped if event["step"] in steps]
    read: np.ndarray[Any, Any] = taken - np.bincount(
        np.searchsorted(steps, missed), minlength=len(steps)
    )
    return read


def _finished_epochs(folder: RunFolder) -> int:
    if folder.epoch_steps:
        return folder.last_step // folder.epoch_steps
    return len({event["epoch"] for event in folder.named("epoch_finished")})


def finite(value: Any) -> Any:
    """The same data with `None` for what JSON has no number for."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def verdict(summary: dict[str, Any], folder: RunFolder) -> list[str]:
    """The lines that a run ends with on a terminal; the last ones are the next commands."""
    figures = [_quality(summary, of_what(folder.spec.train.steps)), _effort(summary)]
    why = [f"rule    {summary['rule_text']}"] if summary["rule_text"] else []
    lines = [_ending(summary), *why, *_causes(folder), *(line for line in figures if line)]
    if gap := gap_words(folder):
        lines.append(f"gap     {gap}")
    lines += [f"wrong   {corruption_in_words(e)}" for e in folder.named("corruption_found")]
    if same := summary["same_as_one_machine"]:
        lines.append(f"same    as one machine: {same}")
    if loaded := folder.last("model_loaded"):
        lines.append(f"start   {start_in_words(loaded)}")
    model = folder.path / "model.safetensors"
    if model.exists():
        sha256 = summary["parameters_sha256"]
        lines.append(f"model   {model}" + (f"   sha256 {sha256[:12]}" if sha256 else ""))
    page = folder.path / "report.html"
    if page.exists():
        lines.append(f"report  {page}")
    following = [command("report", folder.path)]
    if folder.outcome != "completed":
        following.insert(0, folder.way_on)
    if model.exists():
        following.append(command("export", folder.path, "--to model.safetensors"))
    return lines + [f"{'' if n else 'next':8}{text}" for n, text in enumerate(following)]


def outcome_words(summary: dict[str, Any]) -> str:
    """How a run ended, and after how long: `done in 2m31s`."""
    took = readable_seconds(summary["seconds"])
    rule = f" ({summary['rule']})" if summary["rule"] else ""
    well = f"diverged{rule} after {took}" if summary["diverged"] else f"done in {took}"
    return {
        "completed": well,
        "stopped": f"stopped{rule} after {took}",
        "interrupted": f"interrupted after {took}",
        "failed": f"failed after {took}",
    }.get(summary["outcome"], f"no end recorded; last sign of life after {took}")


def gap_words(folder: RunFolder) -> str:
    """Which step records are missing, in a sentence; empty if none is."""
    steps = folder.unrecorded
    if not len(steps):
        return ""
    if not len(folder.steps):
        return (
            f"no step record is left in {folder.path / 'steps.bin'}: the losses and "
            "times of all steps are missing."
        )
    parts = np.split(steps, np.flatnonzero(np.diff(steps) > 1) + 1)
    each = [f"{p[0]} to {p[-1]}" if len(p) > 1 else str(p[0]) for p in parts[:_MOST_GAPS]]
    rest = f" and {len(parts) - _MOST_GAPS} more gaps" if len(parts) > _MOST_GAPS else ""
    word = "steps" if len(steps) > 1 else "step"
    return (
        f"the step records of {word} {', '.join(each)}{rest} are missing: losses and times are of "
        "the rest."
    )


def exactness_words(summary: dict[str, Any]) -> str:
    """What the audit found, as the end of a sentence about samples."""
    repeated, missing = summary["repeated_samples"], summary["missing_samples"]
    if repeated or missing:
        return f"{readable_count(repeated)} repeated, {readable_count(missing)} missing"
    if not summary["samples"]:
        return "none used"
    unread = summary["skipped_samples"]
    left_out = f", {readable_count(unread)} of them skipped as unreadable" if unread else ""
    return f"each exactly once per epoch{left_out}"


def _ending(summary: dict[str, Any]) -> str:
    steps, samples = readable_count(summary["steps"]), readable_count(summary["samples"])
    if not summary["steps"]:
        return f"{outcome_words(summary)}   no step was committed"
    counted = f"{steps} steps   {samples} samples, {exactness_words(summary)}"
    return f"{outcome_words(summary)}   {counted}"


def _causes(folder: RunFolder) -> list[str]:
    if folder.outcome != "failed" or not folder.failures:
        return []
    first = folder.failures[0]
    place = f"worker {first.get('worker')}, step {first.get('step')}, {first.get('phase')}"
    lines = [f"cause   {cause_words(first)}   ({place})"]
    if first.get("where"):
        lines.append(f"        {first['where']}   {first.get('line') or ''}".rstrip())
    return lines


def cause_words(failure: dict[str, Any]) -> str:
    """`ValueError: target 10 out of range`, from a `worker_failed` event."""
    parts = [str(failure[key]) for key in ("kind", "cause") if failure.get(key)]
    return ": ".join(parts) or "unknown"


def _quality(summary: dict[str, Any], of: str) -> str:
    loss = short_number(summary["loss"])
    words = [] if summary["loss"] is None else [f"training loss {loss} ({of})"]
    metrics = {name: v for name, v in summary["metrics"].items() if isinstance(v, (int, float))}
    if metrics:
        words.append("validation " + ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()))
    return "   ".join(words)


def _effort(summary: dict[str, Any]) -> str:
    if summary["samples_per_second"] is None:
        return ""
    count, time = summary["workers"], summary["time"]
    words = [
        f"{count} worker{'s' if count != 1 else ''}",
        f"{readable_count(summary['samples_per_second'])} samples/s",
    ]
    if count > 1:
        agreeing = readable_share(time["wait"] + time["wire"], sum(time.values()))
        words.append(f"{agreeing} of the time to agree")
    if summary["wire_bytes"]:
        words.append(f"wire {readable_bytes(summary['wire_bytes'])}")
    return "   ".join(words)
