"""Brings what all workers have computed of a dataset to one of them, in the order of the dataset.

It holds one batch of another worker at a time, and each other worker what it has computed. As every
batch takes the same way, also one of the receiver's own, it gets the same values at any number of
workers. What they are for is not known here. Way in: `InOrder`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import RecipeError
from instep.state.snapshot import DTYPES, TYPES


class InOrder:
    """Batches of a dataset on their way to rank 0.

    Args:
        comm: the workers.
        count: batches of the dataset.
        take: called on rank 0 with what `put` got of each batch, in order.
        device: where tensors travel.
    """

    def __init__(
        self, comm: Comm, count: int, take: Callable[[Any], None], device: torch.device
    ) -> None:
        self._comm, self._take, self._device = comm, take, device
        self._sizes = torch.zeros(count, 2, dtype=torch.int64)  # of each its rank, and its bytes
        self._held: dict[int, Tensor] = {}
        self._next = 0

    def put(self, number: int, value: Any) -> None:
        """This worker has computed a batch: tensors, numbers and text in tuples, lists and dicts.

        Raises:
            RecipeError: something else is among it.
        """
        data = encoded(value)
        self._sizes[number] = torch.tensor([self._comm.rank, data.numel()])
        self._held[number] = data
        if self._comm.rank == 0 and number == self._next:  # nothing of others comes before it
            self._take(decoded(self._held.pop(number)))
            self._next += 1

    def finish(self) -> None:
        """Rank 0 takes all that it has not; every worker calls it.

        Raises:
            PeerError: a worker was lost.
        """
        comm, sizes = self._comm, self._sizes.to(self._device)
        comm.all_reduce(sizes).wait()
        for number, (rank, size) in enumerate(sizes.tolist()):
            if number < self._next and comm.rank == 0:
                continue
            if comm.rank == 0 and size:
                if rank == 0:
                    data = self._held.pop(number)
                else:
                    data = torch.empty(size, dtype=torch.uint8, device=self._device)
                    comm.receive(data, rank).wait()
                self._take(decoded(data.cpu()))
            elif size and rank == comm.rank:
                comm.send(self._held.pop(number).to(self._device), 0).wait()


def encoded(value: Any) -> Tensor:
    """Nested tensors and plain values as bytes, [n] uint8.

    Raises:
        RecipeError: something else is among them.
    """
    tensors: list[Tensor] = []

    def form(part: Any) -> Any:
        if isinstance(part, Tensor) and part.dtype in DTYPES:
            tensors.append(part.detach().cpu().contiguous())
            return {"t": [DTYPES[part.dtype], list(part.shape)]}
        if isinstance(part, dict) or hasattr(part, "items"):
            return {"d": [[form(key), form(each)] for key, each in part.items()]}
        if isinstance(part, (tuple, list)):
            return {"u" if isinstance(part, tuple) else "l": [form(each) for each in part]}
        if part is None or isinstance(part, (bool, int, float, str)):
            return {"v": part}
        raise RecipeError(
            f"metrics of the whole dataset were given a {type(part).__name__} (from predict, the "
            "model, or targets), which cannot be sent to another worker. Give tensors, numbers and "
            "text, in tuples, lists and dicts."
        )

    head = json.dumps(form(value)).encode()
    size = torch.tensor([len(head)]).view(torch.uint8)
    flat = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat([size, torch.frombuffer(bytearray(head), dtype=torch.uint8), *flat])


def decoded(data: Tensor) -> Any:
    """What `encoded` got: the same bits; a dict of another class as a dict."""
    at = 8 + int(data[:8].clone().view(torch.int64))

    def value(form: Any) -> Any:
        nonlocal at
        ((kind, given),) = form.items()
        if kind == "t":
            dtype, shape = TYPES[given[0]], torch.Size(given[1])
            size = shape.numel() * dtype.itemsize
            at += size
            return data[at - size : at].clone().view(dtype).view(shape)
        if kind == "d":
            return {value(key): value(each) for key, each in given}
        if kind == "v":
            return given
        parts = [value(each) for each in given]
        return tuple(parts) if kind == "u" else parts

    return value(json.loads(bytes(data[8:at].numpy())))
