"""The norm of a gradient, with the same bits whichever process holds which part.

Each gradient is taken as one flat tensor and cut into blocks. The squares of a block are summed
on their own, and the sums of all blocks are added without rounding. So it matters neither in
which order blocks come, nor on which process each was summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

BLOCK = 1 << 14
"""Elements; torch sums so few of them in one thread, however many it has."""


def blocks(size: int) -> int:
    """In a gradient of so many elements."""
    return -(-size // BLOCK)


@torch.no_grad()
def squares(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of squares of each block.

    Args:
        gradients: of any shapes; dense.

    Returns:
        [blocks] float64. Those of one gradient are in their order; those of several in any.
    """
    norms, small = [torch.zeros(0)], list[Tensor]()
    for gradient in gradients:
        flat = gradient.reshape(-1)
        whole = len(flat) // BLOCK * BLOCK
        if whole:
            norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1))
        if whole < len(flat):
            small.append(flat[whole:])
    if small:
        norms.append(torch.stack(torch._foreach_norm(small)))
    if len(norms) > 1:
        norms = [each.to(norms[1].device) for each in norms]
    return torch.cat([each.to(torch.float64) for each in norms]).square_()


def summed(squares: Sequence[float]) -> list[float]:
    """A few numbers whose sum is exactly that of these: `norm` gives the same for them.

    Each is what the ones before it leave of the sum, rounded once.
    """
    parts = list[float]()
    try:
        while rest := math.fsum([*squares, *(-part for part in parts)]):
            parts.append(rest)
            if not math.isfinite(rest):
                break
    except OverflowError:  # of finite numbers
        return [math.inf]
    return parts


def norm(squares: Iterable[float]) -> float:
    """The 2-norm of all blocks together; 0 where there are none."""
    try:
        return math.sqrt(math.fsum(squares))
    except OverflowError:  # of finite numbers
        return math.inf


def factor(norm: float, limit: float) -> float:
    """What a gradient of this norm is multiplied by, so that its norm is at most the limit.

    As `torch.nn.utils.clip_grad_norm_` has it: a little below the limit; not a number for what is
    none.
    """
    wanted = limit / (norm + 1e-6)
    return 1.0 if wanted > 1.0 else wanted


def recorded(norm: float | None) -> float:
    """Write a norm as records have it: nan where nobody wants one, inf for what is no number."""
    if norm is None:
        return math.nan
    return norm if math.isfinite(norm) else math.inf
