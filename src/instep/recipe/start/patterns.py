"""Patterns of a job on the names of a model's parameters, and what a pattern in vain is answered.

Patterns are those of `fnmatch`, where `*` also matches dots; one that matches nothing is refused as
a mistake. What is done with the parameters is not known here. Way in: `names_of`, `matched_by`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from instep.errors import SpecError
from instep.words import listed

Names = Sequence[str]
"""Every name of one parameter; a tied one has several."""

_SHOWN = 8  # names in a message; a model may have thousands


def names_of(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Each parameter once, in the order of the model, with every name it has."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def matched_by(key: str, patterns: Iterable[str], named: Sequence[Names]) -> set[int]:
    """Numbers of the parameters that any pattern matches by any of their names.

    Args:
        key: of the job, such as `start.freeze`, for the message.
        patterns: its value.
        named: the names of each parameter.

    Raises:
        SpecError: a pattern matches none.
    """
    found: set[int] = set()
    for pattern in patterns:
        hits = {number for number, names in enumerate(named) if matches(pattern, names)}
        if not hits:
            raise matches_nothing(key, pattern, named)
        found |= hits
    return found


def matches(pattern: str, names: Names) -> bool:
    """Whether a pattern matches any of the names."""
    return any(fnmatchcase(name, pattern) for name in names)


def matches_nothing(key: str, pattern: str, named: Sequence[Names]) -> SpecError:
    """The error of a pattern that matches no parameter, with the closest one that would."""
    names = [name for each in named for name in each]
    parts = dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in names if "." in name)
    whole = dict.fromkeys(f"{name.partition('.')[0]}.*" for name in names if "." in name)
    known = list(dict.fromkeys([*whole, *parts, *names]))
    near = [p for p in known if p == f"{pattern}.*"] or get_close_matches(pattern, known, n=1)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    return SpecError(
        f"{key} has {pattern!r}, which matches no parameter of the model. {guess}"
        f"Known: {listed(names, _SHOWN)}."
    )
