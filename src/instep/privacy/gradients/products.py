"""Gradients of single samples in the form that layers leave them in, clipped and added up.

The gradient of a linear layer's weight is a product: of what the layer reads, and of what is sent
back to its output. A sample has little of both, and a large product. So products are made a few
samples at a time, clipped and rounded to the grid there, and added; most never leave the cache of
a core. (What layers keep is that of Goodfellow 2015, arXiv:1510.01799, and of the "ghost norms" of
Li et al. 2022, arXiv:2110.05679; sums are not made by a weighted second pass as there: decision
0118.) Which layers give them so, `taps.py` knows. Way in: the four classes that say what there is
of a gradient, `SampleGradients` all of them.
"""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from instep.privacy.kernels import add_products, add_rounded, squared_norms

IN_CACHE = 1 << 22
"""Numbers of gradients that are made at a time: with fewer, calls cost more than memory."""

_STEEP = 2.0**100
"""Norm of one side of a product up to which the other side is left as it is."""


class SampleGradients(Protocol):
    """Gradients of one parameter, of several samples."""

    size: int
    """Numbers of one sample that are made before they are summed."""

    def part(self, first: int, stop: int) -> SampleGradients:
        """Gradients of samples [first, stop)."""

    def squares(self) -> Tensor:
        """The square of the norm of each, [samples] float64."""

    def add_into(self, total: Tensor, factors: Tensor) -> None:
        """Multiply each by its factor, round it to whole numbers, and add them up.

        Args:
            total: of the parameter's shape, int32.
            factors: [samples] float64; a sample with 0 counts as nothing, whatever its gradient.
        """

    def whole(self) -> Tensor:
        """Make all numbers, [samples, *shape]."""


class WholeGradients:
    """Gradients whose numbers are all there.

    Args:
        numbers: [samples, *shape]; may be overwritten by `add_into`.
    """

    def __init__(self, numbers: Tensor) -> None:
        self._numbers = numbers
        self.size = math.prod(numbers.shape[1:])

    def part(self, first: int, stop: int) -> WholeGradients:
        """Gradients of some samples."""
        return WholeGradients(self._numbers[first:stop])

    @property
    def _rows(self) -> Tensor:
        return self._numbers.reshape(len(self._numbers), self.size)

    def squares(self) -> Tensor:
        """Sums of squares in float64."""
        if self._numbers.device.type == "cpu":
            found = torch.empty(len(self._numbers), dtype=torch.float64)
            squared_norms(self._rows.contiguous().numpy(), found.numpy())
            return found
        norms: Tensor = torch.linalg.vector_norm(self._rows, dim=1, dtype=torch.float64)
        return norms.square()

    def add_into(self, total: Tensor, factors: Tensor) -> None:
        """Multiply, on a GPU in place."""
        numbers = self._numbers
        if numbers.device.type == "cpu":
            rows, whole = self._rows.contiguous(), total.view(-1)
            add_rounded(rows.numpy(), factors.to(torch.float32).numpy(), whole.numpy())
            return
        if not (factors > 0).all():  # of one that is not finite nothing is left
            numbers[factors == 0] = 0.0
        ones = [1] * (numbers.dim() - 1)
        numbers.mul_(factors.to(numbers.dtype).view(-1, *ones)).round_()
        _add(numbers, total)

    def whole(self) -> Tensor:
        """Numbers as they are."""
        return self._numbers


class LinearGradients:
    """Gradients of a linear layer's weight: each is `sent.T @ read`.

    Args:
        read: [samples, places, inputs], what the layer read.
        sent: [samples, places, outputs], what was sent back to it.
    """

    def __init__(self, read: Tensor, sent: Tensor) -> None:
        self._read, self._sent = read, sent
        self.size = read.shape[2] * sent.shape[2] if read.shape[1] > 1 else 0
        self._made: WholeGradients | None = None

    def part(self, first: int, stop: int) -> LinearGradients:
        """Gradients of some samples."""
        return LinearGradients(self._read[first:stop], self._sent[first:stop])

    def squares(self) -> Tensor:
        """Products of two norms, where there is one place; else sums of squares."""
        if self._read.shape[1] > 1:
            self._made = WholeGradients(self.whole())
            return self._made.squares()
        read, sent = (WholeGradients(each).squares() for each in (self._read, self._sent))
        return read * sent

    def add_into(self, total: Tensor, factors: Tensor) -> None:
        """Multiply what was sent back: then the product fits into float32, however large it is."""
        if self._read.shape[1] > 1:
            made = self._made or WholeGradients(self.whole())
            made.add_into(total, factors)
            return
        kept = torch.where((factors > 0).view(-1, 1), self._sent[:, 0], 0.0)
        wide, read = kept.to(torch.float64) * factors.view(-1, 1), self._read[:, 0]
        over = torch.linalg.vector_norm(wide, dim=1, keepdim=True) / _STEEP
        if (over > 1).any():  # float32 has no room for it: the other side takes the rest
            over.clamp_min_(1.0)
            wide, read = wide / over, (read.to(torch.float64) * over).to(read.dtype)
        scaled = wide.to(self._sent.dtype)
        if scaled.device.type == "cpu":
            both = (each.contiguous().numpy() for each in (scaled, read))
            add_products(*both, total.numpy())
            return
        read = torch.where((factors > 0).view(-1, 1), read, 0.0)
        _add(torch.mul(scaled.unsqueeze(2), read.unsqueeze(1)).round_(), total)

    def whole(self) -> Tensor:
        """Multiplied."""
        return torch.bmm(self._sent.transpose(1, 2), self._read)


class ConvolutionGradients:
    """Gradients of the weight of a convolution: products over all its places.

    Args:
        layer: of one axis or two.
        read: [samples, channels, *axes], what the layer read.
        sent: [samples, outputs, places], what was sent back to it.
    """

    def __init__(self, layer: nn.Conv1d | nn.Conv2d, read: Tensor, sent: Tensor) -> None:
        self._layer, self._read, self._sent = layer, read, sent
        self.size = layer.weight.numel()
        self._made: WholeGradients | None = None

    def part(self, first: int, stop: int) -> ConvolutionGradients:
        """Gradients of some samples."""
        return ConvolutionGradients(self._layer, self._read[first:stop], self._sent[first:stop])

    def squares(self) -> Tensor:
        """Sums of squares of what is made."""
        self._made = WholeGradients(self.whole())
        return self._made.squares()

    def add_into(self, total: Tensor, factors: Tensor) -> None:
        """Multiply what is made."""
        (self._made or WholeGradients(self.whole())).add_into(total, factors)

    def whole(self) -> Tensor:
        """Multiplied, [samples, outputs, inputs of a place and group]."""
        of, read = self._layer, self._read
        how: list[Any] = [of.kernel_size, of.dilation, of.padding, of.stride]
        if read.dim() == 3:  # one axis is the second of two
            read, how = read.unsqueeze(2), [(0 if at == 2 else 1, *n) for at, n in enumerate(how)]
        places = nn.functional.unfold(read, *how)
        some, each = len(read), len(read) * of.groups
        sent, places = (t.reshape(each, -1, t.shape[2]) for t in (self._sent, places))
        return torch.bmm(sent, places.transpose(1, 2)).reshape(some, of.out_channels, -1)


class EmbeddingGradients:
    """Gradients of an embedding's weight, which has a few rows of each sample.

    Args:
        read: [samples, places], numbers of rows.
        sent: [samples, places, width], what was sent back to them.
        rows: of the weight.
        padding: the row that is not trained; None where all are.
    """

    size = 0

    def __init__(self, read: Tensor, sent: Tensor, rows: int, padding: int | None) -> None:
        self._read, self._sent, self._rows, self._padding = read, sent, rows, padding
        self._found: list[tuple[Tensor, Tensor]] = []

    def part(self, first: int, stop: int) -> EmbeddingGradients:
        """Gradients of some samples."""
        return EmbeddingGradients(
            self._read[first:stop], self._sent[first:stop], self._rows, self._padding
        )

    def _each(self) -> list[tuple[Tensor, Tensor]]:
        """Rows that each sample reads, and their gradients."""
        if not self._found:
            for numbers, sent in zip(self._read, self._sent, strict=True):
                rows, places = torch.unique(numbers, return_inverse=True)
                summed = torch.zeros(len(rows), sent.shape[1], dtype=sent.dtype, device=sent.device)
                summed.index_add_(0, places, sent)
                if self._padding is not None:
                    summed[rows == self._padding] = 0.0
                self._found.append((rows, summed))
        return self._found

    def squares(self) -> Tensor:
        """Sums of squares of the rows."""
        norms = [torch.linalg.vector_norm(each, dtype=torch.float64) for _, each in self._each()]
        return torch.stack(norms).square()

    def add_into(self, total: Tensor, factors: Tensor) -> None:
        """Add to these rows alone."""
        for (rows, each), factor in zip(self._each(), factors.tolist(), strict=True):
            if factor > 0:
                total.index_add_(0, rows, each.mul(factor).round_().to(torch.int32))

    def whole(self) -> Tensor:
        """Make the other rows too."""
        shape = len(self._read), self._rows, self._sent.shape[2]
        found = torch.zeros(shape, dtype=self._sent.dtype, device=self._sent.device)
        for into, (rows, each) in zip(found, self._each(), strict=True):
            into[rows] = each
        return found


def _add(numbers: Tensor, total: Tensor) -> None:
    """Add whole numbers of float32, [samples, *shape], to a total of int32: exact in any order."""
    into = total.view(numbers.shape[1:])
    for each in numbers.to(torch.int32):
        into.add_(each)
