"""A run in two dozen figures: the contents of `summary.json`, and the sentences about them.

Figures come from the files of the run alone. What was not measured is `None`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from instep.report.figures.participants import spread_of
from instep.report.figures.proof import altered_words, left_out, left_out_words, of_privacy
from instep.report.figures.restarts import SOURCES, restarts
from instep.store.run_files import PARTS, Records
from instep.store.run_folder import RunFolder
from instep.units import readable_count, readable_seconds
from instep.words import LAST_STEPS, ranges, some_workers, stop_words

OWN = "train/"
"""Begins the name of what the run logs itself."""

_WARM = 5
"""Steps at the beginning that say little of the others."""

_MOST_GAPS = 5

_STREAM = ("parts", "window", "sizes", "has_state", "once")

_ENDINGS = {
    "completed": ("good", "Completed"),
    "stopped": ("calm", "Stopped early"),
    "interrupted": ("calm", "Interrupted"),
    "failed": ("bad", "Failed"),
}
"""For each outcome the colour of its dot, and how the sentence begins."""


def summarise(folder: RunFolder) -> dict[str, Any]:
    """The contents of `summary.json`: every value is valid JSON, `None` where unknown.

    Seconds, samples and bytes are plain numbers in those units. `loss` is the
    mean over the samples of the last epoch, or over the last 100 steps of a job
    that counts steps; `time` is seconds by part, mean over the workers.
    """
    proof = folder.audit
    training_s = folder.times.training_seconds()
    metrics = folder.last("validated").get("metrics") or {}
    again = restarts(folder.events, folder.spec.mesh.ranks)
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
        "classes": _classes(folder),
        "stream": {k: v for k, v in folder.last("stream_divided").items() if k in _STREAM} or None,
        "loss": _final_loss(folder),
        "metrics": dict(metrics),
        "logged": {
            name: list(values.values())[-1][0]
            for name, values in folder.logged.items()
            if not name.startswith(OWN)
        },
        "workers": folder.members.team,
        "servers": folder.members.servers_at_the_end,
        "seconds": folder.times.seconds,
        "samples_per_second": folder.timed_samples / training_s if training_s > 0 else None,
        "unrecorded_steps": len(folder.unrecorded),
        "wire_bytes": sum(moved.sent_bytes for moved in folder.traffic.by_worker.values()),
        "time": mean_split(folder),
        "parameters_sha256": folder.last("model_saved").get("parameters_sha256"),
        "generations": len(folder.members.generations),
        "replica_restarts": {
            source: sum(each.source == source for each in again) for source in SOURCES
        },
        "repeated_samples": proof.repeated + proof.stray,
        "missing_samples": proof.missing,
        "ledger_altered_before": folder.altered_before,
        **left_out(folder),
        "same_as_one_machine": folder.same_as_one_machine,
        "corruptions": len(folder.named("corruption_found")),
        "participants_apart": _apart(folder),
        "participants_spread": spread_of(folder),
        "lag": lag_of(folder),
        "step_s": step_seconds(folder),
        "planned": folder.last("run_started").get("planned"),
    }
    summary |= of_privacy(folder, training_s)
    cleaned: dict[str, Any] = finite(summary)
    return cleaned


def _classes(folder: RunFolder) -> dict[str, Any] | None:
    """Samples of each class, and what an epoch has of it; None where nothing is balanced."""
    told = folder.last("data_balanced")
    if not told:
        return None
    columns = {key: told[key] for key in ("before", "planned", "class_weights") if told[key]}
    each = {key: dict(zip(told["names"], values, strict=True)) for key, values in columns.items()}
    return {"balance": told["balance"], **each}


def _apart(folder: RunFolder) -> dict[str, Any] | None:
    """How far participants were apart in the last round that counts; None without rounds."""
    rounds = [e for e in folder.named("participants_apart") if e["step"] <= folder.last_step]
    names = "step", "distance", "way", "divergence"
    return {name: rounds[-1].get(name) for name in names} if rounds else None


def lag_of(folder: RunFolder) -> dict[str, Any] | None:
    """Updates that were counted, mean and largest of their lag; None where none can be late."""
    told = {
        event["step"]: event for event in folder.named("lag_measured")
    }  # after a kill, a step has two
    updates = sum(event["updates"] for event in told.values())
    if not updates:
        return None
    mean = sum(event["mean"] * event["updates"] for event in told.values()) / updates
    largest = max(event["largest"] for event in told.values())
    return {"updates": updates, "mean": mean, "largest": largest}


def _not_finite(folder: RunFolder) -> str | None:
    """From which step on no loss was a finite number; None if the last one was."""
    step, loss = committed_losses(folder)
    good = np.flatnonzero(np.isfinite(loss))
    since = int(good[-1]) + 1 if len(good) else 0
    if since == len(loss):
        return None
    return f"the loss was {loss[since]} from step {readable_count(step[since])} on"


def _rule_text(folder: RunFolder) -> str | None:
    """Why the run stopped where it did, as the request to stop said; None if it ran to its end."""
    rule = folder.ending.get("rule")
    asked = [e for e in folder.stop_requests if e["rule"] == rule and e.get("why")]
    if not asked:
        return None
    by_clock = rule in ("time_limit", "interrupted")  # the request could not name the step
    return stop_words({**asked[0], "step": folder.last_step} if by_clock else asked[0])


def time_split(folder: RunFolder, worker: int) -> dict[str, float]:
    """Seconds of one worker by part of the step; `other` is training time outside all parts."""
    steps = folder.steps_of(worker)
    split = {part: float(steps[f"{part}_s"].sum(dtype=np.float64)) for part in PARTS}
    split["other"] = max(0.0, folder.times.training_seconds(worker) - sum(split.values()))
    return split


def mean_split(folder: RunFolder) -> dict[str, float]:
    """`time_split`, mean over the workers that recorded a step; servers do not count."""
    recorded = {int(w) for w in np.unique(folder.steps["worker"])} - folder.members.servers
    splits = [time_split(folder, worker) for worker in sorted(recorded)]
    share = 1 / max(1, len(splits))
    return {part: sum(split[part] for split in splits) * share for part in (*PARTS, "other")}


def committed_losses(folder: RunFolder) -> tuple[Records, Records]:
    """`loss_per_step` of the committed steps."""
    step, loss = loss_per_step(folder)
    kept = step <= folder.last_step
    return step[kept], loss[kept]


def loss_per_step(folder: RunFolder) -> tuple[Records, Records]:
    """Steps in order, and for each the loss of its global batch: [steps] and [steps].

    If a step was computed twice, the later one counts: it is the committed one.
    """
    steps = folder.steps
    order = np.lexsort((steps["begin"], steps["step"]))
    number = steps["step"][order]
    newest = np.append(number[1:] != number[:-1], True)[: len(number)]
    return number[newest], steps["loss"][order][newest]


def _final_loss(folder: RunFolder) -> float | None:
    step, loss = committed_losses(folder)
    if folder.spec.train.steps is None and len(folder.committed):
        epoch = folder.committed["epoch"]
        if folder.plan.own_rounds is not None:  # the ledger has epochs of their own
            steps = folder.committed["step"].tolist()
            epoch = np.array([folder.plan.batches.of(step).epoch for step in steps])
        kept = np.isin(step, folder.committed["step"][epoch == epoch.max()])
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
    if folder.plan.epoch_samples and folder.last_step:
        return folder.plan.batches.epochs(folder.last_step)
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


def gap_words(folder: RunFolder) -> str:
    """Which step records are missing, in a sentence; empty if none is missing."""
    steps = folder.unrecorded
    if not len(steps):
        return ""
    if not len(folder.steps):
        return (
            f"{folder.path / 'steps.bin'} holds no step record: the losses and times of all steps "
            "are missing."
        )
    word = "steps" if len(steps) > 1 else "step"
    return (
        f"the step records of {word} {ranges(steps.tolist(), _MOST_GAPS)} are missing: losses and "
        "times are of the rest."
    )


def idle_words(folder: RunFolder) -> str:
    """Which workers had no work at the end, in a sentence; empty if all had some."""
    dealt = folder.last("work_dealt")
    members, counts = dealt.get("members"), dealt.get("micro_batches")
    if not (isinstance(members, list) and isinstance(counts, list)) or 0 not in counts:
        return ""
    if folder.spec.mesh.ranks > 1:  # members are processes, several of which compute together
        return ""
    shares = list(zip(members, counts, strict=False))
    idle, busy = ([m for m, n in shares if bool(n) == works] for works in (False, True))
    if not busy:
        return ""
    return (
        f"from step {dealt.get('step')} on {some_workers(busy)} computed all micro-batches and "
        f"{some_workers(idle)} none: so much slower {'was it' if len(idle) == 1 else 'were they'}. "
        "More workers than free cores gain nothing."
    )


def network_words(folder: RunFolder) -> str:
    """How its hosts talked to each other, in a sentence; empty if there was one machine."""
    encrypted = folder.last("run_started").get("encrypted")
    if encrypted is None:
        return ""
    if encrypted:
        return "Traffic between hosts was encrypted: mutual TLS 1.3."
    return "Traffic between hosts was not encrypted, as the job declares their network private."


def said_words(folder: RunFolder) -> list[str]:
    """Sentences that a page says of a run below its verdict, where there is something to say."""
    said = (gap_words, idle_words, planned_words, network_words)
    return [*filter(None, (words(folder) for words in said))]


def step_seconds(folder: RunFolder) -> float | None:
    """Mean time of the central half of a run's steps, without the first few; None if there are too
    few. A step ends where the next one begins."""
    steps = folder.steps
    numbers = np.unique(steps["worker"])
    if not len(numbers):
        return None
    begins = np.sort(steps["begin"][steps["worker"] == numbers[0]])
    took = np.sort(np.diff(begins)[_WARM:])
    cut = len(took) // 4
    central = took[cut : len(took) - cut]
    return float(central.mean()) if len(central) else None


def planned_words(folder: RunFolder) -> str:
    """The time of a step beside what was planned, in a sentence; empty if nothing was."""
    planned = folder.last("run_started").get("planned")
    if not isinstance(planned, dict) or (seconds := step_seconds(folder)) is None:
        return ""
    try:
        step, low, high = (float(planned[key]) for key in ("step_s", "low_s", "high_s"))
    except (KeyError, TypeError, ValueError):
        return ""
    inside = "inside" if low <= seconds <= high else "outside of"
    told = f"{readable_seconds(low)} to {readable_seconds(high)}"
    was = readable_seconds(seconds)
    return f"planned {readable_seconds(step)} a step, was {was}, {inside} {told}"


def exactness_words(summary: dict[str, Any]) -> str:
    """What the audit found, as the end of a sentence about samples."""
    repeated, missing = summary["repeated_samples"], summary["missing_samples"]
    if repeated or missing:
        return f"{readable_count(repeated)} repeated, {readable_count(missing)} missing"
    if not summary["samples"]:
        return "none used"
    if step := summary.get("ledger_altered_before"):
        return f"but the ledger was damaged: {altered_words(step)}"
    if (private := summary.get("privacy")) and private["sampling"] == "poisson":
        return "drawn at random for each step"
    often = "as often as planned" if summary.get("classes") else "exactly once per epoch"
    return f"each {often}{left_out_words(summary)}"


def verdict_of(summary: dict[str, Any], *, over: bool = False) -> tuple[str, str]:
    """How the run ended: `good`, `calm` or `bad`, and a sentence; `over` if nothing trains."""
    unknown = "calm", "Cut short" if over else "Still running, or cut short"
    mark, opening = _ENDINGS.get(summary["outcome"], unknown)
    rule = f" by {summary['rule']}" if summary["rule"] and summary["outcome"] == "stopped" else ""
    why = f": {summary['rule_text']}" if summary["rule_text"] else ""
    sentence = f"{opening}{rule} after {readable_seconds(summary['seconds'])}{why}."
    if summary["steps"]:
        steps, samples = readable_count(summary["steps"]), readable_count(summary["samples"])
        sentence += f" {steps} steps, {samples} samples, {exactness_words(summary)}."
    else:
        sentence += " No step was committed."
    if summary["repeated_samples"] or summary["missing_samples"]:
        mark = "bad"
    elif summary["diverged"] and mark == "good":
        mark = "calm"
    return mark, sentence


def cause_words(failure: dict[str, Any]) -> str:
    """`ValueError: target 10 out of range`, from a `worker_failed` event."""
    parts = [str(failure[key]) for key in ("kind", "cause") if failure.get(key)]
    return ": ".join(parts) or "unknown"
