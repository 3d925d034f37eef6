"""Sums of whole numbers, to which noise is added once, after all workers have summed.

It keeps the promises of `Sums` in `sync/sums.py`. Gradients come in as whole numbers on the grid
(`per_sample.py`), and leave as float32: the sum, the noise, divided by the samples that a step has
on average. Every worker adds the same noise to the same sums.

The noise of a step has a key that follows from the secret, the commit and a digest of all that is
summed and of how much noise it gets: two contents never have the same noise, nor has one content
the same noise in two sizes, and the same content has the same, so that a step that is computed
again publishes nothing new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from instep.privacy.grid import Grid
from instep.privacy.kernels import unscaled_with_noise
from instep.privacy.keys import derived, tag
from instep.privacy.noise import rounded_gaussian
from instep.sync.sums import WithoutMemory


class PrivateSums(WithoutMemory):
    """Adds noise to what was summed; all samples fit, by the choice of the grid.

    Args:
        parameters: whose gradients are summed, in the same order on every rank.
        grid: on which they are.
        noise: standard deviation over the sensitivity.
        planned: samples that a step has on average.
        secret: of the run.
    """

    types: Mapping[torch.dtype, torch.dtype] = {torch.float32: torch.int32}

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grid: Grid,
        noise: float,
        planned: float,
        secret: bytes,
    ) -> None:
        self._grid, self._planned, self._secret = grid, planned, secret
        self._sigma = noise * grid.sensitivity
        self._first = list[int]()
        place = 0
        for each in parameters:
            self._first.append(place)
            place += each.numel() + each.numel() % 2
        self._key = b""

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """Add whole numbers; every micro-batch counts the same."""
        assert gradient.dtype == torch.int32, "gradients on the grid"
        if fresh:
            into.copy_(gradient.view_as(into))
        else:
            into.add_(gradient.view_as(into))

    def seal(self, commit: int, sums: Sequence[Tensor]) -> bytes:
        """Choose the key of the noise for what was summed for a commit; before `gradient`.

        Returns:
            A tag of what is published, which says nothing of it: equal tags, equal contents.
        """
        digest = hashlib.sha256(repr((self._sigma, self._grid.unit, self._planned)).encode())
        for each in sums:
            digest.update(each.detach().cpu().contiguous().numpy().data)
        content = digest.digest()
        self._key = derived(self._secret, "noise", commit, content)
        name = str(commit).encode() + content
        return tag(derived(self._secret, "released"), name)

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """The mean gradient of a planned step, with noise."""
        assert self._key, "seal() comes first"
        flat = agreed.reshape(-1)
        drawn = rounded_gaussian(self._key, self._sigma, self._first[index], flat.numel())
        unit = self._grid.unit / self._planned
        if flat.device.type == "cpu":
            found = torch.empty(flat.numel())
            unscaled_with_noise(flat.numpy(), drawn, unit, found.numpy())
            return found.view_as(agreed)
        whole = torch.from_numpy(drawn).to(agreed.device) + flat
        return (whole.to(torch.float64) * unit).to(torch.float32).view_as(agreed)

    def end_step(self, sizes: Sequence[int] | None = None) -> None:
        """The key has been used."""
        self._key = b""

    def abandon(self) -> None:
        """The next step has a key of its own."""
        self._key = b""
