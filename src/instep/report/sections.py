"""The parts of the report page, each a function from a run to markup.

All of them read a `RunFolder` and its figures and return `Html`; `page.py`
puts them in order. Long lists are cut, and say so, to keep the page small.
"""

from __future__ import annotations

import shlex
from itertools import groupby
from typing import Any

from instep.report.compare import differing_settings, figures, flat
from instep.report.markup import Html, figure, join, more, section, shortened, table, tag
from instep.report.summary import cause_words, exactness_words, gap_words
from instep.store.audit import EpochAudit
from instep.store.run_folder import Event, RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds
from instep.words import corruption_in_words, start_in_words

_MOST_ROWS = 40  # of any table

_MARKS = {"completed": "good", "stopped": "calm", "interrupted": "calm", "failed": "bad"}
_WORDS = {
    "completed": "Trained to the end",
    "stopped": "Stopped early",
    "interrupted": "Interrupted",
    "failed": "Failed",
}


def verdict_line(summary: dict[str, Any], folder: RunFolder, name: str = "") -> Html:
    """How the run ended, in one sentence, with the cause if it failed; `name` goes before it."""
    opening = _WORDS.get(summary["outcome"], "Still running, or cut short")
    rule = f" by {summary['rule']}" if summary["rule"] and summary["outcome"] == "stopped" else ""
    why = f": {summary['rule_text']}" if summary["rule_text"] else ""
    sentence = f"{opening}{rule} after {readable_seconds(summary['seconds'])}{why}."
    if summary["steps"]:
        steps, samples = readable_count(summary["steps"]), readable_count(summary["samples"])
        sentence += f" {steps} steps, {samples} samples, {exactness_words(summary)}."
    else:
        sentence += " No step was committed."
    exact = not (summary["repeated_samples"] or summary["missing_samples"])
    mark = _MARKS.get(summary["outcome"], "calm") if exact else "bad"
    if summary["diverged"] and mark == "good":
        mark = "calm"
    label = tag("b", f"{name}: ") if name else ""
    parts = [tag("p", tag("span", class_=f"dot {mark}"), label, sentence, class_="verdict")]
    if gap := gap_words(folder):
        parts.append(tag("p", f"{gap[0].upper()}{gap[1:]}"))
    if folder.outcome == "failed" and folder.failures:
        parts.append(_cause(folder.failures[0]))
    return join(parts)


def _cause(failure: Event) -> Html:
    place = f"worker {failure.get('worker')}, step {failure.get('step')}, {failure.get('phase')}"
    code = " ".join(shortened(failure[key]) for key in ("where", "line") if failure.get(key))
    lines = [tag("strong", shortened(cause_words(failure))), tag("span", place)]
    return tag("div", *lines, tag("code", code) if code else "", class_="cause")


def tiles(summary: dict[str, Any], of: str) -> Html:
    """The few figures that everybody looks for first; `of` is what the loss is a mean of."""
    shown = [(f"training loss, {of}", figure(summary["loss"]))]
    shown += [(f"validation {n}", figure(v)) for n, v in list(summary["metrics"].items())[:3]]
    shown += [
        ("samples per second", figure(summary["samples_per_second"], readable_count)),
        ("workers", figure(summary["workers"], readable_count)),
        ("sent over the wire", figure(summary["wire_bytes"], readable_bytes)),
    ]
    cells = [tag("div", tag("dt", name), tag("dd", value)) for name, value in shown]
    return tag("dl", *cells, class_="tiles")


def comparison(runs: list[RunFolder], summaries: list[dict[str, Any]]) -> Html:
    """Two runs side by side: what came out, and what they were told differently."""
    names = run_names(runs)
    units = {
        **dict.fromkeys(["steps", "samples", "samples_per_second"], readable_count),
        "seconds": readable_seconds,
        "wire_bytes": readable_bytes,
        "parameters_sha256": lambda digest: f"{digest[:12]}...",
    }
    came_out = [
        (name.replace("_", " "), figure(one, units.get(name)), figure(other, units.get(name)))
        for name, one, other in figures(*summaries)
    ]
    head = [tag("span", name, class_=f"run{at}") for at, name in enumerate(names)]
    told = differing_settings(runs[0].job, runs[1].job)
    settings = (
        table(["setting", *head], [[shortened(cell) for cell in row] for row in told[:_MOST_ROWS]])
        if told
        else tag("p", "None: both were given the same job.", class_="note")
    )
    title = tag("h3", "Settings that differ")
    return section("Side by side", table(["figure", *head], came_out), title, settings)


def run_names(runs: list[RunFolder]) -> list[str]:
    """What to call each run: its folder's name, or the whole path where names are the same."""
    names = [folder.path.absolute().name for folder in runs]
    return names if len(set(names)) == len(names) else [str(folder.path) for folder in runs]


def audit_of_samples(folder: RunFolder) -> Html:
    """The audit, with neighbouring epochs of equal counts in one row, and its hash."""
    proof = folder.audit
    if not proof.epochs:
        return Html("")
    runs = [list(group) for _, group in groupby(proof.epochs, key=_counts)]
    note = (
        "Counted from the ledger of committed steps: every sample that was due was used once."
        if proof.exact
        else "Counted from the ledger of committed steps. It does not hold: see the table."
    )
    if not folder.epoch_samples:
        note = "The size of the training set was not recorded, so nothing can be proved."
    head = ["epoch", "due", "used", "repeated", "missing", "not due"]
    rows = [_audit_row(group) for group in runs[:_MOST_ROWS]]
    digest = tag(
        "p",
        "sha256 of every (epoch, position) used ",
        tag("code", proof.sha256),
        class_="note hash",
    )
    rest = more(len(runs), _MOST_ROWS, "rows")
    return section("Audit of samples", table(head, rows), rest, digest, note=note)


def _counts(entry: EpochAudit) -> tuple[int, ...]:
    return (entry.expected, entry.used, entry.repeated, entry.missing, entry.stray)


def _audit_row(group: list[EpochAudit]) -> list[str]:
    first, last = group[0].epoch + 1, group[-1].epoch + 1
    name = str(first) if first == last else f"{first} to {last}, each"
    return [name, *(readable_count(count) for count in _counts(group[0]))]


def skipped_samples(folder: RunFolder) -> Html:
    """Which samples could not be read and were left out of their steps, the first of them."""
    skipped = folder.skipped
    if not skipped:
        return Html("")
    rows = [
        [str(e["epoch"] + 1), str(e["step"]), str(e["index"]), shortened(e.get("cause", ""))]
        for e in skipped[:_MOST_ROWS]
    ]
    head = ["epoch", "step", "sample", "cause"]
    note = (
        f"{readable_count(len(skipped))} times a sample could not be read and was left out of its "
        "step: gradient and loss are the means over the others."
    )
    rest = more(len(skipped), _MOST_ROWS, "samples")
    return section("Skipped samples", table(head, rows, numbers_from=9), rest, note=note)


def changes_and_failures(folder: RunFolder) -> Html:
    """Who was a member when, what failed, and what was warned of."""
    body = []
    if folder.generations:
        rows = [_generation_row(folder, event) for event in folder.generations[-_MOST_ROWS:]]
        body.append(table(["generation", "members", "why", "at", "took"], rows, numbers_from=3))
        body.append(more(len(folder.generations), _MOST_ROWS, "generations"))
    if folder.failures:
        head = ["worker", "step", "while", "cause", "where"]
        rows = [_failure_row(event) for event in folder.failures[:_MOST_ROWS]]
        body += [tag("h3", "Failures"), table(head, rows, numbers_from=9)]
        body.append(more(len(folder.failures), _MOST_ROWS, "failures"))
    found = [shortened(corruption_in_words(e)) for e in folder.named("corruption_found")]
    if found:
        items = [tag("li", text) for text in found[:_MOST_ROWS]]
        body += [tag("h3", "Corruption found"), tag("ul", *items)]
    warnings = [shortened(e.get("text", "")) for e in folder.named("warning")]
    if warnings:
        items = [tag("li", text) for text in dict.fromkeys(warnings[:_MOST_ROWS])]
        body += [tag("h3", "Warnings"), tag("ul", *items)]
    return section("Generations and failures", *body) if body else Html("")


def _generation_row(folder: RunFolder, event: Event) -> list[str]:
    members = event.get("members")
    names = ", ".join(map(str, members)) if isinstance(members, list) else str(members)
    at, took = folder.elapsed(event["time"]), event.get("seconds")
    return [
        str(event.get("generation")),
        shortened(names, 120),
        shortened(event.get("reason", "")),
        readable_seconds(float(at)),
        figure(took, readable_seconds),
    ]


def _failure_row(event: Event) -> list[str]:
    where = " ".join(str(event[key]) for key in ("where", "line") if event.get(key))
    place = [str(event.get(key, "")) for key in ("worker", "step", "phase")]
    return [*place, shortened(cause_words(event)), tag("code", shortened(where))]


def checkpoints(folder: RunFolder) -> Html:
    """What was saved, how large, and how long training was held up by it."""
    saved = folder.checkpoints
    if not saved:
        return Html("")
    rows = [
        [
            readable_count(event["step"]),
            tag("code", shortened(event.get("path", ""), 200)),
            figure(event.get("size_bytes"), readable_bytes),
            figure(event.get("held_s"), readable_seconds),
            figure(event.get("seconds"), readable_seconds),
        ]
        for event in saved[-_MOST_ROWS:]
    ]
    head = ["step", "file", "size", "training held", "took"]
    rest = more(len(saved), _MOST_ROWS, "checkpoints")
    return section("Checkpoints", table(head, rows, numbers_from=2), rest)


def configuration(folder: RunFolder) -> Html:
    """The job as run, and the machine it ran on."""
    job = [[key, tag("code", shortened(value))] for key, value in flat(folder.job)]
    started, ready = folder.last("run_started"), folder.last("worker_ready")
    facts = {
        "host": started.get("host"),
        "versions": started.get("versions"),
        **{key: ready.get(key) for key in ("device", "threads", "loader", "parameters")},
        "training samples": ready.get("samples"),
        "validation samples": ready.get("validation_samples"),
    }
    if verdict := folder.last("same_as_one_machine").get("verdict"):
        facts["same as one machine"] = verdict
    if loaded := folder.last("model_loaded"):
        facts["started from"] = start_in_words(loaded)
    known = {key: value for key, value in facts.items() if value is not None}
    surroundings = [[key, tag("code", shortened(value))] for key, value in flat(known)]
    columns = [tag("div", tag("h3", "Job"), _settings(job))]
    columns.append(tag("div", tag("h3", "Environment"), _settings(surroundings)))
    return section("Configuration", tag("div", *columns, class_="columns"))


def _settings(rows: list[list[str]]) -> Html:
    return table(["setting", "value"], rows[:400], numbers_from=9) if rows else Html("")


def reproduce(folder: RunFolder, summary: dict[str, Any]) -> Html:
    """The command, and the hashes that another run of it can be held against."""
    started = folder.last("run_started")
    command = started.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    hashes = [
        ("recipe", started.get("recipe_sha256")),
        ("model it started from", folder.last("model_loaded").get("sha256")),
        ("every (epoch, position) used", folder.audit.sha256 if folder.audit.epochs else None),
        ("parameters", summary["parameters_sha256"]),
    ]
    rows = [[name, tag("code", shortened(value))] for name, value in hashes if value]
    body = [tag("pre", tag("code", shortened(command)))] if command else []
    if rows:
        body.append(table(["sha256 of", ""], rows, numbers_from=9))
    note = f"Seed {folder.spec.seed}, determinism “{folder.spec.train.determinism}”."
    return section("How to reproduce", *body, note=note)
