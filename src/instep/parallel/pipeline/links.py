"""Messages between the stages of a pipeline, over a process group of torch.

Sends are never waited for before the end of a batch, so ranks cannot wait for each other in a
circle. A message between two stages of one rank is a reference. Blocks are not known here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from instep.errors import PeerError


class TensorForm(NamedTuple):
    """Of a tensor that is sent."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def form_of(tensor: Tensor) -> TensorForm:
    """The form of a tensor."""
    return TensorForm(tensor.shape, tensor.dtype, tensor.device)


class StageLinks:
    """One rank's end.

    Args:
        group: the ranks of the pipeline, in the order of their first stages; None for one rank.
    """

    def __init__(self, group: Any = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self._own: dict[int, Tensor] = {}
        self._sending: list[tuple[Any, Tensor]] = []

    def send(self, tensor: Tensor, rank: int, tag: int) -> None:
        """Begin to send; `tag` is used once between two calls of `finish`."""
        tensor = tensor.detach()
        if rank == self.rank:
            self._own[tag] = tensor
            return
        tensor = tensor.contiguous()
        try:
            work = self._group.send([tensor], rank, tag)  # dist.isend checks for longer
        except RuntimeError as error:
            raise _broken(error) from error
        self._sending = [each for each in self._sending if not each[0].is_completed()]
        self._sending.append((work, tensor))

    def expect(self, like: Tensor | TensorForm, rank: int, tag: int) -> Incoming:
        """Begin to receive a tensor that has the shape, type and device of `like`."""
        if rank == self.rank:
            return Incoming(None, None, self._own, tag)
        tensor = torch.empty(like.shape, dtype=like.dtype, device=like.device)
        try:
            work = self._group.recv([tensor], rank, tag)
        except RuntimeError as error:
            raise _broken(error) from error
        return Incoming(work, tensor, self._own, tag)

    def finish(self) -> None:
        """Return when everything has been sent."""
        for work, _ in self._sending:
            _wait(work)
        self._sending.clear()


class Incoming:
    """A tensor that is on its way."""

    def __init__(self, work: Any, tensor: Tensor | None, own: dict[int, Tensor], tag: int) -> None:
        self._work, self._tensor, self._own, self._tag = work, tensor, own, tag

    def wait(self) -> Tensor:
        """The tensor, once it is here.

        Raises:
            PeerError: the rank that sends it was lost.
        """
        if self._tensor is None:
            return self._own.pop(self._tag)
        _wait(self._work)
        return self._tensor


def _wait(work: Any) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _broken(error) from error


def _broken(error: RuntimeError) -> PeerError:
    return PeerError(f"another stage of the pipeline went away ({error}).")
