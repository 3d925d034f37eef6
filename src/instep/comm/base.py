"""What a group of ranks can do together, and what it promises.

A `Comm` is one rank's end of one group. It knows nothing of models, steps or
strategies. Two stand behind it: `torch_comm.py` for processes, `memory.py`
for ranks as threads in fast tests; whatever holds on one holds on the other.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result is here.

        Raises:
            PeerError: a member of the group went away.
        """


class Comm(Protocol):
    """One rank's end of a group. Every rank calls the same collectives in the same order."""

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin to replace `tensor`, on every rank, by the sum over the ranks.

        The tensor must not be touched until `wait` returns. Every rank then
        holds the same bits. Several may be under way at once.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor`, on every rank, by that of rank `root`; returns when done."""

    def interrupt(self) -> None:
        """Have a collective that waits for other ranks raise, as if one of them were gone.

        For another thread than the one that waits. The group can do nothing more.
        """

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
