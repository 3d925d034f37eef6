"""Sentences about a key or value of a job file that is wrong: where, what is there, what is wanted.

It knows the sections of a job, and no file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import reduce
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from instep.errors import near_miss
from instep.job.base import Section
from instep.job.spec import JobSpec, documentation

_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text in quotes",
    "object": "a table",
    "array": "a list",
}


def sentence(failure: str, table: Mapping[str, Any]) -> str:
    """An error of msgspec as a sentence: where, what was given, what is wanted."""
    match = _WRONG.fullmatch(failure)
    assert match is not None, failure
    what, place = match["what"], re.sub(r"\[.*?\]", "", match["path"] or "")
    path, inner = place.split(".") if place else [], place != (match["path"] or "")
    if found := re.fullmatch(r"Object contains unknown field `(.*)`", what):
        section = f"[{'.'.join(path)}]" if path else "a job"
        return f"{section} has no key {found[1]!r}. {_meant_key(found[1], path)}"
    if found := re.fullmatch(r"Object missing required field `(.*)`", what):
        return f"the key {found[1]!r} is missing. {_describe([found[1]])}"
    if not what.startswith(("Expected", "Invalid")):  # one of the checks of a section
        return f"[{'.'.join(path)}] {what}" if path else what
    given = _as_typed(reduce(lambda outer, key: outer[key], path, table))
    wanted = ("each value in it " if inner else "") + _wanted(what, path, inner)
    return f"{'.'.join(path)} = {given}: {wanted}. {_describe(path)}".rstrip()


_OF_THE_OPTIMIZER = ("lr", "learning_rate", "weight_decay", "momentum", "betas", "optimizer")
_ELSEWHERE = {
    **dict.fromkeys(("batch_size", "batch", "train_batch_size"), "train.global_batch"),
    **dict.fromkeys(("max_epochs", "num_epochs", "n_epochs", "num_train_epochs"), "train.epochs"),
    **dict.fromkeys(("max_steps", "num_steps", "iterations"), "train.steps"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "data.loaders"),
    **dict.fromkeys(("world_size", "nproc_per_node", "num_processes"), "workers"),
    **dict.fromkeys(("clip_grad_norm", "grad_clip", "gradient_clip_val"), "train.max_grad_norm"),
}
"""Other programs' names for our keys."""


def _meant_key(given: str, path: list[str]) -> str:
    """The sentence that follows an unknown key: what was probably meant, and where it belongs."""
    if given in _OF_THE_OPTIMIZER:
        return (
            f"The recipe makes the optimizer: let the recipe function take {given!r}, and set "
            f"arguments.{given}, under [arguments] or with --set arguments.{given}=..."
        )
    known = _ELSEWHERE.get(given)
    every = [key for key in every_key() if key.rpartition(".")[2] == given]
    homes = [known] if known else [given] if given in every else every
    if len(homes) != 1:
        return near_miss(given, _keys(path))
    section, _, key = homes[0].rpartition(".")
    guess = [f"Did you mean {key!r}?"] if known else []
    if section != ".".join(path):
        place = f"into [{section}]" if section else "above the first section"
        guess.append(f"It belongs {place}.")
    return " ".join(guess)


def keys_by_name() -> dict[str, str]:
    """Every name that people use for a key of a job, with the full key, section included.

    The key's own name if only one section has it, its full name, and other programs' names.
    """
    every = every_key()
    last = [key.rpartition(".")[2] for key in every]
    alone = {name: key for name, key in zip(last, every, strict=True) if last.count(name) == 1}
    of_the_optimizer = {name: f"arguments.{name}" for name in _OF_THE_OPTIMIZER}
    return {**of_the_optimizer, **alone, **_ELSEWHERE, **{key: key for key in every}}


def every_key() -> list[str]:
    """The keys of a job file, with their sections."""
    sections = [[], *([name] for name in _keys([]) if _section_at([name]) is not None)]
    return [".".join([*path, key]) for path in sections for key in _keys(path)]


def _wanted(what: str, path: list[str], inner: bool) -> str:
    """The rule that was broken, as a clause; `inner` is that of a value in a list or table."""
    choices = [] if inner else _choices(path)
    if what.startswith("Invalid enum value") or ("`str`" in what and choices):
        return f"needs to be {' or '.join(choices)}"
    if "matching regex" in what:
        function = path == ["recipe"]
        return (
            "needs the form file.py:function" if function else "has a character that is not allowed"
        )
    if found := re.fullmatch(r"Expected `\w+` ([<>]=?) (.*)", what):
        bound = {">=": "at least", ">": "above", "<=": "at most", "<": "below"}[found[1]]
        return f"needs to be {bound} {found[2].removesuffix('.0')}"
    types = re.findall(r"\w+", what.partition("`")[2].partition("`")[0])
    return "needs to be " + " or ".join(_TYPES[name] for name in types if name in _TYPES)


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _section_at(path: list[str]) -> type[Section] | None:
    """The class of a table: `JobSpec` itself, or that of a section."""
    if not path:
        return JobSpec
    kind = get_type_hints(JobSpec).get(path[0]) if len(path) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _keys(path: list[str]) -> list[str]:
    section = _section_at(path)
    return list(section.__struct_fields__) if section else []


def _choices(path: list[str]) -> list[str]:
    section = _section_at(path[:-1])
    if section is None:
        return []
    hint = get_type_hints(section, include_extras=True)[path[-1]]
    either = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    words = [
        repr(word) for part in either for word in get_args(part) if isinstance(word, str | int)
    ]
    number = any(get_origin(part) is Annotated for part in either)
    table = any(get_origin(part) is dict for part in either)
    if not words:
        return []
    return [*["a whole number"] * number, *words, *["a table"] * table]


def _describe(path: list[str]) -> str:
    section = _section_at(path[:-1])
    return documentation().get((section.__name__, path[-1]), "") if section else ""
