"""The equality gate: whether a mesh computes the gradients that one process computes.

Each rank says how far its part of each gradient is from the same part of the reference. The ranks
add that up, and all come to the same verdict, before anything is trained. How either side
computes is not known here; `worker/trial/gate.py` computes the reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import RecipeError

Box = Sequence[tuple[int, int]]
"""A part of a tensor: [first, stop) in each of its dimensions."""

NEAR = 1e-5
"""Largest distance of a gradient, relative to its own norm."""

OF_MODULE, OF_ALL = 1e-6, 1e-9
"""The same relative to the gradients of its module, and to all. A gradient that is 0 in exact
arithmetic, such as that of the bias of an attention's keys, holds nothing but rounding: up to 1e-7
of its module's was seen."""

_DIMS = 8
"""Most dimensions of a parameter."""


class GradientPiece(NamedTuple):
    """What one rank has of one parameter's gradient."""

    name: str
    shape: Sequence[int]
    """Of the whole tensor."""
    box: Box | None
    """What it holds of that; None if nothing."""
    reference: Tensor | None
    """[box] what one process computes; None if the parameter gets no gradient there."""
    mesh: Tensor | None
    """[box] what this rank computes, dense or sparse; None as above."""


class GateVerdict(NamedTuple):
    """What was compared, if nothing differs."""

    tensors: int
    distance: float
    """The largest relative to what is allowed, times `NEAR`."""
    blocks: Sequence[str] = ()
    """Names of the blocks that alone were compared; empty if all were."""


class _Distance(NamedTuple):
    """One rank's distance from the reference in one tensor."""

    box: tuple[tuple[int, int], ...]
    apart: float
    """Sum of squares of mesh - reference; infinite if one is not finite."""
    own: float
    """Sum of squares of the reference."""


class _Tensor(NamedTuple):
    """A tensor, as all ranks have it."""

    name: str
    elements: int
    ranks: list[_Distance | None]
    """None of a rank that holds nothing of it."""

    @property
    def module(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def held(self) -> list[_Distance]:
        return [row for row in self.ranks if row is not None]

    @property
    def distinct(self) -> list[_Distance]:
        """One of the ranks that hold the same part."""
        return list({row.box: row for row in self.held}.values())

    @property
    def norm(self) -> float:
        """Of the reference; each element counts once."""
        return math.sqrt(sum(row.own for row in self.distinct))

    @property
    def apart(self) -> float:
        """The distance of what the ranks hold; of several copies, the worst."""
        worst: dict[Any, float] = {}
        for row in self.held:
            worst[row.box] = max(row.apart, worst.get(row.box, 0.0))
        return math.sqrt(sum(worst.values()))

    @property
    def whole(self) -> bool:
        """Whether each element is held by a rank."""
        held = (math.prod(stop - first for first, stop in row.box) for row in self.distinct)
        return sum(held) >= self.elements


def check(
    pieces: Iterable[GradientPiece],
    comm: Comm,
    *,
    device: torch.device | str = "cpu",
    mesh: str = "",
) -> GateVerdict:
    """Refuse a mesh whose gradients are not those of one process.

    A rank counts each element that it holds: copies on several ranks are all compared, and each
    has to be right.

    Args:
        pieces: one for each parameter of the whole model, in its order of registration; the same
            names on every rank, also those of which it holds nothing. Taken one by one, so they
            may be made when they are asked for.
        comm: all ranks that hold a part of the model; each calls this.
        device: of the tensors that `comm` sums.
        mesh: the job's, for the message, such as "tensor = 2, stages = 2".

    Returns:
        The same on every rank.

    Raises:
        RecipeError: a gradient differs, or an element of it is held by no rank. Every rank raises
            the same.
    """
    sizes: dict[str, int] = {}
    own = []
    for piece in pieces:
        sizes[piece.name] = math.prod(piece.shape)
        own.append(_row(piece))
    table = torch.zeros(comm.size, len(own), 3 + 2 * _DIMS, dtype=torch.float64, device=device)
    table[comm.rank] = torch.tensor(own, dtype=torch.float64)
    comm.all_reduce(table).wait()
    ranks = [[_read(line) for line in lines] for lines in table.tolist()]
    tensors = [
        _Tensor(name, elements, [rank[place] for rank in ranks])
        for place, (name, elements) in enumerate(sizes.items())
    ]
    return _judge(tensors, mesh)


def _row(piece: GradientPiece) -> list[float]:
    """Dimensions (-1 if nothing is held), both sums of squares, and the box."""
    name, whole, box, reference, mesh = piece
    if box is None:
        return [-1.0] + [0.0] * (2 + 2 * _DIMS)
    assert len(whole) == len(box) <= _DIMS, f"{name!r} has {len(whole)} dimensions"
    shape = [stop - first for first, stop in box]
    mesh = mesh.to_dense() if mesh is not None and mesh.is_sparse else mesh
    for given in (reference, mesh):
        assert given is None or list(given.shape) == shape, f"{name!r}: {given.shape}, not {shape}"
    gap = mesh if reference is None else reference
    if reference is not None and mesh is not None:
        gap = mesh.to(reference.device, reference.dtype) - reference
    bounds = [float(bound) for both in box for bound in both]
    bounds += [0.0] * (2 * _DIMS - len(bounds))
    apart = _square(gap)
    apart = apart if math.isfinite(apart) else math.inf
    return [float(len(box)), apart, _square(reference), *bounds]


def _square(tensor: Tensor | None) -> float:
    """The sum of squares, in float64."""
    if tensor is None or not tensor.numel():
        return 0.0
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64)) ** 2


def _read(line: list[float]) -> _Distance | None:
    dims, apart, own, *bounds = line
    if dims < 0:
        return None
    box = tuple((int(bounds[2 * d]), int(bounds[2 * d + 1])) for d in range(int(dims)))
    return _Distance(box, apart, own)


def _judge(tensors: Sequence[_Tensor], mesh: str) -> GateVerdict:
    every = math.hypot(*(tensor.norm for tensor in tensors))
    modules: dict[str, float] = {}
    for tensor in tensors:
        modules[tensor.module] = math.hypot(modules.get(tensor.module, 0.0), tensor.norm)
    allowed = [
        max(NEAR * tensor.norm, OF_MODULE * modules[tensor.module], OF_ALL * every)
        for tensor in tensors
    ]
    wrong = [
        tensor
        for tensor, most in zip(tensors, allowed, strict=True)
        if not (tensor.whole and math.isfinite(tensor.apart) and tensor.apart <= most)
    ]
    if not wrong:
        far = [t.apart / most for t, most in zip(tensors, allowed, strict=True) if most]
        return GateVerdict(len(tensors), NEAR * max(far, default=0.0))
    others = f", and so are {len(wrong) - 1} of the others" if len(wrong) > 1 else ""
    raise RecipeError(
        f"[mesh] {mesh or 'of this job'} would train another model than one process does: of one "
        f"global batch, with the parameters moved a little, its gradient of {wrong[0].name!r} "
        f"{_how_far(wrong[0])}. It is the first of {len(tensors)} that is wrong{others}. Use "
        "another [mesh], or leave the section out."
    )


def _how_far(tensor: _Tensor) -> str:
    if not tensor.whole:
        return "is not there: a part of it is held by no rank"
    off = [rank for rank, row in enumerate(tensor.ranks) if row is not None and row.apart != 0]
    where = f" on rank {off[0]}" if len(off) == 1 < len(tensor.held) else ""
    if not math.isfinite(tensor.apart):
        return f"is not finite{where}, or that of one process is not"
    if not tensor.norm:
        return f"has the norm {tensor.apart:.2g}{where}, where that of one process has none"
    return f"is off by {tensor.apart / tensor.norm:.2g} of its norm{where}; {NEAR:g} is allowed"
