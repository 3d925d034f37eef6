"""The lines that a run ends with on a terminal: how it ended, what came out, the next commands.

A line appears only where there is something true to say. Ways in: `closing_lines`, `show_ending`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from instep.privacy.figures import privacy_words
from instep.report.figures.participants import spread_in_words
from instep.report.figures.restarts import SOURCES
from instep.report.figures.summary import (
    cause_words,
    exactness_words,
    gap_words,
    idle_words,
    planned_words,
)
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds, readable_share
from instep.words import (
    apart_in_words,
    command,
    corruption_in_words,
    lag_in_words,
    member,
    members,
    mesh_in_words,
    next_lines,
    of_what,
    plural,
    printable,
    short_number,
    start_in_words,
)

_CAUSES = 3
"""Causes of skipped samples that are shown."""


def closing_lines(summary: dict[str, Any], folder: RunFolder) -> list[str]:
    """The lines for one run; the last ones are the commands to run next."""
    return list(_lines(summary, folder))


def show_ending(summary: dict[str, Any], path: Path) -> None:
    """Print them where progress was printed: what a program prints itself stays apart."""
    lines = [printable(line) for line in closing_lines(summary, RunFolder(path))]
    print(*lines, sep="\n", file=sys.stderr, flush=True)


def _lines(summary: dict[str, Any], folder: RunFolder) -> Iterator[str]:
    yield _ending(summary)
    if summary["rule_text"]:
        yield f"rule    {summary['rule_text']}"
    if lost := _lost(summary["steps"], folder):
        yield f"lost    {lost}"
    yield from _skipped(folder)
    if folder.outcome == "failed" and folder.members.failures:
        yield from _cause(folder.members.failures[0], folder.members.servers)
    yield from filter(None, (_quality(summary, folder), _effort(summary)))
    if gap := gap_words(folder):
        yield f"gap     {gap}"
    if idle := idle_words(folder):
        yield f"idle    {idle}"
    if planned := planned_words(folder):
        yield f"plan    {planned}"
    for event in folder.named("corruption_found"):
        yield f"wrong   {corruption_in_words(event)}"
    again = {name: count for name, count in summary["replica_restarts"].items() if count}
    if again:
        told = ", ".join(f"{count} from {SOURCES[name]}" for name, count in again.items())
        yield f"again   {plural(sum(again.values()), 'replica')} started again: {told}"
    if same := summary["same_as_one_machine"]:
        yield f"same    as one machine: {same}"
    if apart := summary["participants_apart"]:
        yield f"apart   {apart_in_words(apart)}, in the last round"
    if private := summary["privacy"]:
        yield f"private {privacy_words(private)}"
    if lag := summary["lag"]:
        yield f"lag     {lag_in_words(lag)}"
    if spread := summary["participants_spread"]:
        yield f"each    {spread_in_words(spread)}, over the participants"
    checked = folder.last("mesh_checked")
    why = checked.get("why")
    if checked.get("blocks") or (why and why not in (same or "")):
        yield f"mesh    and one process: {mesh_in_words(checked)}"
    if loaded := folder.last("model_loaded"):
        yield f"start   {start_in_words(loaded)}"
    if adapted := folder.last("lora_added"):
        yield f"lora    {adapted.get('text')}"
    model, page = folder.path / "model.safetensors", folder.path / "report.html"
    commands = [command("report" if summary["steps"] else "logs", folder.path)]
    if model.exists():
        sha256 = summary["parameters_sha256"]
        yield f"model   {model}" + (f"   sha256 {sha256[:12]}" if sha256 else "")
        commands.append(command("export", folder.path, "--to model.safetensors"))
    if page.exists():
        yield f"report  {page}"
    if folder.outcome != "completed" and summary["steps"]:
        commands.insert(0, folder.to_resume)
    yield from next_lines(commands)


def _ending(summary: dict[str, Any]) -> str:
    took = readable_seconds(summary["seconds"])
    rule = f" ({summary['rule']})" if summary["rule"] else ""
    how = {
        "completed": f"diverged{rule} after {took}" if summary["diverged"] else f"done in {took}",
        "stopped": f"stopped{rule} after {took}",
        "interrupted": f"interrupted after {took}",
        "failed": f"failed after {took}",
    }.get(summary["outcome"], f"killed, or its machine went down; last heard of after {took}")
    if not summary["steps"]:
        return f"{how}   no step was committed"
    steps, samples = plural(summary["steps"], "step"), plural(summary["samples"], "sample")
    return f"{how}   {steps}   {samples}, {exactness_words(summary)}"


def _lost(steps: int, folder: RunFolder) -> str:
    """Which steps a resumed run computes again; empty where it is none."""
    saved = folder.saved_step
    if folder.outcome in ("completed", "stopped") or steps <= saved:
        return ""
    which = f"steps {saved + 1} to {steps}" if steps > saved + 1 else f"step {steps}"
    why = f"the newest checkpoint is of step {saved}" if saved else "no checkpoint was saved"
    return f"{which}, if you resume: {why}, and what follows it is computed again"


def _skipped(folder: RunFolder) -> Iterator[str]:
    """Why samples were left out: a damaged file is one cause, named, of many samples."""
    causes = dict[str, set[tuple[str, int]]]()
    validated = [e for e in folder.named("sample_skipped") if e["dataset"] == "validation"]
    for event in [*folder.skipped, *validated]:
        samples = causes.setdefault(str(event.get("cause", "")), set())
        samples.add((event["dataset"], event["index"]))
    most = sorted(causes.items(), key=lambda each: -len(each[1]))[:_CAUSES]
    for cause, samples in most:
        yield f"skipped {plural(len(samples), 'sample')}: {cause}"
    if more := len(causes) - len(most):
        yield f"        and for {plural(more, 'other cause')}; the report has each"


def _cause(failure: dict[str, Any], servers: Collection[int]) -> Iterator[str]:
    who = member(failure.get("worker"), servers)
    place = f"{who}, step {failure.get('step')}, {failure.get('phase')}"
    yield f"cause   {cause_words(failure)}   ({place})"
    if failure.get("where"):
        yield f"        {failure['where']}   {failure.get('line') or ''}".rstrip()


def _quality(summary: dict[str, Any], folder: RunFolder) -> str:
    parts = []
    if summary["loss"] is not None:
        of = of_what(folder.spec.train.steps)
        parts.append(f"training loss {short_number(summary['loss'])} ({of})")
    metrics = {name: v for name, v in summary["metrics"].items() if isinstance(v, (int, float))}
    if metrics:
        parts.append("validation " + ", ".join(f"{n} {v:.4g}" for n, v in metrics.items()))
    return "   ".join(parts)


def _effort(summary: dict[str, Any]) -> str:
    if summary["samples_per_second"] is None:
        return ""
    time = summary["time"]
    parts = [
        members(summary["workers"], summary["servers"]),
        f"{readable_count(summary['samples_per_second'])} samples/s",
    ]
    if summary["workers"] > 1 or summary["servers"]:
        exchange = readable_share(time["wait"] + time["wire"], sum(time.values()))
        parts.append(f"{exchange} of the time in gradient exchange")
    if summary["wire_bytes"]:
        parts.append(f"sent {readable_bytes(summary['wire_bytes'])}")
    return "   ".join(parts)
