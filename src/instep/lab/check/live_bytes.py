"""Counts the bytes of tensors that are made within a context, and how many lived at once.

Torch calls it at each operation, also of a backward pass. A storage counts from the operation that
made it until it is freed. Memory that kernels use inside, and what the allocator keeps, is not
seen: resident memory is more. Way in: `LiveBytes`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instep.parallel.nested import tensors_in


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered.

    Args:
        known: tensors that were there before, whose storages do not count.
    """

    def __init__(self, known: Sequence[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._seen = {_address(tensor) for tensor in known}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count what it has made."""
        made = func(*args, **(kwargs or {}))
        for tensor in tensors_in(made):
            self._count(tensor)
        return made

    def _count(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
        except (NotImplementedError, RuntimeError):  # sparse, or of a kind that has none
            return
        if not size or address in self._seen:
            return
        self._seen.add(address)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, address, size).atexit = False

    def _freed(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live -= size


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
