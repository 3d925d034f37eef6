"""Named tensors from one rank to another, which does not know what comes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor

from instep.comm.base import Comm


def send_named(comm: Comm, tensors: Mapping[str, Tensor], to: int) -> None:
    """Send tensors of the CPU to another rank, which calls `receive_named`; returns when done.

    Raises:
        PeerError: it went away.
    """
    rows = [(name, str(t.dtype).removeprefix("torch."), t.shape) for name, t in tensors.items()]
    head = torch.frombuffer(bytearray(msgspec.json.encode(rows)), dtype=torch.uint8)
    comm.send(torch.tensor([len(head)]), to).wait()
    comm.send(head, to).wait()
    for tensor in tensors.values():
        if tensor.numel():
            comm.send(tensor.detach().contiguous(), to).wait()


def receive_named(comm: Comm, source: int) -> dict[str, Tensor]:
    """What another rank sends here by `send_named`.

    Raises:
        PeerError: it went away.
    """
    length = torch.zeros(1, dtype=torch.int64)
    comm.receive(length, source).wait()
    head = torch.empty(int(length), dtype=torch.uint8)
    comm.receive(head, source).wait()
    rows = msgspec.json.decode(head.numpy().tobytes(), type=list[tuple[str, str, list[int]]])
    tensors = {name: torch.empty(shape, dtype=getattr(torch, kind)) for name, kind, shape in rows}
    for tensor in tensors.values():
        if tensor.numel():
            comm.receive(tensor, source).wait()
    return tensors
