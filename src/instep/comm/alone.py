"""A group of one rank: every collective is complete at once."""

from __future__ import annotations

from torch import Tensor


class AloneComm:
    """The promises of `base.Comm`, for a single rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: Tensor) -> AloneComm:
        """The sum over one rank is the tensor itself."""
        return self

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> AloneComm:
        """The only part."""
        out.copy_(parts)
        return self

    def all_gather(self, out: Tensor, part: Tensor) -> AloneComm:
        """The only part."""
        out.copy_(part)
        return self

    def all_to_all(self, out: Tensor, parts: Tensor) -> AloneComm:
        """The only part."""
        out.copy_(parts)
        return self

    def send(self, tensor: Tensor, to: int) -> AloneComm:
        """There is no other rank."""
        raise AssertionError(f"a group of one cannot send to rank {to}")

    def receive(self, tensor: Tensor, source: int) -> AloneComm:
        """There is no other rank."""
        raise AssertionError(f"a group of one cannot receive from rank {source}")

    def wait(self) -> None:
        """Everything is complete."""

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """There is no other rank."""

    def interrupt(self) -> None:
        """Nothing waits."""

    def close(self) -> None:
        """There is nothing to close."""
