"""A group on the CPU for tensors of a GPU, which travel by way of host memory.

Where some ranks compute on GPUs and others do not, all of them sum on the CPU. A call copies what
it reads to host memory, and `wait` copies back what came. Way in: `StagedComm`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.comm.base import Comm, Work


class StagedComm:
    """Another view of a group, for one of its ranks.

    Args:
        comm: the group; its tensors are on the CPU.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._comm.rank

    @property
    def size(self) -> int:
        """Processes of the group."""
        return self._comm.size

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin a sum over the ranks."""
        here = _copied(tensor)
        return _CopiedBack(self._comm.all_reduce(here), tensor, here)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Work:
        """Begin a sum of this rank's part."""
        here = _room(out)
        return _CopiedBack(self._comm.reduce_scatter(here, _copied(parts)), out, here)

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Begin to collect the ranks' parts."""
        here = _room(out)
        return _CopiedBack(self._comm.all_gather(here, _copied(part)), out, here)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Begin to collect the parts for this rank."""
        here = _room(out)
        return _CopiedBack(self._comm.all_to_all(here, _copied(parts)), out, here)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy rank `root`'s tensor to every rank."""
        here = _copied(tensor)
        self._comm.broadcast(here, root)
        if self.rank != root:
            tensor.detach().copy_(here)

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send to one rank."""
        return self._comm.send(_copied(tensor), to)

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to receive from one rank."""
        here = _room(tensor)
        return _CopiedBack(self._comm.receive(here, source), tensor, here)

    def interrupt(self) -> None:
        """Make every `wait` raise."""
        self._comm.interrupt()

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        self._comm.close()


class _CopiedBack:
    """A call whose result is in host memory first."""

    def __init__(self, work: Work, out: Tensor, here: Tensor) -> None:
        self._work, self._out = work, out
        self._here: Tensor | None = here

    def wait(self) -> None:
        """Return when the result is here."""
        self._work.wait()
        if self._here is not None:  # later the tensor is its owner's again
            self._out.detach().copy_(self._here)
            self._here = None


def _room(tensor: Tensor) -> Tensor:
    """Reserve as much host memory."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _copied(tensor: Tensor) -> Tensor:
    """Copy its values to host memory, once the GPU has computed them."""
    return _room(tensor).copy_(tensor.detach())
