"""Where a generation goes on, out of where its members stand: the rule, without any tensor.

Every member calls it with the same table and comes to the same result. How the
state travels is the affair of `standing.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instep.errors import PeerError


class Place(NamedTuple):
    """Where one member stands."""

    step: int
    """The last that it has committed; -1 where it holds no state of the run."""
    settled: int
    """Up to which step it has done what follows a commit; -1 where it holds no state."""
    told: bool
    """Whether the word to stop came with its last commit."""
    ends: bool
    """Whether it takes its last commit for the end of this start of the run."""


NOWHERE = Place(-1, -1, told=False, ends=False)
"""A member that is new to the run."""


class Beginning(NamedTuple):
    """Where all members go on."""

    step: int
    """The highest that one of them has committed."""
    root: int
    """The lowest rank that holds it, and gives it to the others."""
    shared: bool
    """Whether some member lacks it."""
    told: bool
    ends: bool
    settled: int
    """Up to which step nobody has to do again what follows a commit."""


def beginning(places: Sequence[Place]) -> Beginning:
    """Where a generation goes on.

    Args:
        places: of its members, in rank order.

    Raises:
        PeerError: no member holds the state of the run.
    """
    newest = max(place.step for place in places)
    if newest < 0:
        raise PeerError("nobody in the group holds the state of the run.")
    there = [place for place in places if place.step == newest]
    # the lowest rank saves and reports; if it is new, nobody knows how far it had come
    new = places[0].step < 0
    settled = newest - 1 if new else min(p.settled for p in places if p.step >= 0)
    return Beginning(
        step=newest,
        root=places.index(there[0]),
        shared=any(place.step < newest for place in places),
        told=any(place.told for place in there),  # a word that one has heard counts for all
        ends=any(place.ends for place in there),
        settled=settled,
    )
