"""The sum of one fragment over participants, with what its codec leaves out.

When a fragment agrees, and what becomes of the sum, `streaming.py` knows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec
from instep.comm.codecs.none import Identity
from instep.sync.rounds.carried import SUM, Carried, CarriedPiece, Move, within
from instep.sync.rounds.exchange import RoundExchange
from instep.sync.rounds.segments import Segments
from instep.sync.rounds.spread import Contribution


class Agreed(NamedTuple):
    """A fragment has agreed, and that is not committed yet."""

    commit: int
    """Whose local models."""
    mean: Tensor
    """Of how far participants are from the shared values, backwards."""
    left: Mapping[CarriedPiece, Tensor]
    """What the codec left out, that this rank is to hold."""
    made: Collection[int]
    """All that leave something out, on any rank."""
    ways: Mapping[int, Tensor]
    """By participant of this rank: how far it is."""


def given_by(
    given: Mapping[int, Contribution], fragments: Mapping[int, Agreed], shares: Tensor
) -> list[Contribution]:
    """Return what participants gave, with how far they are in fragments that have agreed.

    Args:
        given: by participants that computed in this commit.
        fragments: by number.
        shares: [participants], the weights of the others.
    """
    ways: dict[int, list[tuple[int, Tensor]]] = {of: [] for of in given}
    for fragment, agreed in fragments.items():
        for of, way in agreed.ways.items():
            ways.setdefault(of, []).append((fragment, way))
    every = {of: given.get(of) or Contribution(of, float(shares[of]), []) for of in ways}
    return [every[of]._replace(way=parts) for of, parts in ways.items()]


class FragmentSum:
    """The encoded sum of one fragment.

    Args:
        codec, segments, comm, owners, device: as for `RoundExchange`.
        carried: has what was left out before.
        fragment: its number.
    """

    def __init__(
        self,
        codec: Codec,
        segments: Segments,
        comm: Comm,
        owners: Sequence[int],
        device: torch.device,
        carried: Carried,
        fragment: int,
    ) -> None:
        stretch = segments.fragments[fragment]
        self._exchange = RoundExchange(codec, segments, comm, owners, device, stretch)
        self._lossy = not isinstance(codec, Identity)
        self._rank, self._device = comm.rank, device
        self._carried, self._fragment = carried, fragment

    @torch.no_grad()
    def agree(
        self,
        commit: int,
        number: int,
        ways: Mapping[int, Tensor],
        gives: Sequence[Collection[int]],
        holds: Sequence[Sequence[CarriedPiece]],
        shares: Tensor,
    ) -> Agreed:
        """Sum up how far participants are from the shared values; every rank calls it.

        Args:
            commit: whose local models.
            number: of the commit that is being made.
            ways: by participant of this rank; one without has nothing that counts.
            gives: by rank, its participants.
            holds: by rank, what it has.
            shares: [participants], their weights.

        Raises:
            PeerError: a rank went away.
        """
        exchange, carried = self._exchange, self._carried
        places = dict.fromkeys(gives[self._rank], (exchange.begin, exchange.end))
        if exchange.own[1] > exchange.own[0]:
            places[SUM] = exchange.own
        given = {
            of: torch.zeros(end - begin, dtype=torch.float32, device=self._device)
            for of, (begin, end) in places.items()
        }
        left: dict[int, Tensor | None] = dict.fromkeys(given)
        pieces: dict[CarriedPiece, Tensor] = {}
        made: list[int] = []
        if self._lossy:
            names = {of: within(of, self._fragment) for ranks in (*gives, [SUM]) for of in ranks}
            of_name, made = {name: of for of, name in names.items()}, list(names.values())
            known = {of: (n, carried.made[n]) for of, n in names.items() if n in carried.made}

            def place(move: Move) -> Tensor:
                of = of_name[move.of.of]
                return given[of][move.within(places[of][0])]

            carried.bring(list(exchange.moves(gives, holds, known)), place)
            for of, stretch in places.items():
                room = left[of] = torch.empty_like(given[of])
                pieces[CarriedPiece(names[of], *stretch, number)] = room
        for of, way in ways.items():
            given[of].add_(way * float(shares[of]))  # rounded as `Coded` does
        mean = exchange.gather(exchange.add_up(given, left, gives, number=commit))
        return Agreed(commit, mean, pieces, made, ways)


def left_out(carried: Carried, participants: int, fragments: Sequence[int]) -> dict[int, list[int]]:
    """Names in pieces of what participants and `SUM` have left out of fragments."""
    found = {of: [within(of, f) for f in fragments] for of in range(SUM, participants)}
    return {of: names for of, names in found.items() if any(each in carried.made for each in names)}


def places_left_out(carried: Carried, segments: Segments, of: int) -> Iterator[CarriedPiece]:
    """Pieces of what a participant or `SUM` has left out, one for each fragment."""
    for fragment, stretch in enumerate(segments.fragments):
        name = within(of, fragment)
        yield CarriedPiece(name, *stretch, carried.made.get(name, 0))
