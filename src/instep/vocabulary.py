"""Names of events, their fields, and what is wrong with an event that was read.

It knows no file. `events.py` writes and reads them.
"""

from __future__ import annotations

from typing import Any

EVENTS = {
    "run_started": "job, command, host, recipe_sha256, versions, started_by (instep, or join); "
    "planned (step_s, low_s, high_s, workers) if it was; "
    "resumed_step if it was resumed; encrypted (traffic between hosts) if there are other machines",
    "worker_joined": "worker, role (worker, or server), pid, host, seconds",
    "master_started": "pid, again (whether it replaces a lost one), why (that one was lost)",
    "host_joined": "pid, host",
    "host_lost": "host, why",
    "host_given_back": "host",
    "hosts_added": "hosts (numbers), workers (how many more the run has while they are there)",
    "hosts_leaving": "hosts (numbers), why",
    "scaled": "before, workers, hosts (those that come or leave; else a user wants it)",
    "worker_leaving": "worker, successor, fellows (with a mesh: the other workers of its replica, "
    "which leave with it)",
    "worker_hung": "worker, step, phase, how, where",
    "generation_started": "generation, members, reason, seconds",
    "worker_ready": "worker, device, threads, parameters, samples (positions of an epoch), "
    "epoch_steps (steps of an epoch where they are of unequal size; else null), epochs_vary "
    "(whether epochs differ in their positions), validation_samples, last_step, loader, phases "
    "(name to seconds, from the start of `instep run` on)",
    "model_loaded": "path, matched, missing (names), unexpected (names), wrong (name to why), "
    "sha256, text",
    "lora_added": "layers (names), trained, total (values of parameters), text",
    "trial_progress": "worker, done, of (comparisons of micro-batches with whole batches)",
    "passes_chosen": "worker, merged, reason",
    "same_as_one_machine": "verdict (yes; no: what differs; not shown: why), step (that "
    "has changed the verdict: by its batch, or a callback after it; else left out)",
    "work_dealt": "generation, step (the first with this distribution), members, micro_batches "
    "(of each), speeds (of each; their ratios count), reason (speed, or trial)",
    "loaders_started": "worker, pids (of its loader processes; a killed one is replaced)",
    "dataset_known": "dataset (training, validation), samples, contents (index, content), "
    "differed (indices of samples that were different when read again); shards (size, how many) of "
    "the windowed order, and parts (at which shards they begin and end); prepared (folders that "
    "the training set is made of, each with its sha256)",
    "data_divided": "partition, sizes (samples of each participant), validation_sizes (the same; "
    "empty if it is not divided), digest (of who has which samples), labels (how often each label "
    "is with each participant; empty if they are not known, or too many)",
    "parts_placed": "sizes (samples of each part), held (of each worker by number, how many "
    "samples of each part lie on its host)",
    "stream_divided": "parts, window (samples of a part that are mixed; 0: none), sizes (samples "
    "of each part in an epoch; empty if it begins again for ever), has_state (whether the dataset "
    "says where it is), once (whether it cannot be read again)",
    "samples_given": "worker, step, samples, bytes (that other workers have got from it so far)",
    "shards_copied": "worker, step, shards, bytes (that it has copied to its host so far)",
    "data_split": "split, samples (of the dataset), train and validation (samples of each side), "
    "fold and folds (0 and 0 without), digests (of which samples are on each side), looked_at "
    "(samples of each side whose contents were compared; not when a run is resumed), duplicates "
    "(of those to validate on, how many are trained on too), example (one, and its twin), classes "
    "(how often each label is on each side, where the split needs labels)",
    "data_balanced": "balance (of the job; or sampler, that of a DataLoader; or drawn), names (of "
    "the classes; empty if they are too many), before (samples of each; empty where they are not "
    "counted), planned (positions of each in an epoch; of a million, where none is counted), "
    "class_weights (of each, in the loss), seen_least (how often a sample comes in an "
    "epoch at least); of a sampler digest (of its weights and numbers), and if it is drawn sampler "
    "(what it draws)",
    "data_lengths": "tokens_per_batch (of the job; or null), sampler (of a DataLoader; or empty), "
    "window (samples that are sorted with each other), steps (of an epoch), mean (length of a "
    "sample), padding (share of it in the micro-batches of the first window), digest (of the "
    "lengths that were looked at)",
    "samples_chosen": "dataset (Recipe.train, Recipe.validate), text (what its DataLoader chooses)",
    "sample_skipped": "worker, generation, dataset (training, validation), epoch, index, step, "
    "cause",
    "traffic": "worker, sent_bytes, received_bytes (since the start, counted by the kernel)",
    "participants_apart": "step, distance, way, divergence",
    "lag_measured": "step, updates (since the last such event), mean, largest (of their lag)",
    "epoch_finished": "epoch, step, loss, samples",
    "validated": "step, epoch, metrics (name to value), samples, skipped, seconds, scheduled",
    "logged": "step, values (name to value, of callbacks; or learning rates that the step used, "
    "where they have changed; null if a value is not finite)",
    "participants_validated": "step, metrics (name to the value of each participant; null for one "
    "without samples)",
    "mesh_checked": "tensors (gradients that were compared with those of one process), distance "
    "(the largest, relative to what is allowed, times 1e-5), blocks (that alone were compared; "
    "empty if all were); or why (nothing was compared)",
    "checkpoint_saved": "step, path, size_bytes, held_s, seconds",
    "steps_profiled": "worker, first, last (steps), path, size_bytes",
    "checkpoint_copied": "step, url, size_bytes, seconds",
    "copies_resumed": "url, seconds (for which no checkpoint could be copied there)",
    "model_saved": "step, path, parameters_sha256, size_bytes",
    "stop_requested": "by, rule, step, why",
    "worker_failed": "worker, step, phase, kind, cause, where, line",
    "worker_lost": "worker, step, cause, restarted (with a mesh: the other workers of its replica, "
    "which are started again with it)",
    "replica_waits": "replica, workers (its processes, which wait), missing (those that are not "
    "there; other replicas train without this one)",
    "corruption_found": "step, workers (numbers of the wrong ones), suspects (numbers, if it "
    "is not known which), what (parameter, state, gradient), where, how, clean_step (from "
    "which the run continues; -1 if no worker has a copy: a went_back follows)",
    "parameters_taken": "worker, tensors, size_bytes (that it took from the first rank, as its "
    "machine had rounded them differently), apart (the largest distance, as a part of a tensor's "
    "largest value)",
    "taken_from_host": "replica, step (a replica that was started again continues from the memory "
    "of its host: no other had the state)",
    "went_back": "resumed_step, path (of a checkpoint: no worker with the current state was left)",
    "process_ended": "worker, pid, code",
    "warning": "text",
    "run_finished": "outcome (completed, stopped, failed, interrupted), rule, step, seconds, why "
    "(only if it is not what its master took it for)",
}
"""Every event, with its fields."""

_NEEDED = {
    "worker_joined": ("worker",),
    "scaled": ("workers",),
    "generation_started": ("members",),
    "worker_ready": ("worker", "samples"),
    "dataset_known": ("dataset", "samples", "contents", "differed"),
    "data_divided": ("sizes", "digest"),
    "parts_placed": ("sizes", "held"),
    "stream_divided": ("parts", "window", "sizes", "has_state"),
    "samples_given": ("worker", "step", "samples", "bytes"),
    "shards_copied": ("worker", "step", "shards", "bytes"),
    "data_balanced": ("balance", "names", "before", "planned", "class_weights"),
    "data_lengths": ("window", "steps", "mean", "padding", "digest"),
    "data_split": ("samples", "train", "validation", "fold", "folds", "digests"),
    "sample_skipped": ("generation", "dataset", "epoch", "index", "step"),
    "traffic": ("worker", "sent_bytes", "received_bytes"),
    "participants_apart": ("step",),
    "lag_measured": ("step", "updates", "mean", "largest"),
    "epoch_finished": ("epoch", "step", "loss", "samples"),
    "validated": ("step", "metrics"),
    "logged": ("step", "values"),
    "participants_validated": ("step", "metrics"),
    "checkpoint_saved": ("step",),
    "steps_profiled": ("worker", "first", "last", "path"),
    "checkpoint_copied": ("step",),
    "model_saved": ("step", "parameters_sha256"),
    "stop_requested": ("rule", "step"),
    "worker_failed": ("worker",),
    "corruption_found": ("step", "workers", "suspects", "what", "where", "how", "clean_step"),
    "worker_lost": ("worker",),
    "taken_from_host": ("replica", "step"),
    "went_back": ("resumed_step",),
    "run_finished": ("outcome",),
}
"""Fields that readers need; None counts as absent."""

_WHOLE, _NUMBER, _TEXT, _LIST, _TABLE = (int,), (int, float), (str,), (list,), (dict,)
_WORDS: dict[tuple[type, ...], str] = {
    _WHOLE: "not a whole number",
    _NUMBER: "not a number",
    _TEXT: "not text",
    _LIST: "not a list",
    _TABLE: "not a table",
}
_COUNTS: dict[str, tuple[type, ...]] = dict.fromkeys(
    [
        *("step", "resumed_step", "clean_step", "last_step", "epoch", "index", "worker", "replica"),
        *("generation", "samples", "validation_samples", "skipped", "parameters"),
        *("sent_bytes", "received_bytes", "size_bytes", "updates", "largest"),
    ],
    _WHOLE,
) | dict.fromkeys(["time", "seconds", "held_s", "mean"], _NUMBER)
_KINDS = _COUNTS | {
    **dict.fromkeys(["loss"], _NUMBER),
    **dict.fromkeys(["outcome", "rule", "why", "dataset", "parameters_sha256"], _TEXT),
    **dict.fromkeys(["verdict", "text", "cause", "reason", "started_by"], _TEXT),
    **dict.fromkeys(["suspects", "sizes", "contents", "differed", "members"], _LIST),
    **dict.fromkeys(["metrics", "values", "phases", "versions", "job"], _TABLE),
}
"""Type of a field in every known event that has it; None means unknown."""

_OWN_KINDS = {
    ("scaled", "workers"): _WHOLE,
    ("corruption_found", "workers"): _LIST,
    ("worker_joined", "pid"): _WHOLE,
    ("worker_joined", "host"): _WHOLE,
    **{("data_split", name): _WHOLE for name in ("train", "validation", "fold", "folds")},
    **{("data_split", name): _LIST for name in ("digests", "looked_at", "example", "classes")},
    ("data_split", "duplicates"): _WHOLE,
    ("dataset_known", "prepared"): _LIST,
    ("data_divided", "labels"): _LIST,
    **{
        ("data_lengths", name): _WHOLE for name in ("tokens_per_batch", "window", "steps", "digest")
    },
    **{("data_lengths", name): _NUMBER for name in ("mean", "padding")},
    ("data_lengths", "sampler"): _TEXT,
    ("data_balanced", "sampler"): _TEXT,
    ("data_balanced", "digest"): _WHOLE,
    **{("data_balanced", name): _LIST for name in ("names", "before", "planned", "class_weights")},
}
_KINDS_OF = {
    event: {**{field: kind for (of, field), kind in _OWN_KINDS.items() if of == event}, **_KINDS}
    for event in EVENTS
}
_FAR = 1 << 63  # we never write larger numbers, and no array can hold them


def wrong_in(event: Any) -> str:
    """Why the value of a line is not a valid event; empty if it is one.

    Additional fields, and events with other names, are ignored.
    """
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return "there is no event"
    when, name = event.get("time"), event["event"]
    if not isinstance(when, int | float) or not abs(when) < _FAR:  # NaN is not either
        return "the event has no time"
    for field in _NEEDED.get(name, ()):
        if event.get(field) is None:
            return f"{name} has no {field}"
    kinds = _KINDS_OF.get(name, _COUNTS)
    for field, value in event.items():
        kind = kinds.get(field)
        if kind is None or value is None:
            continue
        number: Any = value
        if not isinstance(value, kind) or (field in _COUNTS and not -_FAR < number < _FAR):
            return f"{field} is {repr(value)[:80]}, which is {_WORDS[kind]}"
    for part, value in (event.get("phases") or {}).items() if name == "worker_ready" else ():
        if not isinstance(value, int | float) or not abs(value) < _FAR:
            return f"phases.{part} is {repr(value)[:80]}, which is not a number"
    return ""
