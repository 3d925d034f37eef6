"""Parses the job files that runs have, of which most sections are the same in many runs.

A section whose text is known is not parsed again: of many jobs that are read one after the other,
most of the time is spent on that. It knows nothing of what is in them. Way in: `tables_in`.
"""

from __future__ import annotations

import re
import tomllib
from functools import lru_cache
from typing import Any

_HEADING = re.compile(r"^\[([a-z]+)\]$", re.MULTILINE)
_BRACKET = re.compile(r"^\s*\[", re.MULTILINE)


def tables_in(text: str) -> dict[str, Any]:
    """Parse TOML.

    Raises:
        ValueError: it is none.
    """
    first, *rest = _HEADING.split(text)
    names, pieces = rest[::2], rest[1::2]
    twice = len({*names}) < len(names)
    if not text.startswith("format = ") or twice or any(map(_BRACKET.search, [first, *pieces])):
        return tomllib.loads(text)
    try:
        found = _copied(_parsed(first))
        sections = {name: _copied(_parsed(each)) for name, each in zip(names, pieces, strict=True)}
    except ValueError:  # of the whole, it says in which line
        return tomllib.loads(text)
    if found.keys() & sections.keys():
        return tomllib.loads(text)
    return {**found, **sections}


@lru_cache(512)
def _parsed(text: str) -> dict[str, Any]:
    return tomllib.loads(text)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value
