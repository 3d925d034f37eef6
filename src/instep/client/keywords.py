"""The keywords of `instep.train`, `instep.resume` and `instep.join` that are tables of a job.

`epochs=1` is the first thing that people type who know other libraries; the answer is the line to
type instead. Way in: `tables`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from instep.errors import SpecError, near_miss
from instep.job.overrides import RENAMED
from instep.job.sentences import every_key, keys_by_name


def tables(call: str, own: Collection[str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Check that each keyword is a key of a job or a table of it, and copy the tables.

    Args:
        call: whose keywords they are, such as `instep.train`, for the message.
        own: its own keywords.
        given: the others.

    Raises:
        SpecError: one is no key of a job; the text says what to type.
    """
    top = {key.partition(".")[0] for key in every_key()}
    for name, value in given.items():
        if name not in top:
            raise SpecError(_instead(call, {*own, *top}, name, value))
    return {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in given.items()
    }


def _instead(call: str, known: Collection[str], name: str, value: Any) -> str:
    """That there is no such keyword, and what to type."""
    shown = repr(value) if len(repr(value)) <= 40 else "..."
    former = next((old for old in RENAMED if old.rpartition(".")[2] == name), "")
    if former:
        return f"{call} has no argument {name!r}: {former} is now called {RENAMED[former]}"
    home = keys_by_name().get(name, "")
    if not home and not get_close_matches(name, known, n=1, cutoff=0.6):
        close = get_close_matches(name, keys_by_name(), n=1, cutoff=0.75)
        home = keys_by_name()[close[0]] if close else ""
    section, _, key = home.rpartition(".")
    wrong = f"{call} has no argument {name!r}."
    if not home:
        return f"{wrong} {near_miss(name, known)}"
    if not section:
        return f"{wrong} Did you mean {call}(..., {key}={shown})?"
    takes = " if the recipe function takes it" if section == "arguments" else ""
    typed = f"{call}(..., {section}={{{key!r}: {shown}}})"
    return f"{wrong} It belongs into {section!r}{takes}: {typed}."
