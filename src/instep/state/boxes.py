"""Which part of a tensor a rank has: a box, [first, stop) in each dim of the whole tensor.

Ranks of one replica hold parts of its tensors as DTensors; code that saves, loads or gathers
them asks here for the part, and never needs to know a mesh. Nothing here communicates or knows
files. Way in: `cut_of` and `local` for a tensor; `meet`, `inside` and `gap` for boxes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from torch import Tensor

from instep.comm.dtensors import is_split
from instep.errors import CheckpointError
from instep.job.mesh import MeshSpec

if TYPE_CHECKING:  # imported where there is one: it takes a second
    from torch.distributed.tensor.placement_types import Placement

Box: TypeAlias = tuple[tuple[int, int], ...]
"""[first, stop) of each dim, in elements; that of a tensor without dims is empty."""


class BoxCut(NamedTuple):
    """A part of a tensor."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    box: Box
    """Which part."""


def read_cut(shape: Sequence[int], box: Sequence[Sequence[int]]) -> BoxCut:
    """A cut that was JSON."""
    return BoxCut(tuple(map(int, shape)), tuple((int(first), int(stop)) for first, stop in box))


class MeshRank(NamedTuple):
    """A rank of a replica that several processes share."""

    mesh: MeshSpec
    worker: int

    @property
    def first(self) -> bool:
        """Whether it writes what all ranks of its pipeline stage have whole."""
        place = self.mesh.coordinate(self.worker)
        return place.shard == place.tensor == 0

    @property
    def has_all_names(self) -> bool:
        """Whether it has a part of every tensor; a rank of a pipeline has only some tensors."""
        return self.mesh.stages == 1


def cut_of(tensor: Tensor, name: str = "a tensor") -> BoxCut | None:
    """The part of a tensor that this rank has; None where it has the whole tensor as a plain one.

    Args:
        tensor: a DTensor, or any other, which is whole.
        name: for the message.

    Raises:
        CheckpointError: what the rank has is not one box of the tensor: a sum that is still to be
            taken, or stripes.
    """
    if not is_split(tensor):
        return None
    shape, mesh = tuple(tensor.shape), tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return BoxCut(shape, tuple((0, 0) for _ in shape))
    cut = _cut(shape, tuple(mesh.shape), tuple(place), tensor.placements, name)
    held = tuple(tensor._local_tensor.shape)
    if held != extent(cut.box) and not (math.prod(held) == elements(cut.box) == 0):
        raise CheckpointError(
            f"{name} of shape {list(shape)} has the placements {list(tensor.placements)}, by which "
            f"this rank has {list(extent(cut.box))} of it, but it has {list(held)}."
        )
    return cut


@lru_cache(maxsize=1 << 16)  # asked of each tensor at each commit
def _cut(
    shape: tuple[int, ...],
    sizes: tuple[int, ...],
    place: tuple[int, ...],
    placements: tuple[Placement, ...],
    name: str,
) -> BoxCut:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    box = [(0, length) for length in shape]
    for dim in range(len(shape)):
        axes = [
            axis
            for axis, kind in enumerate(placements)
            if isinstance(kind, Shard | _StridedShard) and kind.dim == dim
        ]
        for axis in _in_order(axes, sizes, placements, name):
            box[dim] = _chunk(*box[dim], sizes[axis], place[axis])
    if any(not isinstance(kind, Shard | _StridedShard | Replicate) for kind in placements):
        raise CheckpointError(
            f"{name} has the placements {list(placements)}: only what is split or replicated can "
            "be kept, and no sum that is still to be taken."
        )
    return BoxCut(shape, tuple(box))


def box_of(tensor: Tensor, name: str = "a tensor") -> Box:
    """The box of a tensor that this rank has, also where it has the whole; raises as `cut_of`."""
    cut = cut_of(tensor, name)
    return whole(tensor.shape) if cut is None else cut.box


def _in_order(
    axes: list[int], sizes: Sequence[int], placements: Sequence[Placement], name: str
) -> list[int]:
    """The axes that split one dim, in the order in which they were split.

    FSDP splits a dim that is split already along an axis to its right: the later split is to be
    undone first, which torch calls strided.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    strided = [axis for axis in axes if isinstance(placements[axis], _StridedShard)]
    if not strided:
        return axes
    others = [axis for axis in axes if axis not in strided]
    split = math.prod(sizes[axis] for axis in others)
    kinds = [placements[axis] for axis in strided]
    if [getattr(kind, "split_factor", 0) for kind in kinds] != [split] or min(others) < strided[0]:
        raise CheckpointError(
            f"{name} has the placements {list(placements)}, by which a rank has several "
            "stripes of it: only one box of a tensor can be kept."
        )
    return [*others, *strided]


def _chunk(first: int, stop: int, count: int, number: int) -> tuple[int, int]:
    """The part of [first, stop) that `torch.chunk` gives to a number; the last may be empty."""
    step = -(-(stop - first) // count)
    return min(first + number * step, stop), min(first + (number + 1) * step, stop)


def local(tensor: Tensor) -> Tensor:
    """What this rank has of a tensor, in the same memory, without communicating."""
    if not is_split(tensor):
        return tensor.detach()
    held = tensor._local_tensor.detach()
    cut = cut_of(tensor)
    return held if cut is None else held.view(extent(cut.box))


def primary(tensor: Tensor, rank: MeshRank) -> bool:
    """Whether this is the one rank of its replica that writes its part of a tensor.

    It is the lowest on every axis along which the tensor is replicated. Axes of a DeviceMesh are
    known by the names that they have in the job (`shard`, `tensor`).
    """
    if not is_split(tensor):
        return rank.first
    mesh, place = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if place is None:
        return False
    along = mesh.mesh_dim_names or ()
    own = rank.mesh.coordinate(rank.worker)
    others = [
        number
        for axis, number in own._asdict().items()
        if axis in {"shard", "tensor"}.difference(along)
    ]
    if along and any(others):
        return False
    copies = [place[axis] for axis, kind in enumerate(tensor.placements) if kind.is_replicate()]
    return not any(copies)


def holders(tensor: Tensor, rank: MeshRank, stages: Collection[int] = ()) -> tuple[int, ...]:
    """The ranks of the replica that have the same part of a tensor, in their order.

    Args:
        tensor: of this rank.
        rank: which one this is.
        stages: that have the tensor; this rank's, if left out.
    """
    split = set[str]()
    if is_split(tensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        kinds = zip(names, tensor.placements, strict=True)
        split = {name for name, kind in kinds if not kind.is_replicate()}
    mesh, own = rank.mesh, rank.mesh.coordinate(rank.worker)
    return tuple(
        number
        for number in range(mesh.ranks)
        for place in [mesh.coordinate(number)]
        if place.stage in (stages or (own.stage,))
        and all(getattr(place, axis) == getattr(own, axis) for axis in split)
    )


# ---- boxes


def whole(shape: Iterable[int]) -> Box:
    """The box that is all of a tensor."""
    return tuple((0, length) for length in shape)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of what is in a box."""
    return tuple(stop - first for first, stop in box)


def elements(box: Box) -> int:
    """How many there are in a box."""
    return math.prod(extent(box))


def meet(one: Box, other: Box) -> Box | None:
    """What two boxes of one tensor have in common; None where that is nothing."""
    both = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True))
    return both if all(first < stop for first, stop in both) else None


def inside(box: Box, outer: Box) -> tuple[slice, ...]:
    """Where a box lies in another that contains it."""
    return tuple(
        slice(first - start, stop - start)
        for (first, stop), (start, _) in zip(box, outer, strict=True)
    )


def gap(shape: Sequence[int], boxes: Iterable[Box]) -> Box | None:
    """A part of a tensor that none of the boxes has; None where they have all of it."""
    there = [box for box in boxes if elements(box)]
    ends = [
        sorted({0, length, *(end for box in there for end in box[dim])})
        for dim, length in enumerate(shape)
    ]
    if any(
        bounds[0] < 0 or bounds[-1] > length for bounds, length in zip(ends, shape, strict=True)
    ):
        return whole(shape)
    covered = set[tuple[int, ...]]()
    for box in there:
        spans = [range(ends[dim].index(a), ends[dim].index(b)) for dim, (a, b) in enumerate(box)]
        covered.update(itertools.product(*spans))
    for cell in itertools.product(*(range(len(bounds) - 1) for bounds in ends)):
        if cell not in covered:
            return tuple((ends[dim][at], ends[dim][at + 1]) for dim, at in enumerate(cell))
    return None
