"""A job file (TOML) to a `JobSpec` and back, with errors that name file and key.

It knows the form of a job file and nothing of what its values mean: the
checks are those of its sections; each becomes one sentence (`sentences.py`).
"""

from __future__ import annotations

import datetime
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from instep.errors import SpecError, file_beside
from instep.formats import FORMAT, other_format
from instep.job.data import PrepareSpec
from instep.job.overrides import RENAMED, apply_overrides, blamed
from instep.job.planned import is_planned, refuse_auto, without_auto
from instep.job.sentences import sentence
from instep.job.spec import JobSpec, as_table
from instep.job.toml_sections import tables_in
from instep.words import is_url

MOST_DEPTH = 32
"""Of lists and tables in each other."""


def load(
    path: Path,
    overrides: Iterable[str] = (),
    more: Iterable[str] = (),
    say: Callable[[str], object] | None = None,
    *,
    planned: bool = False,
) -> JobSpec:
    """Read a job file, apply `section.key=value` overrides, and check everything.

    Paths (of the recipe, of the model to start from) are relative to the job
    file, and absolute in the result.

    Args:
        path: of the file.
        overrides: of the job.
        more: of the job that those make, as if it had been in the file.
        say: told of each value that went away with an override; see `apply_overrides`.
        planned: whether the number of workers may be left to a plan; then they make one replica.

    Raises:
        SpecError: the file is missing or not TOML, or a key or value is
            wrong; the text says where, what was given and what is wanted.
    """
    table = read_table(path)
    typed = apply_overrides(table, overrides, say)
    for key, words in apply_overrides(table, more, say).items():
        typed[key] = words.removeprefix("--set ")
    if planned:
        table = without_auto(table)
    refuse_auto(table, str(path))
    return absolute(build(table, source=str(path), typed=typed), path.parent)


def asks_for_plan(path: Path, overrides: Iterable[str]) -> bool:
    """Read whether a job file, with these overrides, leaves the number of workers to a plan."""
    apply_overrides(table := read_table(path), overrides)
    return is_planned(table)


def absolute(job: JobSpec, folder: Path) -> JobSpec:
    """The same job with absolute paths; relative ones are relative to `folder`."""
    job = with_recipe_in(job, folder)
    start = job.start
    if start.model and not is_url(start.model):
        path = Path(_absolute(start.model, folder))
        if start.model.endswith(".json"):  # an index, which may be a link: its files are beside it
            path = Path(_absolute(str(Path(start.model).parent), folder)) / Path(start.model).name
        start = msgspec.structs.replace(start, model=str(path))
    cluster = job.cluster
    if cluster.workers:
        certificates = _absolute(cluster.certificates, folder)
        cluster = msgspec.structs.replace(cluster, certificates=certificates)
    prepare, checkpoint = _prepare_in(job.prepare, folder), job.checkpoint
    if checkpoint.copy_to and not is_url(checkpoint.copy_to):
        to = _absolute(checkpoint.copy_to, folder)
        checkpoint = msgspec.structs.replace(checkpoint, copy_to=to)
    data = job.data
    if data.cache and not data.cache.startswith("~"):  # else the home of each host
        data = msgspec.structs.replace(data, cache=_absolute(data.cache, folder))
    return msgspec.structs.replace(
        job, start=start, cluster=cluster, prepare=prepare, checkpoint=checkpoint, data=data
    )


def _prepare_in(prepare: PrepareSpec, folder: Path) -> PrepareSpec:
    """What to prepare, with absolute paths."""
    if not prepare.sources:
        return prepare
    functions = {}
    for name in ("map", "reduce"):
        if reference := getattr(prepare, name):
            file, colon, function = reference.rpartition(":")
            functions[name] = f"{_absolute(file, folder)}{colon}{function}" if colon else reference
    tokens = prepare.tokens
    return msgspec.structs.replace(
        prepare,
        sources=tuple(
            each if is_url(each) else str(folder.resolve() / Path(each).expanduser())
            for each in prepare.sources
        ),
        to=prepare.to if is_url(prepare.to) else _absolute(prepare.to, folder),
        tokens=_absolute(tokens, folder) if tokens not in ("", "bytes") else tokens,
        **functions,
    )


def with_recipe_in(job: JobSpec, folder: Path) -> JobSpec:
    """The same job with an absolute path of the recipe's file, and of where its imports are.

    `package.module:function` is looked up in `folder`, in `python_path`, and where this program
    finds its own modules.
    """
    file, _, function = job.recipe.rpartition(":")
    places = [_absolute(place, folder) for place in job.python_path]
    found = ""
    for place in (str(folder.resolve()), *places, *filter(None, sys.path)):
        if found := _module_in(place, file):
            places += [place] if place not in places else []
            break
    recipe = f"{found or _absolute(file, folder)}:{function}"
    return msgspec.structs.replace(job, recipe=recipe, python_path=tuple(places))


def _module_in(place: str, name: str) -> str:
    """The file of a module in a folder, if `name` is one of a module; else empty."""
    parts = name.split(".")
    if name.endswith(".py") or not all(part.isidentifier() for part in parts):
        return ""
    path = Path(place, *parts)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((str(file) for file in files if file.is_file()), "")


def _absolute(path: str, folder: Path) -> str:
    return str((folder / Path(path).expanduser()).resolve())


def read_table(path: Path, what: str = "job file") -> dict[str, Any]:
    """The raw tables of a TOML file; SpecError, with what it is, if it cannot be read.

    What an earlier instep has written (with a `format`) has the present keys.
    """
    try:
        table = tables_in(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise SpecError(
            f"there is no {what} {str(path)!r}. {file_beside(path, '*.toml')}"
        ) from None
    except UnicodeDecodeError:
        raise SpecError(f"{path} is not UTF-8 text: save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        if path.suffix == ".py" and what == "job file":
            raise SpecError(
                f"{path} is a Python file; a job file is a TOML file that names it. Write job.toml "
                f'with the line recipe = "{path.name}:recipe", and give that.'
            ) from None
        raise SpecError(f"{path} is not valid TOML: {error}.") from None
    except ValueError:  # Python's own limit
        raise SpecError(
            f"{path} has a number with too many digits: it needs to fit 64 bits."
        ) from None
    except RecursionError:
        raise SpecError(_too_deep(path)) from None
    except OSError as error:
        raise SpecError(f"{path} cannot be read: {error.strerror}. Give a {what}.") from None
    if not _is_within(table, MOST_DEPTH):
        raise SpecError(_too_deep(path))
    return with_present_keys(table) if "format" in table else table


def with_present_keys(table: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that an earlier instep wrote, with the keys that it had under another name.

    A run that it began can be read and resumed. What a user types is refused instead (`build`).
    """
    train, data = table.get("train"), table.get("data", {})
    if not (isinstance(train, Mapping) and isinstance(data, Mapping) and "shuffle" in train):
        return dict(table)
    kept = {key: value for key, value in train.items() if key != "shuffle"}
    order = "global" if train["shuffle"] else "dataset"
    return {**table, "train": kept, "data": {"order": order, **data}}


def _too_deep(path: Path) -> str:
    return f"{path} has lists or tables in each other that are more than {MOST_DEPTH} deep."


def _is_within(table: Mapping[str, Any], depth: int) -> bool:
    """Whether nothing in a table is deeper."""
    level: list[Any] = [table]
    for _ in range(depth):
        inner = (each.values() if isinstance(each, Mapping) else each for each in level)
        level = [e for each in inner for e in each if isinstance(e, Mapping | list)]
    return not level


def build(
    table: Mapping[str, Any], *, source: str, typed: Mapping[str, str] = MappingProxyType({})
) -> JobSpec:
    """Check raw tables and freeze them.

    Args:
        table: of a whole job.
        source: where it comes from, as errors name it.
        typed: what was laid over it (`apply_overrides`): named instead where that is wrong.

    Raises:
        SpecError: a key or value is wrong; the text says where, what was
            given and what is wanted.
    """
    try:
        return _checked(table, source)
    except SpecError as error:
        text = str(error).removeprefix(f"{source}: ")
        if text == str(error) or not (words := blamed(typed, text)):
            raise
        raise SpecError(f"{words}: {text}") from None


def _checked(table: Mapping[str, Any], source: str) -> JobSpec:
    check_format(table, source)
    _check_names(table, source)
    for place in _WITH_OPTIONS:
        _check_holds(table.get(place), place, source)
    for section, keys in table.items():
        for key, value in keys.items() if isinstance(keys, Mapping) else [("", keys)]:
            if isinstance(value, int):
                _check_holds(value, f"{section}.{key}".rstrip("."), source)
    _check_text(table, source)
    try:
        return msgspec.convert(table, JobSpec)
    except msgspec.ValidationError as failure:
        raise SpecError(f"{source}: {sentence(str(failure), table)}") from None


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
    for old, new in RENAMED.items():
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
            if not (isinstance(inner, str) and inner.isascii()):  # most are, and calls cost
                _check_text(inner, source)
    elif isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise SpecError(
                f"{source}: {value!a} cannot be written as UTF-8. Use another name."
            ) from None


_HOLDS = (str, bool, int, float, datetime.date, datetime.time)


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
