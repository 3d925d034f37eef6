"""From which commit a generation continues, given what its members hold: the rule, no tensors.

Every member calls it with the same table and comes to the same result. How the
state travels is the affair of `committed.py`.

A member may be *in doubt*: it had prepared a commit and voted for it, and a peer failed
before the vote came back. A vote comes back anywhere only if all had prepared. So if one
member has the commit, or all who were in that generation have prepared it, it happens;
else it can have happened nowhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from instep.errors import PeerError


class HeldCommit(NamedTuple):
    """What one member holds."""

    course: int
    number: int
    """The last commit, counted within the course; -1 where it holds no state of the run. The
    number of a step; or, where each has several turns, that of a turn."""
    prepared: int
    """The commit that it has voted for and does not know the outcome of; -1 where there is none."""
    generation: int
    """The newest generation that it was inside."""
    settled: int
    """Up to which commit it has done what follows one; -1 where it holds no state."""
    told: bool
    """Whether its last commit carried the request to stop."""
    ends: bool
    """Whether this start of the run ends with its last commit."""
    tried: int = -1
    """The newest generation that it has begun to form with the state that it holds."""
    start_in_doubt: int = -1
    """The generation for which it has laid out what it alone remembers, knows that all others
    have too, and does not know whether they know; -1 where there is none."""


NOWHERE = HeldCommit(-1, -1, -1, -1, -1, told=False, ends=False)
"""A member that is new to the run."""


class Beginning(NamedTuple):
    """From where all members continue."""

    course: int
    number: int
    """The highest commit that one of them has, or that those in doubt now apply."""
    root: int
    """The lowest rank that holds it, and gives it to the others."""
    holders: tuple[int, ...]
    """The ranks that hold it, in their order."""
    shared: bool
    """Whether some member lacks it."""
    told: bool
    ends: bool
    settled: int
    """Up to which commit nothing that follows one has to be done again."""
    generation: int
    """The newest that one of them was inside, or may have been."""

    def within_column(self, rank: int, members: int, ranks: int) -> Beginning:
        """The same, by ranks of those that have one place in their replicas.

        Args:
            rank: of this member.
            members: of the generation.
            ranks: of a replica.

        Raises:
            PeerError: no member holds this part of the model.
        """
        if ranks == 1:
            return self
        own = [holder // ranks for holder in self.holders if (holder - rank) % ranks == 0]
        if not own:
            raise PeerError("no member holds this part of the model.")
        return self._replace(root=own[0], shared=len(own) < members // ranks)


def beginning(places: Sequence[HeldCommit]) -> Beginning:
    """From which commit a generation continues.

    Args:
        places: of its members, in rank order.

    Raises:
        PeerError: no member holds the state of the run.
    """
    course, newest = max(place[:2] for place in places)
    if newest < 0:
        raise PeerError("no member of the group holds the state of the run.")
    held = [place for place in places if place.number >= 0]
    latest = max(place.generation for place in held)
    inside = [place for place in held if place.generation == latest]
    if all(place.prepared == newest + 1 and place.course == course for place in inside):
        newest += 1  # none can have abandoned it, and one that is gone may have committed it
    tried = max(place.tried for place in held)
    begun = all(place.start_in_doubt == tried for place in held if place.tried == tried)
    holders = tuple(
        rank
        for rank, p in enumerate(places)
        if p.course == course
        and (p.number == newest or (p.prepared == newest and p.generation == latest))
    )
    there = [places[rank] for rank in holders]
    # the lowest rank saves and reports; if it is new, how far it had come is not known
    new = places[0].number < 0
    settled = newest - 1 if new else min(p.settled for p in places if p.number >= 0)
    return Beginning(
        course=course,
        number=newest,
        root=holders[0],
        holders=holders,
        shared=len(there) < len(places),
        told=any(place.told for place in there if place.number == newest),
        ends=any(place.ends for place in there if place.number == newest),
        settled=min(settled, newest),
        generation=tried if begun and tried > latest else latest,
    )
