"""Participants' own samples, one participant after the other in a range of positions.

Participant p has the region [offset, offset + size) of `0..samples-1`. In each epoch of its own,
its samples stand there in an order of its own. So a slice of an epoch says all: whose samples,
and which. Loaders and ledgers know no participants. Ways in: `Regions`, and `HomeRegions` for a
worker that reads nothing of other hosts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import numpy as np

from instep.data.order import AnyOrder, Indices, Order, key
from instep.data.shard_sizes import Lot, lot_of
from instep.errors import DataError

_OF_OWN_ORDER = 12
"""What a key is drawn for: the order of a participant's samples."""

_TRIED = 4096
"""Samples of this host of which what is tried is taken."""


def offsets_of(sizes: Indices) -> Indices:
    """Where each region begins, and where the last ends: [participants + 1] int64."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


class Regions:
    """The keyed permutations of participants that have data of their own; an order of samples.

    Args:
        shares: the samples of each participant, as a `Scheme` gives them.
        seed: of the job.
        shuffle: whether a participant's samples have another order in each epoch, or stand as in
            `shares`.
        order_of: makes the order of a share of these samples, with a seed; the keyed permutation
            if None.
    """

    def __init__(
        self,
        shares: Sequence[Indices | range],
        seed: int,
        *,
        shuffle: bool = True,
        order_of: Callable[[Indices | range, int], AnyOrder] | None = None,
    ) -> None:
        self.sizes: Indices = np.array([len(share) for share in shares], np.int64)
        """Samples of each participant."""
        self.offsets = offsets_of(self.sizes)
        """Where each region begins, and where the last ends."""
        self.samples = int(self.offsets[-1])
        self._shares, self._seed, self._shuffle = list(shares), seed, shuffle
        self._order_of = order_of
        self._orders: dict[int, AnyOrder] = {}

    @property
    def digest(self) -> int:
        """Of all that is known about who has what, 32 bits."""
        crc = zlib.crc32(self.sizes.astype("<i8").tobytes())
        for share in self._shares:
            told = [share.start, share.stop] if isinstance(share, range) else share
            crc = zlib.crc32(np.asarray(told, "<i8").tobytes(), crc)
        for number in range(len(self._shares) if self._order_of else 0):
            crc = zlib.crc32(repr(getattr(self._order(number), "digest", 0)).encode(), crc)
        return crc

    def lots(self, sizes: Indices) -> list[Lot]:
        """Where the samples of each participant stand, in shards of these sizes."""
        return [lot_of(sizes, share) for share in self._shares]

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop), each region in its order of this epoch.

        Returns:
            [stop - first] int64. Over a whole region every sample of its participant occurs once.
        """
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        parts, number = [], int(np.searchsorted(self.offsets, first, side="right")) - 1
        while first < stop:
            begin, end = int(self.offsets[number]), int(self.offsets[number + 1])
            until = min(stop, end)
            if first < until:
                parts.append(self._of_one(number, epoch, first - begin, until - begin))
            first, number = until, number + 1
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def _of_one(self, number: int, epoch: int, first: int, stop: int) -> Indices:
        share = self._shares[number]
        if not self._shuffle:
            return np.asarray(share[first:stop], np.int64)
        places = self._order(number).indices(epoch, first, stop)
        return places + share.start if isinstance(share, range) else share[places]

    def _order(self, number: int) -> AnyOrder:
        if number not in self._orders:
            share, own = self._shares[number], key(self._seed, _OF_OWN_ORDER, number)
            make = self._order_of
            self._orders[number] = make(share, own) if make else Order(len(share), own)
        return self._orders[number]


class HomeRegions:
    """Regions for a worker that reads nothing of other hosts, also before it trains.

    A loader is measured, and a model is tried, with samples at positions from 0. Here these are of
    participants of this host, over and over. What is trained on stands behind them, as far as the
    regions are long.

    Args:
        regions: of all participants.
        home: positions in them that lie here; none where nothing does.
    """

    def __init__(self, regions: Regions, home: range) -> None:
        self._regions, self.home = regions, home[:_TRIED]
        self.samples = regions.samples

    def behind(self, position: int) -> int:
        """Where a position of the regions stands here."""
        return position + self.samples

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop).

        Raises:
            DataError: what is tried is asked for, and nothing lies here.
        """
        if first >= self.samples:
            return self._regions.indices(epoch, first - self.samples, stop - self.samples)
        if not self.home:
            raise DataError("no participant has its data on this host, so nothing can be tried.")
        whole = self._regions.indices(epoch, self.home.start, self.home.stop)
        return whole[np.arange(first, stop) % len(self.home)]
