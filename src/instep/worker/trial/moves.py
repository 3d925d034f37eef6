"""Moves parameters off their start, for tests of gradients.

A layer that starts at zero hides the layers behind it.

How far each is moved depends on the seed, its name and its values at the start. So a
process that holds a part of it moves it as one that holds the whole does.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.order import key

_BY = 0.05
"""How far parameters are moved, relative to their root mean square (or to 1, if that is 0)."""


class Moves:
    """The moves of a model's parameters.

    Args:
        model: whole, with its parameters at their start; if they are on the meta device, `agree`
            says how far they move.
        seed: of the moves.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._seed = seed
        self._by: dict[str, tuple[torch.Size, float]] = {}
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
                values = torch.zeros(1) if parameter.is_meta else parameter.detach().float()
                rms = float(values.norm()) / math.sqrt(values.numel())
                self._by[name] = parameter.shape, _BY * (rms if 0 < rms < math.inf else 1.0)

    def agree(self, comm: Comm, device: torch.device) -> None:
        """Move parameters as far as rank 0 does; all ranks call this with models of one kind."""
        by = [by for _, by in self._by.values()]
        agreed = torch.tensor(by, dtype=torch.float64, device=device)
        comm.broadcast(agreed)
        self._by = {
            name: (shape, by)
            for (name, (shape, _)), by in zip(self._by.items(), agreed.tolist(), strict=True)
        }

    @torch.no_grad()
    def move(self, name: str, held: Tensor, box: Sequence[tuple[int, int]] | None = None) -> None:
        """Move one parameter, or the part `box` of it, in place; frozen ones are left.

        Args:
            name: in the whole model.
            held: [box], or the whole parameter.
            box: [first, stop) in each dimension of the whole.
        """
        if name not in self._by:
            return
        shape, by = self._by[name]
        generator = torch.Generator().manual_seed(key(self._seed, zlib.crc32(name.encode())))
        noise = torch.randn(shape, generator=generator).mul_(by)
        if box is not None:
            noise = noise[tuple(slice(first, stop) for first, stop in box)]
        held.add_(noise.to(held.device, held.dtype))

    @contextmanager
    def moved(
        self, parts: Iterable[tuple[str, Sequence[tuple[int, int]], Tensor]]
    ) -> Iterator[None]:
        """In this context the parts of parameters that one rank holds are moved.

        Args:
            parts: name, box and [box] values, which are changed in place and put back.
        """
        parts = list(parts)
        before = [held.detach().clone() for _, _, held in parts]
        for name, box, held in parts:
            self.move(name, held, box)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, _, held), values in zip(parts, before, strict=True):
                    held.copy_(values)
