"""A group whose collectives never fail when they are begun, only when they are waited for.

Where several ranks compute one pass together, none may leave it early: the others would wait for
it, and the pass could not be undone. So a group that breaks meanwhile is noticed after the pass.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from instep.comm.base import Comm, Work
from instep.errors import PeerError


class LateErrors:
    """Another view of a group.

    Args:
        comm: the group.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self.rank, self.size = comm.rank, comm.size

    def all_reduce(self, tensor: Tensor) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.all_reduce(tensor))

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.reduce_scatter(out, parts))

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.all_gather(out, part))

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.all_to_all(out, parts))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """As the group does; it is over when this returns, and so raises here."""
        self._comm.broadcast(tensor, root)

    def send(self, tensor: Tensor, to: int) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.send(tensor, to))

    def receive(self, tensor: Tensor, source: int) -> Work:
        """As the group does."""
        return _begun(lambda: self._comm.receive(tensor, source))

    def interrupt(self) -> None:
        """As the group does."""
        self._comm.interrupt()

    def close(self) -> None:
        """As the group does."""
        self._comm.close()


class _Failed:
    """A collective that could not be begun."""

    def __init__(self, error: PeerError) -> None:
        self._error = error

    def wait(self) -> None:
        """Raise why."""
        raise self._error


def _begun(begin: Callable[[], Work]) -> Work:
    try:
        return begin()
    except PeerError as error:
        return _Failed(error)
