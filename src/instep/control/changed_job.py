"""Changes of a job that a resumed run may have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.overrides import apply_overrides, lay_over
from instep.job.spec import JobSpec, as_table
from instep.store.run_folder import RunFolder
from instep.words import without_secrets

FIXED = {
    "name": "a run keeps its folder",
    "seed": "the order of the data and every random draw follow from it",
    "arguments": "the recipe would build something else",
    "sync": "what a strategy remembers is in the checkpoint",
    "start.model": "the checkpoint has the model by now",
    "start.partial": "the checkpoint has the model by now",
    "start.freeze": "the optimizer's state is of the parameters that were trained",
    "start.learning_rates": "the optimizer's rates are in the checkpoint",
    "data.order": "the place in the data is counted in it",
    "data.window": "the order of the data follows from it",
    "data.sources": "the order of the data follows from it",
    **dict.fromkeys(
        ("data.balance", "data.weights", "data.length"), "what a step takes follows from it"
    ),
    **dict.fromkeys(
        [f"data.{key}" for key in ("split", "validation", "folds", "fold", "labels", "groups")]
        + ["data.times", "data.gap", "data.embargo"],
        "which samples are trained on follows from it",
    ),
    "lora": "the checkpoint has the adapters",
    **dict.fromkeys(
        [f"privacy.{key}" for key in ("protects", "noise", "delta", "clip", "sampling")],
        "what was published so far was accounted with it",
    ),
    "train.global_batch": "the place in the data is counted in global batches",
    "train.tokens_per_batch": "the place in the data is counted in its batches",
    "train.micro_batches": "random draws and batch statistics belong to a micro-batch",
    "train.batch_norm": "running statistics are of the batches that it sees",
    "train.determinism": "bits would be neither those of one nor of the other",
    "train.precision": "every value is rounded by it",
    "train.max_grad_norm": "every step is scaled by it",
}
"""What may not change when a run is resumed, and why."""

FIXED_OF_STREAMS = dict.fromkeys(
    ("data.parts", "data.once"), "a stream is divided by it, and its parts have their places"
)
"""Keys that may not either, where samples come from a stream."""

FIXED_BITS = {
    "mesh": "sums within a replica are cut along it, and round otherwise",
    "train.threads": "sums are cut among threads, and round otherwise",
    "train.device": "another kind of device rounds otherwise",
}
"""What else may not, if the bits must stay the same."""

FIXED_KEPT = {"mesh": "each of its ranks keeps a part of what participants or voters remember"}
"""What else may not, where participants or voters remember something."""


def changed(
    run: RunFolder,
    overrides: Iterable[str],
    changes: Mapping[str, Any] = MappingProxyType({}),
    say: Callable[[str], object] | None = None,
) -> JobSpec:
    """The job of a run folder, changed by `section.key=value` and by tables.

    It has the number of workers that the run was last scaled to, unless they give another. `say` is
    told of each value that went away with a change.

    Raises:
        SpecError: an override is wrong, or changes what may not change.
    """
    given = list(overrides)
    table = spec_file.read_table(run.path / "job.toml")
    table.get("train", {}).pop("stop_after_steps", None)  # it was for the start before
    table["workers"] = scaled_to(run)
    typed = apply_overrides(table, given, say)
    lay_over(table, changes, say)
    job = spec_file.build(table, source=f"resume {run.path}", typed=typed)
    if "recipe" in changes or any(each.split("=")[0].strip() == "recipe" for each in given):
        job = spec_file.with_recipe_in(job, Path.cwd())
    check_changes(run.spec, job, stream=bool(run.last("stream_divided")))
    return job


def scaled_to(run: RunFolder) -> int:
    """How many workers the run was last to have: those of its job, or what `instep scale` said.

    Not those that it had for as long as another job's hosts were there.
    """
    workers = in_job = run.spec.workers
    began: Mapping[str, Any] = {}
    brought: dict[tuple[int, ...], int] = {}  # workers, by the hosts that they came with
    for event in run.events:
        if event["event"] == "run_started":
            began = event.get("job") or {}
            workers = in_job
            brought.clear()
        elif event["event"] == "hosts_leaving":
            brought.pop(tuple(event.get("hosts", ())), None)
        elif event["event"] != "scaled":
            pass
        elif hosts := event.get("hosts"):
            after = int(event["workers"])
            if (more := after - int(event.get("before") or after)) > 0:
                brought[tuple(hosts)] = more
        elif began.get("workers", in_job) == in_job:  # else job.toml was changed by hand since
            wanted = int(event["workers"])
            own = wanted - sum(brought.values())
            workers = own if own > 0 else wanted  # then none leave with the hosts
    return workers


def check_changes(before: JobSpec, after: JobSpec, *, stream: bool = False) -> None:
    """Refuse a change of what defines a run; `stream`: whether its samples come from one.

    Raises:
        SpecError: names the key, both values and the reason.
    """
    keeps = before.keeps_optimizers or before.sync.row.outer
    keeps |= (before.sync.rounds is not None and before.sync.own_state) or before.sync.votes
    fixed = FIXED | (FIXED_KEPT if keeps else {}) | (FIXED_OF_STREAMS if stream else {})
    fixed |= FIXED_BITS if before.train.determinism == "bits" else {}
    old, new = as_table(before), as_table(after)
    for each, sync in ((old["sync"], before.sync), (new["sync"], after.sync)):
        del each["servers"], each["defaults"]  # a checkpoint is for any number of servers
        each |= {"options": sync.all_options, "codec_options": sync.all_codec_options}
    for key, reason in fixed.items():
        was, given = _at(old, key), _at(new, key)
        if was != given:
            key, was, given = _narrowed(key, was, given)
            raise SpecError(
                f"{key} was {_shown(was)} and cannot become {_shown(given)} when a run is resumed: "
                f"{reason}. Leave it, or begin a new run with instep run."
            )


def _at(table: Mapping[str, Any], key: str) -> Any:
    value: Any = table
    for part in key.split("."):
        value = value[part]
    return value


def _narrowed(key: str, was: Any, given: Any) -> tuple[str, Any, Any]:
    """The first key within two tables that differs, unless they have other keys."""
    if not (isinstance(was, Mapping) and isinstance(given, Mapping) and was.keys() == given.keys()):
        return key, was, given
    first = next(each for each in was if was[each] != given[each])
    return _narrowed(f"{key}.{first}", was[first], given[first])


def _shown(value: Any) -> str:
    plain = without_secrets(value)  # a tuple is a list, as a job file has it
    if isinstance(plain, bool):
        return str(plain).lower()
    return "not set" if plain is None else repr(plain)
