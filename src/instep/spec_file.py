"""A job file (TOML) to a `JobSpec` and back, with errors that name file and key.

It knows the form of a job file and nothing of what its values mean: the
checks are those of `spec.py`; each becomes one sentence here.
"""

from __future__ import annotations

import datetime
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec

from instep.errors import SpecError, file_beside, near_miss
from instep.formats import FORMAT, other_format
from instep.spec import OF_AXIS, ROUNDS, JobSpec, Section, as_table, documentation


def load(path: Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a job file, apply `section.key=value` overrides, and check everything.

    Paths (of the recipe, of the model to start from) are relative to the job
    file, and absolute in the result.

    Raises:
        SpecError: the file is missing or not TOML, or a key or value is
            wrong; the text says where, what was given and what is wanted.
    """
    table = read_table(path)
    apply_overrides(table, overrides)
    return absolute(build(table, source=str(path)), path.parent)


def absolute(job: JobSpec, folder: Path) -> JobSpec:
    """The same job with absolute paths; relative ones are relative to `folder`."""
    file, _, function = job.recipe.rpartition(":")
    start = job.start
    if start.model:
        start = msgspec.structs.replace(start, model=_absolute(start.model, folder))
    recipe = f"{_absolute(file, folder)}:{function}"
    cluster = job.cluster
    if cluster.workers:
        certificates = _absolute(cluster.certificates, folder)
        cluster = msgspec.structs.replace(cluster, certificates=certificates)
    return msgspec.structs.replace(job, recipe=recipe, start=start, cluster=cluster)


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def read_table(path: Path) -> dict[str, Any]:
    """The raw tables of a TOML file; SpecError if it does not exist or cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SpecError(
            f"there is no job file {str(path)!r}. {file_beside(path, '*.toml')}"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text: save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".py":
            raise SpecError(
                f"{path} is a Python file; a job file is a TOML file that names it. Write job.toml "
                f'with the line recipe = "{path.name}:recipe", and give that.'
            ) from None
        raise SpecError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Give a job file.") from None


_EITHER = {"train.epochs": ("steps",), "train.steps": ("epochs",)}
"""Keys of which a job has one."""

_HAS_OPTIONS = {"sync.name": ("options",), "sync.codec": ("codec_options",)}
"""Keys that name a part, and those of its options."""

_RENAMED = {
    "train.clip_norm": "train.max_grad_norm. The meaning is the same.",
    "checkpoint.every_steps": "checkpoint.every. Set it to a number of steps, a time such as '5m', "
    "or 'never' (formerly 0).",
    "launch.name": "launch.on. The meaning is the same.",
    "report.tensorboard": "report.loggers. Write loggers = ['tensorboard'].",
    "sync.local_steps": "sync.options.local_steps. The meaning is the same.",
    "sync.local_optimizers": "sync.options.local_optimizers. The meaning is the same.",
}
"""Keys of earlier versions: the present name of each, and what to write."""


def apply_overrides(table: dict[str, Any], overrides: Iterable[str]) -> None:
    """Apply `section.key=value` strings to `table`, in order, in place.

    A value is read as TOML (`3`, `0.1`, `true`, `"text"`, `[1, 2]`), or as plain text if
    that fails, so quotes are needed only for text that looks like a number or a boolean.
    Python's spellings (`False`, `None`, `.5`) are refused: read as text, they would count
    as true, or not as a number. Setting an axis of `[mesh]` to 1 also takes away the keys that
    are for this axis, and another `sync.name` or `sync.codec` the options of the one before, unless
    they are set after it.

    Raises:
        SpecError: a string has no `=`, its path goes through a plain value, or its value
            is in Python's spelling instead of TOML's.
    """
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
        before, where = target.get(keys[-1]), ".".join(keys)
        target[keys[-1]] = _value(text.strip(), override)
        if where not in _HAS_OPTIONS or before != target[keys[-1]]:
            _drop_replaced(target, where, target[keys[-1]])


def _drop_replaced(
    table: dict[str, Any], where: str, value: Any, given: Mapping[str, Any] = MappingProxyType({})
) -> None:
    """Remove the keys that no longer count after a setting, so that the last setting wins.

    Args:
        table: the section.
        where: key that was set, with its section.
        value: it was set to; None if it was removed.
        given: what is set together with it, and stays.
    """
    others: tuple[str, ...] = _EITHER.get(where, ()) if value is not None else ()
    section, _, key = where.rpartition(".")
    if section == "mesh" and value in (1, None):  # the axis is not there now
        others = OF_AXIS.get(key, ())
    others += _HAS_OPTIONS.get(where, ())
    if where == "sync.name" and value not in ROUNDS:
        others += ("participants",)
    if where == "sync.codec" and value in ("none", None):  # nothing is encoded
        options = table.get("options")
        if isinstance(options, dict) and "encode_vectors" not in (given.get("options") or {}):
            options.pop("encode_vectors", None)
    for other in others:
        if given.get(other) is None:
            table.pop(other, None)


def lay_over(table: dict[str, Any], changes: Mapping[str, Any], section: str = "") -> None:
    """Override values of `table` with nested tables, in place; None removes a key.

    A path (`os.PathLike`) becomes text. `build` checks the values. `section` is the place
    of `table` in a job. Keys that no longer count are removed, as by `apply_overrides`.
    """
    for key, value in changes.items():
        where = f"{section}.{key}".lstrip(".")
        if value is None and where not in _RENAMED:
            table.pop(key, None)
            _drop_replaced(table, where, value, changes)
        elif isinstance(value, Mapping):
            under = table.get(key)
            table[key] = under if isinstance(under, dict) else {}
            lay_over(table[key], value, where)
        else:
            before = table.get(key)
            table[key] = os.fspath(value) if isinstance(value, os.PathLike) else value
            if where not in _HAS_OPTIONS or before != value:
                _drop_replaced(table, where, value, changes)


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


def build(table: Mapping[str, Any], *, source: str) -> JobSpec:
    """Check raw tables and freeze them; `source` is named in errors.

    Raises:
        SpecError: a key or value is wrong; the text says where, what was
            given and what is wanted.
    """
    check_format(table, source)
    _check_names(table, source)
    for place in _WITH_OPTIONS:
        _check_holds(table.get(place), place, source)
    _check_text(table, source)
    try:
        return msgspec.convert(table, JobSpec)
    except msgspec.ValidationError as failure:
        raise SpecError(f"{source}: {_sentence(str(failure), table)}") from None


def check_format(table: Mapping[str, Any], source: str, written_by: object = None) -> None:
    """Refuse tables of another format, before any of their keys is checked.

    Args:
        table: of a whole job.
        source: where it comes from.
        written_by: the version of instep that wrote it, if known.

    Raises:
        SpecError: the text says which instep reads it.
    """
    found = table.get("format", FORMAT)
    if type(found) is int and found != FORMAT:
        raise SpecError(other_format(source, found, written_by))


def _check_names(table: Mapping[str, Any], source: str) -> None:
    """Refuse the former name of a key, with its present name."""
    for old, new in _RENAMED.items():
        section, _, key = old.partition(".")
        under = table.get(section)
        if isinstance(under, Mapping) and key in under:
            raise SpecError(f"{source}: {old} is now called {new}")


_WITH_OPTIONS = ("arguments", "sync", "launch")
"""Tables whose values have other owners."""


def _check_holds(value: Any, where: str, source: str) -> None:
    """Refuse values that no TOML file can hold; from Python, anything may be given."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise SpecError(f"{source}: {where} has the key {key!r}: a key needs to be text.")
            _check_holds(inner, f"{where}.{key}", source)
    elif isinstance(value, (list, tuple)):
        for number, inner in enumerate(value):
            _check_holds(inner, f"{where}[{number}]", source)
    elif isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise SpecError(f"{source}: {where} = {value}: a whole number needs to fit 64 bits.")
    elif not isinstance(value, _HOLDS) and where not in _WITH_OPTIONS:
        raise SpecError(
            f"{source}: {where} is {value!r}, a {type(value).__name__}, which a job file "
            "cannot hold. Use text, numbers, true, false, dates, and lists and tables of those."
        )


def _check_text(value: Any, source: str) -> None:
    """Refuse text that no file can hold, such as a surrogate of a name that is not UTF-8."""
    if isinstance(value, dict):
        _check_text([*value.keys(), *value.values()], source)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _check_text(inner, source)
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SpecError(
                f"{source}: {value!a} cannot be written as UTF-8. Use another name."
            ) from None


_HOLDS = (str, bool, int, float, datetime.date, datetime.time)
_WRONG = re.compile(r"(?P<what>.*?)(?: - at `\$\.?(?P<path>[^`]*)`)?", re.DOTALL)
_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text in quotes",
    "object": "a table",
    "array": "a list",
}


def _sentence(failure: str, table: Mapping[str, Any]) -> str:
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
    if not what.startswith(("Expected", "Invalid")):  # one of the checks in `spec.py`
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


def dump(job: JobSpec) -> str:
    """A job as TOML, with every key, so that `load` returns it unchanged."""
    sections = as_table(job)
    lines = [f"{key} = {_toml(value)}" for key, value in sections.items() if not _is_table(value)]
    for name, table in sections.items():
        if _is_table(table):
            lines += ["", f"[{name}]"]
            lines += [f"{_key(k)} = {_toml(v)}" for k, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value)  # dates and times
