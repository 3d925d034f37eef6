"""What is laid over a job: `section.key=value` of a command line, and tables of a program.

The last setting wins, and a setting that goes away with another one is said: an axis of a mesh
takes its keys along, another strategy or codec the options that it does not have. Nothing here
checks a value; `spec_file.build` does. Ways in: `apply_overrides`, `lay_over`.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Any

from instep.errors import SpecError
from instep.job.mesh import OF_AXIS, MeshSpec
from instep.job.sync import SyncSpec
from instep.job.sync.tables import CODEC_ROWS, STRATEGY_ROWS

Say = Callable[[str], object]
"""Told, in a sentence each, which settings went away."""

RENAMED = {
    "train.shuffle": "data.order. Write order = 'dataset' for false; leave it out for true.",
    "train.clip_norm": "train.max_grad_norm. The meaning is the same.",
    "checkpoint.every_steps": "checkpoint.every. Set it to a number of steps, a time such as '5m', "
    "or 'never' (formerly 0).",
    "launch.name": "launch.on. The meaning is the same.",
    "report.tensorboard": "report.loggers. Write loggers = ['tensorboard'].",
    "sync.local_steps": "sync.options.local_steps. The meaning is the same.",
    "sync.local_optimizers": "sync.options.local_optimizers. The meaning is the same.",
}
"""Keys of earlier versions: the present name of each, and what to write."""

_EITHER = {
    "train.epochs": "steps",
    "train.steps": "epochs",
    "data.validation": "folds",
    "data.folds": "validation",
}
"""Keys of which a job has one."""


def apply_overrides(
    table: dict[str, Any], overrides: Iterable[str], say: Say | None = None
) -> dict[str, str]:
    """Apply `section.key=value` strings to `table`, in place.

    A value is read as TOML (`3`, `0.1`, `true`, `"text"`, `[1, 2]`), or as plain text if
    that fails, so quotes are needed only for text that looks like a number or a boolean.
    Python's spellings (`False`, `None`, `.5`) are refused: read as text, they would count
    as true, or not as a number. Of two values of one key the last counts; otherwise their order is
    of no meaning. Setting an axis of `[mesh]` to 1 also takes away the keys that are for this axis,
    and another `sync.name` or `sync.codec` the options that it does not have, except for those that
    are among the overrides.

    Args:
        table: of a whole job.
        overrides: as typed.
        say: told of each value that was taken away.

    Returns:
        What was typed for each key: `{"train.epochs": "--set train.epochs=3"}`.

    Raises:
        SpecError: a string has no `=`, its path goes through a plain value, or its value
            is in Python's spelling instead of TOML's.
    """
    before, typed = _sections(table), dict[str, str]()
    for override in overrides:
        dotted, equals, text = override.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            raise SpecError(
                f"--set {override!r} is not of the form section.key=value. "
                "For example: --set train.epochs=3"
            )
        target = table
        for key in keys[:-1]:
            target = target.setdefault(key, {})
            if not isinstance(target, dict):
                raise SpecError(f"--set {override!r}: {key!r} is a value, not a section.")
        where = ".".join(keys)
        target[keys[-1]] = _value(text.strip(), override)
        target.pop(_EITHER.get(where, ""), None)
        typed[where] = f"--workers {text}" if where == "workers" else f"--set {override}"
    _leave_out(before, table, typed, say)
    return typed


def lay_over(table: dict[str, Any], changes: Mapping[str, Any], say: Say | None = None) -> None:
    """Override values of `table` with nested tables, in place; None removes a key.

    A path (`os.PathLike`) becomes text. `build` checks the values. Values that no longer count are
    taken away, as by `apply_overrides`.
    """
    before, given = _sections(table), set[str]()
    _lay_over(table, changes, "", given)
    _leave_out(before, table, given, say)


def _lay_over(
    table: dict[str, Any], changes: Mapping[str, Any], section: str, given: set[str]
) -> None:
    for key, value in changes.items():
        where = f"{section}.{key}".lstrip(".")
        given.add(where)
        if value is None and where not in RENAMED:
            table.pop(key, None)
        elif isinstance(value, Mapping):
            under = table.get(key)
            table[key] = under if isinstance(under, dict) else {}
            given.discard(where)  # only what is in it was given
            _lay_over(table[key], value, where, given)
        else:
            table[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
            other = _EITHER.get(where, "")
            if changes.get(other) is None:
                table.pop(other, None)


def blamed(typed: Mapping[str, str], text: str) -> str:
    """The overrides that an error is about, as they were typed; empty if it is about none.

    Args:
        typed: what `apply_overrides` returned.
        text: of the error; the keys that are wrong stand in its first sentence.
    """
    first = text.partition(". ")[0]
    found = []
    for where, words in typed.items():
        section, _, key = where.partition(".")
        names = [rf"(?<![\w.]){re.escape(where)}\b", rf"no key '{re.escape(section)}'"]
        if key:
            names.append(rf"\[{re.escape(section)}\].*?(?<![\w.]){re.escape(key)}\b")
        if any(re.search(name, first) for name in names):
            found.append(words)
    return " and ".join(found)


def _sections(table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sections as they are now, one level deep."""
    return {name: dict(under) for name, under in table.items() if isinstance(under, dict)}


def _leave_out(
    before: Mapping[str, Mapping[str, Any]],
    table: Mapping[str, Any],
    given: Collection[str],
    say: Say | None,
) -> None:
    """Take away the values that no longer count, and say so.

    Args:
        before: the sections as they were.
        table: as it is now.
        given: the keys that were set, with their sections.
        say: told of each value that was of meaning before.
    """
    sync, mesh = table.get("sync"), table.get("mesh")
    left: list[tuple[str, Any, str]] = []
    if isinstance(mesh, dict):
        left += _of_axes(mesh, given)
    if isinstance(sync, dict):
        was = before.get("sync", {})
        left += _of_strategy(sync, was.get("name", SyncSpec().name), given)
        left += _of_codec(sync, was.get("codec", SyncSpec().codec), given)
    if say is None:
        return
    for where, value, why in left:
        say(f"{where} = {json.dumps(value, default=str)} is left out: {why}.")


def _of_axes(mesh: dict[str, Any], given: Collection[str]) -> list[tuple[str, Any, str]]:
    left, default = [], MeshSpec()
    for axis, keys in OF_AXIS.items():
        if f"mesh.{axis}" not in given or mesh.get(axis, 1) != 1:
            continue
        for key in keys:
            if key in mesh and f"mesh.{key}" not in given:
                value = mesh.pop(key)
                if value != getattr(default, key) and value != []:
                    left.append((f"mesh.{key}", value, f"it is for mesh.{axis} above 1"))
    return left


def _of_strategy(
    sync: dict[str, Any], before: Any, given: Collection[str]
) -> list[tuple[str, Any, str]]:
    name = sync.get("name", SyncSpec().name)
    if "sync.name" not in given or name == before or name not in STRATEGY_ROWS:
        return []
    row = STRATEGY_ROWS[name]
    left = _options(sync, "options", name, row.options.keys() | row.round_options, given)
    if row.rounds is None and "sync.participants" not in given and "participants" in sync:
        value = sync.pop("participants")
        if value != SyncSpec().participants:
            left.append(("sync.participants", value, f"{name} agrees on every step"))
    return left


def _of_codec(
    sync: dict[str, Any], before: Any, given: Collection[str]
) -> list[tuple[str, Any, str]]:
    codec = sync.get("codec", SyncSpec().codec)
    if "sync.codec" not in given or codec == before or codec not in CODEC_ROWS:
        return []
    left = _options(sync, "codec_options", codec, CODEC_ROWS[codec].options, given)
    options, key = sync.get("options"), "encode_vectors"
    if codec != "none" or not isinstance(options, dict) or f"sync.options.{key}" in given:
        return left
    if key in options:
        left.append((f"sync.options.{key}", options.pop(key), "nothing is encoded"))
    return left


def _options(
    sync: dict[str, Any], table: str, name: str, known: Collection[str], given: Collection[str]
) -> list[tuple[str, Any, str]]:
    """Take away the options of another strategy or codec that `name` does not have."""
    options = sync.get(table)
    if not isinstance(options, dict) or f"sync.{table}" in given:
        return []
    strange = [o for o in options if o not in known and f"sync.{table}.{o}" not in given]
    left = [(f"sync.{table}.{o}", options.pop(o), f"{name} has no such option") for o in strange]
    if not options:
        del sync[table]
    return left


def _value(text: str, override: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        meant = _meant(text)
    if meant:
        quoted = f"'\"{text}\"'"
        raise SpecError(
            f"--set {override!r}: {text} is not TOML. Instead, {meant} {quoted} if it is text."
        )
    return text


def _meant(text: str) -> str:
    """What to write instead of a value in Python's spelling; empty if it is not one."""
    word = text.lower()
    if word in ("true", "false"):
        return f"write {word}, or"
    if word in ("none", "null") and text != "none":  # which is a value of sync.codec
        return "leave the key out, or write"
    for kind in (int, float):
        with suppress(ValueError):
            return f"write {kind(text)}, or"
    return ""
