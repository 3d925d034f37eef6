"""A job file (TOML) to a `JobSpec` and back, with errors that name file and key.

It knows the form of a job file and nothing of what its values mean: the
checks are those of `spec.py`, said here in one sentence each.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from instep.errors import SpecError, near_miss
from instep.spec import JobSpec


def load(path: Path, overrides: Iterable[str] = ()) -> JobSpec:
    """Read a job file, lay `section.key=value` overrides over it, and check it all.

    The recipe's path comes back absolute; it was relative to the job file.

    Raises:
        SpecError: the file is missing or is no TOML, or a key or value is
            wrong; the text says where, what was given and what is wanted.
    """
    table = read_table(path)
    apply_overrides(table, overrides)
    job = build(table, source=str(path))
    file, _, function = job.recipe.rpartition(":")
    absolute = (path.parent / Path(file).expanduser()).resolve()
    return job.model_copy(update={"recipe": f"{absolute}:{function}"})


def read_table(path: Path) -> dict[str, Any]:
    """The raw tables of a TOML file; SpecError if there is none or it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        beside = [p.name for p in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        raise SpecError(
            f"there is no job file {str(path)!r}. {near_miss(path.name, beside)}"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SpecError(f"{path} is not valid TOML: {error}.") from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Give a job file.") from None


def apply_overrides(table: dict[str, Any], overrides: Iterable[str]) -> None:
    """Lay `section.key=value` strings over `table`, in order, in place.

    A value is read as TOML (`3`, `0.1`, `true`, `"text"`, `[1, 2]`), and as
    plain text where that fails, so quotes are needed only to make a number text.

    Raises:
        SpecError: a string has no `=`, or its path runs through a plain value.
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
        target[keys[-1]] = _value(text.strip())


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def build(table: Mapping[str, Any], *, source: str) -> JobSpec:
    """Check raw tables and freeze them; `source` is named in errors.

    Raises:
        SpecError: one sentence for each wrong key or value, at most five.
    """
    try:
        return JobSpec.model_validate(dict(table))
    except ValidationError as failure:
        sentences = list(dict.fromkeys(_sentence(error) for error in failure.errors()))
    raise SpecError("\n".join(f"{source}: {sentence}" for sentence in sentences[:5])) from None


def _sentence(error: Any) -> str:
    """One pydantic error as: where, what was given, what is wanted."""
    path = [str(part) for part in error["loc"]]
    kind, given = error["type"], error["input"]
    if kind == "value_error":
        where = f"[{path[0]}] " if path else ""
        return where + str(error["ctx"]["error"])
    if kind == "extra_forbidden":
        section, known = ".".join(path[:-1]), _fields(path[:-1])
        place = f"[{section}]" if section else "a job"
        return f"{place} has no key {path[-1]!r}. {near_miss(path[-1], known)}"
    if kind == "missing":
        return f"the key {'.'.join(path)!r} is missing. {_describe(path)}"
    path = [
        part for part in path if not part.startswith(("constrained-", "literal[", "int", "float"))
    ]
    return f"{'.'.join(path)} = {_as_typed(given)}: {_wanted(kind, error)}. {_describe(path)}"


def _wanted(kind: str, error: Any) -> str:
    """The rule that was broken, as a clause."""
    context = error.get("ctx", {})
    rules = {
        "int_type": "needs to be a whole number",
        "float_type": "needs to be a number",
        "bool_type": "needs to be true or false",
        "string_type": "needs to be text in quotes",
        "dict_type": "needs to be a table",
        "model_type": "needs to be a table",
        "model_attributes_type": "needs to be a table",
        "finite_number": "needs to be a finite number",
        "string_too_short": "needs at least one character",
        "greater_than_equal": f"needs to be at least {context.get('ge')}",
        "greater_than": f"needs to be above {context.get('gt')}",
        "literal_error": f"needs to be {context.get('expected')}",
    }
    if kind == "string_pattern_mismatch":
        function = "recipe" in error["loc"]
        return "needs the form file.py:function" if function else "has a character that it may not"
    return rules.get(kind, str(error["msg"]))


def _as_typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _model_at(path: Iterable[str]) -> type[BaseModel] | None:
    model: type[BaseModel] = JobSpec
    for name in path:
        field = model.model_fields.get(name)
        if field is None or not isinstance(field.annotation, type):
            return None
        if not issubclass(field.annotation, BaseModel):
            return None
        model = field.annotation
    return model


def _fields(path: Iterable[str]) -> list[str]:
    model = _model_at(path)
    return list(model.model_fields) if model else []


def _describe(path: list[str]) -> str:
    """What the key at `path` is for, from the string under its field."""
    model = _model_at(path[:-1])
    field = model.model_fields.get(path[-1]) if model else None
    return " ".join((field.description or "").split()) if field else ""


def dump(job: JobSpec) -> str:
    """A job as TOML, every key given, so that `load` gives it back unchanged."""
    sections = job.model_dump(mode="python")
    lines = [f"{key} = {_toml(value)}" for key, value in sections.items() if not _is_table(value)]
    for name, table in sections.items():
        if _is_table(table):
            lines += ["", f"[{name}]"]
            lines += [f"{_key(k)} = {_toml(v)}" for k, v in table.items() if v is not None]
    return "\n".join(lines) + "\n"


def _is_table(value: Any) -> bool:
    return isinstance(value, dict)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() else json.dumps(name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, str) or get_args(type(value)):
        return json.dumps(str(value), ensure_ascii=False)
    return f'"{value}"'
