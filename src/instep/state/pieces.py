"""Read any box of any tensor of a checkpoint, whatever the mesh that saved it.

A checkpoint of plain replicas has whole tensors, one of a mesh the parts of its ranks (groups
`part-N`, with their boxes in the file's metadata), and one of servers flat ranges of the
optimizer's state (groups `shard-N`) and every so many rows of embeddings (groups `table-N`). Here
all are pieces of tensors that have the names `model/NAME`, `aside/NAME` and
`optimizer/PARAMETER/STATE` (`optimizer-TURN/...` where a step has several updates). A file is
compared with its SHA-256 before the first of its data is used.
Way in: `open_pieces.py` for a folder, `held_pieces` for a snapshot in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.boxes import Box, BoxCut, elements, extent, gap, inside, meet, whole
from instep.state.packing import unpack_state
from instep.state.snapshot import COPIES, PART, Snapshot, tied_names

CUTS = "cuts"
"""Entry of a part's metadata: JSON, name to [shape, box] of each tensor that is not whole."""

SHARD = "shard-"
"""Begins the name of a group of tensors that one server has written: its part of the optimizer's
state."""

TABLE = "table-"
"""The same, of its rows of embeddings, named as here."""

ROWS = "rows"
"""Entry of such a file's metadata: JSON, name to [rows of the whole, first, step]."""


class TensorPiece(NamedTuple):
    """A part of a tensor, and where its values are."""

    cut: BoxCut
    dtype: torch.dtype
    fetch: Callable[[tuple[slice, ...] | None], Tensor]
    """Gives the values, or some of them; they may change with the source."""
    flat: tuple[int, int] | None = None
    """[start, stop) of the flattened tensor, where the part is no box."""
    every: tuple[int, int] | None = None
    """The first of its rows and the distance to the next, where these are the part."""


class Pieces:
    """The tensors of a checkpoint, by name, each read when it is asked for.

    Args:
        found: the pieces of each tensor, and its whole shape.
        source: where they are from, for messages.
        numbers: what an optimizer keeps beside tensors, as `optimizer/PARAMETER/STATE`.
        options: of each optimizer, by the name of its group, its state dict without its state.
        partial: whether they are what one rank has, and need not be all of each tensor.

    Raises:
        CheckpointError: a part of a tensor is in none of the pieces; names it.
    """

    def __init__(
        self,
        found: Mapping[str, Sequence[TensorPiece]],
        source: object,
        *,
        numbers: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> None:
        self._found, self._source, self._partial = dict(found), source, partial
        self.numbers, self.options = dict(numbers or {}), dict(options or {})
        for name, pieces in self._found.items():
            self._check(name, pieces)

    def _check(self, name: str, pieces: Sequence[TensorPiece]) -> None:
        first = pieces[0]
        for piece in pieces:
            if piece.cut.shape != first.cut.shape or piece.dtype != first.dtype:
                raise CheckpointError(
                    f"{self._source}: {name} is {first.dtype} {list(first.cut.shape)} in one file "
                    f"and {piece.dtype} {list(piece.cut.shape)} in another: they are of two models."
                )
        missing: object = None
        if first.flat is not None:
            ends = [0, *(piece.flat[1] for piece in pieces if piece.flat)]
            whole_size = elements(whole(first.cut.shape))
            if [piece.flat[0] for piece in pieces if piece.flat] != ends[:-1] or (
                ends[-1] != whole_size
            ):
                missing = f"some of its {whole_size} elements"
        elif first.every is not None:
            there = {piece.every for piece in pieces}
            if there != {(n, len(pieces)) for n in range(len(pieces))}:
                missing = f"some of its {first.cut.shape[0]} rows"
        elif not self._partial:
            lacking = gap(first.cut.shape, [piece.cut.box for piece in pieces])
            missing = lacking if lacking is None else list(lacking)
        if missing is not None:
            raise CheckpointError(
                f"{self._source}: a part of {name} {list(first.cut.shape)} is in none of its files "
                f"({missing}). Use another checkpoint."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def all(self) -> Iterator[tuple[str, TensorPiece]]:
        """Every piece, with the name of its tensor."""
        return ((name, piece) for name, pieces in self._found.items() for piece in pieces)

    def names(self, kind: str) -> list[str]:
        """What follows `KIND/` in the names of that kind."""
        return [name[len(kind) + 1 :] for name in self._found if name.startswith(f"{kind}/")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._found[name][0].cut.shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor."""
        return self._found[name][0].dtype

    def like(self, name: str) -> Tensor:
        """A tensor of the whole's shape and type, without values."""
        return torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")

    def marks(self, name: str) -> set[int]:
        """Of the places where a tensor's values are; two names have one in common if tied."""
        return {id(piece.fetch) for piece in self._found.get(name, ())}

    def same(self, one: str, other: str) -> bool:
        """Whether two names were tied when they were saved."""
        return not self.marks(one).isdisjoint(self.marks(other))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A copy of what is in a box of a tensor, on the CPU; without one, of the whole tensor.

        Nothing else is read, except of a tensor in flat ranges.

        Raises:
            CheckpointError: it cannot be read, or a file is not the one that was saved.
        """
        pieces = self._found[name]
        box = whole(self.shape(name)) if box is None else box
        out = torch.empty(extent(box), dtype=pieces[0].dtype)
        if not out.numel():
            return out
        if pieces[0].flat is not None:
            flat = torch.cat([piece.fetch(None).reshape(-1) for piece in pieces])
            return out.copy_(flat.view(self.shape(name))[inside(box, whole(self.shape(name)))])
        if pieces[0].every is not None:
            for piece in pieces:
                _copy_rows(piece, out, box)
            return out
        filled = set[Box]()
        for piece in pieces:
            both = meet(piece.cut.box, box)
            if both is None or both in filled:
                continue
            part = None if both == piece.cut.box else inside(both, piece.cut.box)
            out[inside(both, box)] = piece.fetch(part)
            filled.add(both)
        if self._partial and sum(map(elements, filled)) != out.numel():
            raise CheckpointError(f"{self._source} does not hold {list(box)} of {name}.")
        return out


def _copy_rows(piece: TensorPiece, out: Tensor, box: Box) -> None:
    """Copy those rows of a box that are in a piece."""
    assert piece.every is not None
    (first, step), ((start, stop), *_) = piece.every, box
    low, high = (max(0, -(-(at - first) // step)) for at in (start, stop))  # of its own rows
    if low < high:
        own = piece.fetch((slice(low, high), *(slice(*each) for each in box[1:])))
        out[first + low * step - start :: step] = own


def held_pieces(snapshot: Snapshot, source: object) -> Pieces:
    """The parts that one rank has, as its snapshot holds them in memory."""
    found: dict[str, list[TensorPiece]] = {}
    for group in (PART, COPIES):
        tensors = snapshot.tensors.get(group, {})
        tied = tied_names(tensors)
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            cut = snapshot.cuts.get(name, BoxCut(shape, whole(shape)))
            first = found[tied[name]][0] if name in tied else None
            found[name] = [first or TensorPiece(cut, tensor.dtype, _slicer(tensor))]
    options = {
        group: unpack_state(snapshot.tensors.get(group, {}), skeleton)
        for group, skeleton in snapshot.facts.items()
        if of_optimizer(group)
    }
    return Pieces(found, source, options=options, partial=True)


def _slicer(tensor: Tensor) -> Callable[[tuple[slice, ...] | None], Tensor]:
    return lambda part: tensor if part is None else tensor[part]


def of_optimizer(group: str) -> bool:
    """Whether a group of tensors is what an optimizer keeps."""
    return group == "optimizer" or group.startswith("optimizer-")
