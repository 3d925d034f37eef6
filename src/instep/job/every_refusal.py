"""All that is wrong with a job's tables at once, and the job without what is wrong.

The checks of a job raise the first thing that they find. Here the keys that an error names are
taken out of the tables, so that they have their defaults, and the tables are checked again. What is
said only because of a key that was taken out is left out. Ways in: `load_all`, `every_refusal`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from instep.errors import SpecError
from instep.job.file import absolute, build, read_table
from instep.job.overrides import apply_overrides
from instep.job.planned import without_auto
from instep.job.spec import JobSpec

MOST = 64
"""Refusals that are looked for: each takes a key out, or ends the search."""

NO_RECIPE = "missing.py:recipe"
"""The recipe of a job that has none."""

Tables = dict[str, Any]


class CheckedTables(NamedTuple):
    """A job, as far as there is one, and why it is refused."""

    job: JobSpec | None
    """Without the keys that are wrong; None where nothing is left of it."""
    errors: list[SpecError]
    """In the order in which `build` would raise them."""
    left_out: frozenset[str]
    """Full names of the keys that are wrong."""

    @property
    def has_recipe(self) -> bool:
        """Whether the job names its recipe."""
        return self.job is not None and "recipe" not in self.left_out


def load_all(
    path: Path, overrides: Iterable[str] = (), say: Callable[[str], object] | None = None
) -> CheckedTables:
    """Read a job file as `file.load` does, and return all that is wrong with it.

    Args:
        path, overrides, say: as for `file.load`.

    Raises:
        SpecError: there is no such file, it is no TOML, or an override has no such form.
    """
    table = read_table(path)
    typed = apply_overrides(table, overrides, say)
    table = without_auto(table)
    found = every_refusal(table, source=str(path), typed=typed)
    job = absolute(found.job, path.parent) if found.job is not None else None
    return found._replace(job=job)


def every_refusal(
    table: Mapping[str, Any], *, source: str, typed: Mapping[str, str] | None = None
) -> CheckedTables:
    """Check raw tables, and return all that is wrong with them.

    Args:
        table, source, typed: as for `file.build`; `table` is left as it is.
    """
    left: Tables = copy.deepcopy(dict(table))
    errors: list[SpecError] = []
    out: set[str] = set()
    for _ in range(MOST):
        job, error, text = _tried(left, source, typed or {})
        if error is None:
            return CheckedTables(job, errors, frozenset(out))
        named = [*_named(text, left)]
        if not out.intersection(names_in(text)):
            errors.append(error)
        smaller = next((each for each in _without(left, named) if _helps(each, source, text)), None)
        if smaller is None:
            break
        left, names = smaller
        out.update(names)
    return CheckedTables(None, errors, frozenset(out))


def _tried(
    table: Tables, source: str, typed: Mapping[str, str]
) -> tuple[JobSpec | None, SpecError | None, str]:
    """The job of some tables; or the error as it is told, and its text alone."""
    try:
        return build(table, source=source), None, ""
    except SpecError as plain:
        text = str(plain).removeprefix(f"{source}: ")
        try:
            build(table, source=source, typed=typed)
        except SpecError as told:
            return None, told, text
        raise


def names_in(text: str) -> Iterator[str]:
    """The keys that an error is about, with their sections, whether they are in the tables or not.

    They stand in its first sentence: as `train.steps`, as any word after `[train]`, or as a word
    before ` =`.
    """
    first = text.partition(". ")[0]
    if (section := re.match(r"\[(\w+)\] ", first)) is not None:
        yield from (f"{section[1]}.{word}" for word in re.findall(r"[A-Za-z_]\w*", first))
        return
    yield from re.findall(r"[A-Za-z_]\w*(?:\.\w+)+|[A-Za-z_]\w*(?= =)", first)
    yield from re.findall(r"no key '([^']*)'", first)


def _named(text: str, table: Tables) -> Iterator[str]:
    """Those of them that the tables have: longer names first of what begins alike, then the whole
    section that the error names."""
    found = dict.fromkeys(name for name in names_in(text) if _has(table, name))
    for name in found:
        if not any(other.startswith(f"{name}.") for other in found):
            yield name
    yield from (name for name in found if any(other.startswith(f"{name}.") for other in found))
    yield from (each for each in re.findall(r"\[(\w+)\]", text) if each in table)
    if "the key 'recipe' is missing" in text:
        yield "recipe"


def _has(table: Tables, name: str) -> bool:
    inner: Any = table
    for part in name.split("."):
        if not isinstance(inner, Mapping) or part not in inner:
            return False
        inner = inner[part]
    return True


def _without(table: Tables, named: Iterable[str]) -> Iterator[tuple[Tables, list[str]]]:
    """The tables without each of some keys, one at a time; then without all of them."""
    names = list(named)
    for some in [*([name] for name in names), names]:
        smaller = copy.deepcopy(table)
        for name in some:
            _take(smaller, name)
        if smaller != table:
            yield smaller, some


def _take(table: Tables, name: str) -> None:
    *sections, key = name.split(".")
    inner: Any = table
    for section in sections:
        inner = inner.get(section)
        if not isinstance(inner, dict):
            return
    inner.pop(key, None)
    if name == "recipe":
        inner["recipe"] = NO_RECIPE


def _helps(smaller: tuple[Tables, list[str]], source: str, text: str) -> bool:
    """Whether the same is not wrong any more: no error, or one that is about something else."""
    _, error, other = _tried(smaller[0], source, {})
    return error is None or _kind(other) != _kind(text)


def _kind(text: str) -> str:
    """An error's first sentence without its values, so that it is known with others."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", text.partition(". ")[0])
