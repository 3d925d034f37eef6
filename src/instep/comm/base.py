"""What a group of ranks can do together, and what it promises.

A `Comm` is one rank's end of one group. It knows nothing of models, steps or strategies. There
are two implementations with the same promises: `torch_comm.py` for processes, and `memory.py` for
ranks as threads in fast tests.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Work(Protocol):
    """A collective or a message that has begun.

    Its tensors must not be used until `wait` has returned. If `wait` raised, tensors that it was
    to fill may contain anything, and the group cannot be used any more.
    """

    def wait(self) -> None:
        """Return when the result is here.

        Raises:
            PeerError: a member of the group was lost.
        """


class Comm(Protocol):
    """One rank's end of a group. Every rank calls the same collectives in the same order.

    Several may run at once, and be waited for in any order. Tensors are contiguous; those of one
    call have one dtype and device, and each rank passes the same sizes. Data that is moved and
    not summed arrives with the same bits. If a member is lost, the call itself or its `wait`
    raises `PeerError`.
    """

    @property
    def rank(self) -> int:
        """This rank's number in the group, from 0."""

    @property
    def size(self) -> int:
        """How many ranks the group has."""

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin to replace `tensor`, on every rank, by the sum over the ranks.

        Every rank then holds the same bits.
        """

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Work:
        """Begin to sum the r-th part over the ranks into `out` of rank r.

        On the CPU it is added up in rank order, starting from rank 0's part.

        Args:
            out: [n].
            parts: [size * n], of which rank r gets the r-th n; only read.
        """

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Begin to collect the `part` of every rank in `out`, in rank order.

        Args:
            out: [size * n].
            part: [n]; only read.
        """

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Begin to send the r-th part to rank r, and to collect in rank order what is sent here.

        Args:
            out: [size * n].
            parts: [size * n], of which rank r gets the r-th n; only read.
        """

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Replace `tensor`, on every rank, by that of rank `root`; returns when done."""

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send `tensor` to another rank, which calls `receive`; other ranks do nothing.

        Between two ranks messages arrive in the order in which they were sent. `wait` returns
        when the tensor may be changed again; it may not have arrived yet.
        """

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to replace `tensor` by the next one that rank `source` sends here."""

    def interrupt(self) -> None:
        """Make every `wait` raise, as if another rank were lost.

        For another thread than the one that waits. The group cannot be used any more.
        """

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
