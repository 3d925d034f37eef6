"""A secure sum of members that lie on the ranks of a group, several on one perhaps.

Masks between two members of one rank would cancel before anything leaves it, and are left out.
Every rank adds up: what it sends is the masked sum of its own members. A rank that is lost ends the
sum, so nobody has to be done without, and it takes the shares of all members to open it: no rank
that has many of them, nor several that work together, opens what the others send. Where all members
have a part in a sum, which is known before it, masks between pairs are enough, and there is nothing
to open. Ways in: `SumOverRanks`, and `sum_of_all` for such a sum.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch

from instep.comm.base import Comm
from instep.errors import WorkerError
from instep.privacy.secure.masks import Mask
from instep.privacy.secure.members import (
    KEYS_BYTES,
    SEALED_BYTES,
    SumKeys,
    SumMember,
    check_enough,
)
from instep.privacy.secure.opening import masks_left
from instep.privacy.secure.shamir import SHARE_BYTES


def sum_of_all(
    comm: Comm, members: Sequence[int], here: Collection[int], *, least: int, context: bytes
) -> list[Mask]:
    """Masks to apply to the sum of this rank's parts, of a sum in which each member has one.

    Args:
        comm, members, here, least, context: as for `SumOverRanks`; every rank calls it.

    Raises:
        WorkerError: members are too few, or lie on no rank.
        PeerError: a rank went away.
    """
    check_enough(len(members), least, "are in it")
    own = {each: SumMember(each, context, least) for each in sorted(here)}
    keys = _keys_of_all(comm, members, own)
    return [
        mask
        for each, of in own.items()
        for other, mask in sorted(of.pairs(keys).items())
        if other not in own
    ]


class SumOverRanks:
    """One secure sum, from the keys of its members to its opening; every rank makes it.

    Args:
        comm: the ranks.
        members: numbers of all members, in order; the same on every rank.
        here: those that lie on this rank.
        least, context: as for `SumMember`.

    Raises:
        WorkerError: members are too few, or lie on no rank.
        PeerError: a rank went away.
    """

    def __init__(
        self,
        comm: Comm,
        members: Sequence[int],
        here: Collection[int],
        *,
        least: int,
        context: bytes,
    ) -> None:
        self._comm, self._least, self._context = comm, least, context
        self._members = list(members)
        check_enough(len(members), least, "are in it")
        every = len(members)
        self._here = {each: SumMember(each, context, least, every) for each in sorted(here)}
        self._keys = _keys_of_all(comm, members, self._here)
        sent = self._rows({n: of.shares(self._keys) for n, of in self._here.items()}, SEALED_BYTES)
        self._masks = {
            each: of.masks({other: sent[other][each] for other in members if other != each})
            for each, of in self._here.items()
        }
        self._left: list[Mask] = []

    def masks(self, giving: Collection[int]) -> list[Mask]:
        """Masks to apply to the sum of this rank's parts, before it leaves the process.

        Args:
            giving: members of this rank that have a part in it.
        """
        found = []
        for member in sorted(giving):
            of = self._masks[member]
            found += [mask for other, mask in sorted(of.items()) if other not in giving]
            found.append(of[member])
        return found

    def open(self, come: Collection[int]) -> None:
        """All masked parts are in the sum: ask the members for what opens it; every rank calls it.

        Args:
            come: members that have a part in it, on any rank.

        Raises:
            WorkerError: they are too few, or an answer is wrong.
            PeerError: a rank went away.
        """
        given = {each: of.answer(come) for each, of in self._here.items()}
        answers = self._rows(given, SHARE_BYTES)
        self._left = masks_left(
            self._keys,
            self._members,
            come,
            answers,
            least=self._least,
            context=self._context,
            needed=len(self._members),
        )

    @property
    def left(self) -> list[Mask]:
        """Masks to apply to the sum over the ranks, once it is open."""
        assert self._left, "open() comes first"
        return self._left

    # ---- messages

    def _rows(
        self, given: Mapping[int, Mapping[int, bytes]], width: int
    ) -> dict[int, dict[int, bytes]]:
        """By member, what it tells each: [width] bytes; nothing is zeros."""
        packed = {
            of: b"".join(each.get(other, bytes(width)) for other in self._members)
            for of, each in given.items()
        }
        told = _table(self._comm, self._members, packed, width * len(self._members))
        return {
            of: {
                other: row[at * width : (at + 1) * width] for at, other in enumerate(self._members)
            }
            for of, row in told.items()
        }


def _keys_of_all(
    comm: Comm, members: Sequence[int], here: Mapping[int, SumMember]
) -> dict[int, SumKeys]:
    """The public keys of all members.

    Raises:
        WorkerError: some lie on no rank.
    """
    told = _table(comm, members, {n: of.keys().packed() for n, of in here.items()}, KEYS_BYTES)
    if missing := [each for each in members if not any(told[each])]:
        raise WorkerError(f"participants {missing} of a secure sum are on no worker.")
    return {each: SumKeys.unpacked(told[each]) for each in members}


def _table(
    comm: Comm, members: Sequence[int], rows: Mapping[int, bytes], width: int
) -> dict[int, bytes]:
    """Bytes that the rank of each member has told of it, [width], by member."""
    places = {member: place for place, member in enumerate(members)}
    table = np.zeros((len(places), -(-width // 4) * 4), np.uint8)
    for member, row in rows.items():
        table[places[member], :width] = np.frombuffer(row, np.uint8)
    shared = torch.from_numpy(table.view(np.int32))
    comm.all_reduce(shared).wait()
    found = shared.numpy().view(np.uint8)
    return {member: found[place, :width].tobytes() for member, place in places.items()}
