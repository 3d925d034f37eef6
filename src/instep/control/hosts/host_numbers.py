"""The numbers of a run's hosts: which it has, and which are to go. It knows no connections."""

from __future__ import annotations

from collections.abc import Collection, Mapping


class HostNumbers:
    """The hosts of a run by number, whether they are connected or not.

    Args:
        count: how many it has from the start, numbered from 0; 0 where all is on this machine.
        servers: those for parameter servers alone.
    """

    def __init__(self, count: int, servers: Collection[int]) -> None:
        self.all = set(range(max(1, count)))
        """Those of the run, without those that have left."""
        self.servers = frozenset(servers)
        self.draining: frozenset[int] = frozenset()
        """Those whose machines are about to go."""
        self.places: Mapping[int, int] | None = None
        """Workers that there is room for on each; None: any number, anywhere."""
        self._count = count
        self._retired: set[int] = set()  # also those that have left
        self._given_back: set[int] = set()

    @property
    def due(self) -> set[int]:
        """Those that are to be connected: not those that left or were given back."""
        if self.places is not None:
            return {n for n in self.all - self._retired if self.places.get(n)}
        return self.all - self._retired - self._given_back

    @property
    def going(self) -> set[int]:
        """Those on which nothing is to be started any more."""
        return self._retired | self.draining

    def add(self, numbers: Collection[int]) -> None:
        """The run has these hosts too, once they have connected."""
        self.all |= set(numbers)

    def retire(self, numbers: Collection[int]) -> None:
        """No further worker starts on these, and they are not missed."""
        self._retired |= set(numbers)

    def remove(self, numbers: Collection[int]) -> None:
        """These are no longer part of the run."""
        self.retire(numbers)
        self.all -= set(numbers)

    def has_left(self, number: int) -> bool:
        """Whether a host was removed."""
        return number in self._retired and number not in self.all

    def drain(self, numbers: Collection[int]) -> None:
        """The machines of these hosts, and of no others, are about to go.

        Unlike retired hosts, these may start again, on other machines; the run keeps its number of
        workers.
        """
        self.draining = frozenset(numbers)

    def place(self, places: Mapping[int, int]) -> None:
        """Allow no more workers than this on each; those without room are about to go."""
        self.places = places
        self.drain([n for n in self.all if not places.get(n)])

    def give_back(self, number: int) -> None:
        """The run does without a host, until it is taken again or comes back."""
        self._given_back.add(number)

    def come_back(self, number: int) -> None:
        """A host has connected, also if it was given back."""
        self._given_back.discard(number)

    def take_again(self, workers: int) -> None:
        """Have a host for each worker, if so many were given back; they are missing then."""
        most = self._count - len(self.servers)
        while self._given_back and most - len(self._given_back) < workers:
            self._given_back.remove(min(self._given_back))
