"""Writes `docs/reference/job-file.md` from the fields of `instep.spec`.

    python docs/make_reference.py            write the page
    python docs/make_reference.py --check    exit 1 if the page is not what would be written

It knows nothing of what a key does: names, types, defaults and texts are
those of the spec, so the page cannot say anything else than the code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from instep.spec import JobSpec

PAGE = Path(__file__).resolve().parent / "reference" / "job-file.md"

_OPENING = """# Job file

A job file is TOML. Every key there is stands below; only `recipe` is required.
An unknown key, a wrong type or an impossible value is refused before anything
starts, with the file, the key, what was given and what is wanted. All paths
are relative to the job file.

`--set section.key=value` lays a value over the file, for example
`--set train.epochs=3`. The run folder holds the job as run, with every key
given, in `job.toml`.

This page is written by `docs/make_reference.py` from `src/instep/spec.py`;
change the texts there.
"""

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def page() -> str:
    """The whole page."""
    sections = {n: f for n, f in JobSpec.model_fields.items() if _is_section(f.annotation)}
    plain = {n: f for n, f in JobSpec.model_fields.items() if n not in sections}
    tables = {n: f for n, f in plain.items() if get_origin(f.annotation) is dict}
    keys = {n: f for n, f in plain.items() if n not in tables}
    parts = [_OPENING, "## At the top\n", _text(JobSpec), "", *_table(keys), ""]
    for name, field in sections.items():
        section: Any = field.annotation
        parts += [f"## [{name}]\n", _text(section), "", *_table(section.model_fields), ""]
    for name, field in tables.items():
        parts += [f"## [{name}]\n", f"{field.description} Any keys; what they mean is the recipe's."]
    return "\n".join(parts).rstrip() + "\n"


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _text(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _table(fields: dict[str, FieldInfo]) -> Iterator[str]:
    yield "| key | value | default | what it says |"
    yield "|---|---|---|---|"
    for name, field in fields.items():
        text = " ".join((field.description or "").split()).replace("|", "\\|")
        yield f"| `{name}` | {_kind(field)} | {_default(field)} | {text} |"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None:
        return "not set"
    return f"`{str(value).lower() if isinstance(value, bool) else _toml(value)}`"


def _toml(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _kind(field: FieldInfo) -> str:
    return ", ".join(dict.fromkeys(_words(field.annotation, list(field.metadata))))


def _words(annotation: Any, metadata: list[Any]) -> Iterator[str]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(inner[0], [*metadata, *inner[1:]])
    elif origin in (Union, UnionType):
        for part in inner:
            if part is not type(None):
                yield from _words(part, metadata)
    elif origin is Literal:
        yield from (f"`{_toml(value)}`" for value in inner)
    elif origin is dict:
        yield "table"
    else:
        yield _WORDS[annotation] + _limits(metadata)


def _limits(metadata: list[Any]) -> str:
    found = re.findall(r"\b(ge|gt)=([0-9.]+)", repr(metadata))
    words = {"ge": "from", "gt": "above"}
    return "".join(f" {words[rule]} {limit}" for rule, limit in found)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; returns the exit code."""
    wanted = page()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{PAGE} is not what src/instep/spec.py says: run python {sys.argv[0]}.")
        return 1
    if arguments:
        print(__doc__)
        return 2
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
