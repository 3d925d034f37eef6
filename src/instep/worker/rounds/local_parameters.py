"""Parameters, and buffers, that stay with their participant.

FedBN: Li et al. 2021 (arXiv:2102.07623). Part of what participants remember (`local_states.py`).
The model that all share has their mean in these places.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from instep.errors import SpecError
from instep.words import listed


class LocalParameters:
    """What has one of some names in a model.

    Args:
        model: whose.
        patterns: of names, as of a shell; `*.norm.*` is also one of `norm.weight`.
        trained: the parameters that local steps move, in the strategy's order.

    Raises:
        SpecError: nothing that is trained has such a name.
    """

    def __init__(
        self, model: nn.Module, patterns: Sequence[str], trained: Sequence[nn.Parameter]
    ) -> None:
        numbers = {id(parameter): slot for slot, parameter in enumerate(trained)}
        own = {
            name: parameter
            for name, parameter in model.named_parameters()
            if id(parameter) in numbers and _fits(name, patterns)
        }
        self.slots = frozenset(numbers[id(parameter)] for parameter in own.values())
        """Their numbers among those that are trained."""
        self._parameters = own
        self._buffers = {
            name: (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in model.named_buffers()
            if _fits(name, patterns)
        }
        every = [name for name, parameter in model.named_parameters() if id(parameter) in numbers]
        buffers = [name for name, _ in model.named_buffers()]
        for pattern in patterns:
            if not any(_fits(name, [pattern]) for name in (*every, *self._buffers)):
                raise SpecError(
                    f"sync.options.local_parameters has {pattern!r}: no parameter that is trained, "
                    f"and no buffer, has such a name. There are {listed(every, 6)}"
                    + (f"; buffers: {listed(buffers, 6)}." if buffers else "; no buffer.")
                )
        if len(self.slots) == len(trained):
            raise SpecError(
                f"sync.options.local_parameters = {list(patterns)!r} names all that is trained, "
                "and nothing would be shared. Name fewer."
            )

    @torch.no_grad()
    def pack(self) -> dict[str, Tensor]:
        """Copies, by name."""
        return {name: tensor.detach().clone() for name, tensor in self._tensors()}

    @torch.no_grad()
    def resume(self, participant: int, tensors: Mapping[str, Tensor]) -> None:
        """The participant's own, for its local steps."""
        for name, tensor in self._tensors():
            tensor.copy_(tensors[name])

    @contextmanager
    def lent(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """In this context the model has these, given as `pack` gave them; or none of its own."""
        if not tensors:
            yield
            return
        before = dict(self._tensors())
        values = {name: tensor.data for name, tensor in before.items()}
        self._put({name: each.to(values[name].device) for name, each in tensors.items()})
        try:
            yield
        finally:
            self._put(values)

    def _put(self, values: Mapping[str, Tensor]) -> None:
        """Other memory, so that nobody takes a buffer for one that a pass has moved."""
        for name, tensor in self._tensors():
            tensor.data = values[name]

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._parameters.items()
        for name, (module, own) in self._buffers.items():
            buffer = module._buffers[own]
            if buffer is not None:
                yield name, buffer


def _fits(name: str, patterns: Sequence[str]) -> bool:
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(f".{name}", pattern) for pattern in patterns
    )
