"""The parts of the report page that are text and tables, each a function from a run to markup.

`page.py` puts them in order. Long lists are cut, and say so, to keep the page small.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from instep.events import Kind
from instep.report.figures.identity import flat, hashes_of
from instep.report.figures.proof import altered_words
from instep.report.figures.restarts import Restart, restarts
from instep.report.figures.summary import (
    cause_words,
    lag_of,
    said_words,
    verdict_of,
)
from instep.report.page.markup import (
    MOST_ROWS,
    Html,
    figure,
    hash_of,
    join,
    listing,
    section,
    shortened,
    table,
    tag,
)
from instep.store.audit import EpochAudit
from instep.store.run_files import Event
from instep.store.run_folder import RunFolder
from instep.units import readable_bytes, readable_count, readable_seconds, readable_share
from instep.words import (
    apart_in_words,
    corruption_in_words,
    data_facts,
    lag_in_words,
    member,
    mesh_in_words,
    ranges,
    some_members,
    some_workers,
    start_in_words,
)


def verdict_line(summary: dict[str, Any], folder: RunFolder, name: str = "") -> Html:
    """How the run ended, in one sentence, with the cause if it failed; `name` goes before it."""
    mark, sentence = verdict_of(summary)
    label = tag("b", f"{name}: ") if name else ""
    parts = [tag("p", tag("span", class_=f"dot {mark}"), label, sentence, class_="verdict")]
    parts += [tag("p", f"{words[0].upper()}{words[1:]}") for words in said_words(folder)]
    if folder.outcome == "failed" and (failures := folder.members.failures):
        parts.append(_cause(failures[0], folder.members.servers))
    return join(parts)


def _cause(failure: Event, servers: Collection[int]) -> Html:
    who = member(failure.get("worker"), servers)
    place = f"{who}, step {failure.get('step')}, {failure.get('phase')}"
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
        ("sent over the network", figure(summary["wire_bytes"], readable_bytes)),
    ]
    if summary["servers"]:
        shown.insert(-1, ("parameter servers", figure(summary["servers"], readable_count)))
    cells = [tag("div", tag("dt", name), tag("dd", value)) for name, value in shown]
    return tag("dl", *cells, class_="tiles")


def who_did_what(folder: RunFolder) -> Html:
    """Samples of each worker, from the ledger; how fast it computes; each new assignment.

    Processes of one replica compute together: they have one row.
    """
    done = folder.committed[folder.committed["kind"] == Kind.RANGE]
    done = done[~np.isin(done["worker"], [*folder.members.servers])]
    if not len(done):
        return Html("")
    ranks = folder.spec.mesh.ranks
    unit = "worker" if ranks == 1 else "replica"
    numbers, place = np.unique(done["worker"] // ranks, return_inverse=True)
    samples = np.bincount(place, weights=done["stop"] - done["first"])

    def row(at: int) -> list[str]:
        number, count = int(numbers[at]), int(samples[at])
        steps = [folder.steps_of(each) for each in range(number * ranks, (number + 1) * ranks)]
        recorded = [each for each in steps if len(each)]
        busy_s = sum(
            float(each[part].sum()) / len(recorded)
            for each in recorded
            for part in ("load_s", "forward_s", "backward_s")
        )
        speed = sum(float(each["samples"].sum()) for each in recorded) / busy_s if busy_s else None
        share = readable_share(count, int(samples.sum()))
        own = [_processes(number, ranks)] if ranks > 1 else []
        name = [f"{unit} {number}", *own]
        return [*name, readable_count(count), share, figure(speed, readable_count)]

    head = [unit, *(["its workers"] if ranks > 1 else [])]
    head += ["samples", "share", "samples/s while computing"]
    body = [listing(head, range(len(numbers)), row, f"{unit}s", numbers_from=len(head) - 3)]
    if assigned := folder.named("work_dealt"):
        head = ["from step", "why", "micro-batches of each worker"]
        body.append(tag("h3", "Changes of the assignment"))
        body.append(listing(head, assigned, _assignment, "changes", newest=True, numbers_from=9))
    note = "Counted from the ledger of committed steps. "
    shared = "The workers of a replica compute together."
    note += "A slow worker is given less work." if ranks == 1 else shared
    if servers := folder.members.servers:
        note += f" Not listed: {some_members(sorted(servers), servers)}."
    return section(f"Work of each {unit}", *body, note=note)


def _processes(replica: int, ranks: int) -> str:
    return ranges(range(replica * ranks, (replica + 1) * ranks))


def _assignment(event: Event) -> list[str]:
    members, counts = event.get("members"), event.get("micro_batches")
    if not (isinstance(members, list) and isinstance(counts, list)):
        return [shortened(event.get(key, "")) for key in ("step", "reason", "micro_batches")]
    each = [f"{worker}: {count}" for worker, count in zip(members, counts, strict=False)]
    step = readable_count(event.get("step") or 0)
    return [step, shortened(event.get("reason", "")), shortened(", ".join(each), 200)]


def audit_of_samples(folder: RunFolder) -> Html:
    """The audit, with neighbouring epochs of equal counts in one row, and its hash."""
    proof = folder.audit
    if not proof.epochs:
        return Html("")
    note = (
        "Counted from the ledger of committed steps: every sample that was due was used once."
        if proof.exact
        else "Counted from the ledger of committed steps. It does not hold: see the table."
    )
    if folder.altered_before:
        note = f"The ledger was damaged: {altered_words(folder.altered_before)}."
    if not folder.plan.epoch_samples:
        note = "The size of the training set was not recorded, so nothing can be proved."
    head = ["epoch", "due", "used", "repeated", "missing", "not due"]
    groups = [
        list(group)
        for _, group in groupby(proof.epochs, key=lambda each: (each.participant, *_counts(each)))
    ]
    what, digest = "sha256 of every (epoch, position) used ", hash_of(proof.sha256)
    rows = listing(head, groups, _audit_row, "rows")
    return section("Audit of samples", rows, tag("p", what, digest, class_="note hash"), note=note)


def _counts(entry: EpochAudit) -> tuple[int, ...]:
    return (entry.expected, entry.used, entry.repeated, entry.missing, entry.stray)


def _audit_row(group: list[EpochAudit]) -> list[str]:
    first, last = group[0].epoch + 1, group[-1].epoch + 1
    name = str(first) if first == last else f"{first} to {last}, each"
    if (whose := group[0].participant) is not None:
        name += f" (participant {whose})"
    return [name, *(readable_count(count) for count in _counts(group[0]))]


def skipped_samples(folder: RunFolder) -> Html:
    """Which samples could not be read and were left out of their steps, the first of them."""
    if not folder.skipped:
        return Html("")
    note = (
        f"{readable_count(len(folder.skipped))} times a sample could not be read and was left out "
        "of its step: gradient and loss are the means over the others."
    )
    head = ["epoch", "step", "sample", "cause"]
    rows = listing(head, folder.skipped, _skipped_row, "samples", numbers_from=9)
    return section("Skipped samples", rows, note=note)


def _skipped_row(event: Event) -> list[str]:
    places = [str(event["epoch"] + 1), str(event["step"]), str(event["index"])]
    return [*places, shortened(event.get("cause", ""))]


def changes_and_failures(folder: RunFolder) -> Html:
    """Which workers were members when, what failed, and the warnings."""
    body, members = [], folder.members
    if members.generations:
        head, row = ["generation", "members", "why", "at", "took"], partial(_generation_row, folder)
        rows = listing(head, members.generations, row, "generations", newest=True, numbers_from=3)
        body.append(rows)
    if members.failures:
        head, row = ["who", "step", "while", "cause", "where"], partial(_failure_row, folder)
        rows = listing(head, members.failures, row, "failures", numbers_from=9)
        body += [tag("h3", "Failures"), rows]
    ranks = folder.spec.mesh.ranks
    if again := restarts(folder.events, ranks):
        head = ["replica", "its workers", "lost", "at", "continued from"]

        def restarted(one: Restart) -> list[str]:
            at = readable_seconds(float(folder.times.elapsed(one.time)))
            lost = some_workers(one.lost)
            return [str(one.replica), _processes(one.replica, ranks), lost, at, one.words()]

        body.append(tag("h3", "Replicas that were started again"))
        body.append(listing(head, again, restarted, "restarts", newest=True, numbers_from=9))
    found = [corruption_in_words(e) for e in folder.named("corruption_found")]
    warnings = [e.get("text", "") for e in folder.named("warning")]
    for title, texts in (("Corruption found", found), ("Warnings", warnings)):
        if texts:
            items = dict.fromkeys(shortened(text) for text in texts[:MOST_ROWS])
            body += [tag("h3", title), tag("ul", *(tag("li", text) for text in items))]
    note = "A generation is a period in which the members do not change."
    return section("Generations and failures", *body, note=note) if body else Html("")


def _generation_row(folder: RunFolder, event: Event) -> list[str]:
    members = event.get("members")
    names = str(members)
    if isinstance(members, list):
        servers = [number for number in members if number in folder.members.servers]
        names = ", ".join(str(number) for number in members if number not in servers)
        names += f"; {some_members(servers, servers)}" if servers else ""
    return [
        str(event.get("generation")),
        shortened(names, 120),
        shortened(event.get("reason", "")),
        readable_seconds(float(folder.times.elapsed(event["time"]))),
        figure(event.get("seconds"), readable_seconds),
    ]


def _failure_row(folder: RunFolder, event: Event) -> list[str]:
    where = " ".join(str(event[key]) for key in ("where", "line") if event.get(key))
    place = [member(event.get("worker"), folder.members.servers)]
    place += [str(event.get(key, "")) for key in ("step", "phase")]
    return [*place, shortened(cause_words(event)), tag("code", shortened(where))]


def checkpoints(folder: RunFolder) -> Html:
    """What was saved, how large it is, and how long training paused for it."""
    if not (saved := folder.named("checkpoint_saved")):
        return Html("")
    head = ["step", "file", "size", "training paused", "took"]
    rows = listing(head, saved, _checkpoint_row, "checkpoints", newest=True, numbers_from=2)
    return section("Checkpoints", rows)


def _checkpoint_row(event: Event) -> list[str]:
    return [
        readable_count(event["step"]),
        tag("code", shortened(event.get("path", ""), 200)),
        figure(event.get("size_bytes"), readable_bytes),
        figure(event.get("held_s"), readable_seconds),
        figure(event.get("seconds"), readable_seconds),
    ]


def profiles(folder: RunFolder) -> Html:
    """The traces of single steps that workers wrote."""
    if not (written := folder.named("steps_profiled")):
        return Html("")
    rows = listing(["worker", "steps", "file", "size"], written, _profile_row, "files")
    note = "Every operation of these steps, for Perfetto (ui.perfetto.dev) or chrome://tracing."
    return section("Profiles", rows, note=note)


def _profile_row(event: Event) -> list[str]:
    steps = f"{readable_count(event['first'])} to {readable_count(event['last'])}"
    file = tag("code", shortened(event["path"], 200))
    return [str(event["worker"]), steps, file, figure(event.get("size_bytes"), readable_bytes)]


def configuration(folder: RunFolder) -> Html:
    """The job as run, and the machine it ran on."""
    started, ready = folder.last("run_started"), folder.last("worker_ready")
    facts = {
        "host": started.get("host"),
        "versions": started.get("versions"),
        **{key: ready.get(key) for key in ("device", "threads", "loader", "parameters")},
        "training samples": ready.get("samples"),
        "validation samples": ready.get("validation_samples"),
        "same as one machine": folder.same_as_one_machine,
    }
    told = ("data_split", "data_balanced", "data_lengths", "stream_divided")
    facts |= data_facts(*map(folder.last, told))
    if apart := folder.named("participants_apart"):
        facts["first round"], facts["last round"] = map(apart_in_words, (apart[0], apart[-1]))
    if lag := lag_of(folder):
        facts["lag"] = lag_in_words(lag)
    if checked := folder.last("mesh_checked"):
        facts["mesh and one process"] = mesh_in_words(checked)
    if loaded := folder.last("model_loaded"):
        facts["started from"] = start_in_words(loaded)
    if adapted := folder.last("lora_added"):
        facts["LoRA"] = adapted.get("text")
    known = {key: value for key, value in facts.items() if value is not None}
    columns = [
        tag("div", tag("h3", title), _settings(flat(values)))
        for title, values in (("Job", folder.job), ("Environment", known))
    ]
    return section("Configuration", tag("div", *columns, class_="columns"))


def _settings(pairs: Iterable[tuple[str, str]]) -> Html:
    rows = [[key, tag("code", shortened(value))] for key, value in pairs]
    return table(["setting", "value"], rows[:400], numbers_from=9) if rows else Html("")


def reproduce(folder: RunFolder) -> Html:
    """The command, and the hashes that another run of it can be compared with."""
    started = folder.last("run_started")
    command = started.get("command")
    if isinstance(command, list):
        command = shlex.join(map(str, command))
    used = {"every (epoch, position) used": folder.audit.sha256} if folder.audit.epochs else {}
    hashes = {**hashes_of(folder.last), **used}
    rows = [[name, hash_of(shortened(value))] for name, value in hashes.items()]
    body = [tag("pre", tag("code", shortened(command)))] if command else []
    if rows:
        body.append(table(["sha256 of", ""], rows, numbers_from=9))
    note = f"Seed {folder.spec.seed}, determinism “{folder.spec.train.determinism}”."
    return section("How to reproduce", *body, note=note)
