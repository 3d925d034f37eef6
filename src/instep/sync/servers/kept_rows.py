"""The rows that one server has, and what its optimizer keeps for each: memory that outlives it.

They are far more than a step touches, so they lie there once, and not in two slots as other state
does. What a step makes of the rows that it touches is staged beside them, in the slot of its commit
(`server_sync.py`), and copied over the rows at the commit. A server that is killed in the middle
of that leaves the slot: the next one copies it over the rows once more.

It knows no messages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from instep.sync.generation import Memory

_ALIGNED = 64

_LEAST = 1024
"""Rows that are staged at least: the layout of memory is not to change at every step."""


class TableSpec(NamedTuple):
    """What is the same on every rank."""

    rows: int
    dim: int
    dtype: torch.dtype


class RowMover(Protocol):
    """The optimizer, for rows of tables."""

    def begin(self, table: int) -> dict[str, Tensor]:
        """What it keeps for the rows of a table, by name: for each row as of `row` [...], given as
        [1, ...]; or a number for all, without dims.

        Raises:
            RecipeError: it moves rows otherwise than by their own gradient and state.
        """

    def move(
        self, table: int, rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Move rows [count, dim] in place; the state [count, ...] that they have then."""


Fill = Callable[[int, int, int, Tensor, dict[str, Tensor]], None]
"""`fill(table, first, step, rows, state)` writes the rows `first`, `first + step` and so on of a
table, and what the optimizer keeps for them, where that is known."""


class _StagedRows(NamedTuple):
    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]


class KeptRows:
    """One server's part of every table.

    Args:
        specs: of the tables.
        mover: the optimizer.
        mine: which server this is.
        servers: how many there are.
        memory: that outlives the process.
    """

    def __init__(
        self, specs: Sequence[TableSpec], mover: RowMover, mine: int, servers: int, memory: Memory
    ) -> None:
        self._mover = mover
        self.every = mine, servers
        """The first of its rows in the whole table, and the distance to the next."""
        self._begin = [mover.begin(table) for table in range(len(specs))]
        counts = [len(range(mine, spec.rows, servers)) for spec in specs]
        wanted = list[tuple[tuple[int, ...], torch.dtype]]()
        for spec, begin, count in zip(specs, self._begin, counts, strict=True):
            wanted.append(((count, spec.dim), spec.dtype))
            wanted += [((count, *of.shape[1:]), of.dtype) for of in begin.values() if of.dim()]
        parts = iter(_laid_out(wanted, memory))
        self.values = list[Tensor]()
        """[rows, dim] of each table."""
        self.state = list[dict[str, Tensor]]()
        """What the optimizer keeps: [rows, ...], or a number."""
        for begin in self._begin:
            self.values.append(next(parts))
            self.state.append({n: next(parts) if of.dim() else of for n, of in begin.items()})
        self._room = [_LEAST] * len(specs)
        self._sums = dict[int, tuple[Tensor, Tensor]]()
        self._staged = dict[int, _StagedRows]()

    def take(self, fill: Fill | None, left: Mapping[str, Tensor]) -> None:
        """Begin with what `fill` gives; or with what lies in memory, and was staged last."""
        for table, begin in enumerate(self._begin) if fill is not None else ():
            assert fill is not None
            state = self.state[table]
            for name, of in begin.items():
                if of.dim():
                    state[name].copy_(of.expand_as(state[name]))
                else:
                    state[name] = of.clone()
            fill(table, *self.every, self.values[table], state)
        for table in range(len(self.values)) if left else ():
            count, start = int(left[f"{table}/count"]), f"{table}/state/"
            self._staged[table] = _StagedRows(
                left[f"{table}/ids"][:count],
                left[f"{table}/rows"][:count],
                {
                    name[len(start) :]: each[:count] if each.dim() else each
                    for name, each in left.items()
                    if name.startswith(start)
                },
            )
        if left:
            self.apply()

    # ---- a step

    def sum(self, sums: dict[int, tuple[Tensor, Tensor]]) -> None:
        """What workers have sent, added up: by table the rows, and their gradient."""
        self._sums = sums

    def square(self, scale: float) -> float:
        """The sum of the squares of the gradient, once it is scaled."""
        return sum(float((each.double() * scale).square().sum()) for _, each in self._sums.values())

    @torch.no_grad()
    def move(self, scale: float) -> None:
        """Stage what the optimizer makes of the rows that have a gradient."""
        for table, (ids, gradient) in self._sums.items():
            rows, kept = self.values[table][ids], self.state[table]
            state = {name: each[ids] if each.dim() else each for name, each in kept.items()}
            gradient = gradient * scale if scale != 1.0 else gradient
            self._staged[table] = _StagedRows(
                ids, rows, self._mover.move(table, rows, gradient, state)
            )
        self._sums = {}

    def staged(self) -> dict[str, Tensor]:
        """What `move` has staged, in tensors whose shapes seldom change; as for `take`."""
        found = dict[str, Tensor]()
        for table, (values, kept) in enumerate(zip(self.values, self.state, strict=True)):
            staged = self._staged.get(table)
            count = len(staged.ids) if staged is not None else 0
            while self._room[table] < count:
                self._room[table] *= 2
            room = self._room[table]

            def roomy(like: Tensor, part: Tensor | None, room: int = room) -> Tensor:
                whole = torch.zeros(room, *like.shape[1:], dtype=like.dtype)
                if part is not None:
                    whole[: len(part)] = part
                return whole

            found[f"{table}/count"] = torch.tensor(count)
            found[f"{table}/ids"] = roomy(torch.empty(0, dtype=torch.int64), staged and staged.ids)
            found[f"{table}/rows"] = roomy(values, staged and staged.rows)
            for name, each in kept.items():
                new = staged.state[name] if staged is not None else None
                if each.dim():
                    found[f"{table}/state/{name}"] = roomy(each, new)
                else:
                    found[f"{table}/state/{name}"] = each if new is None else new
        return found

    @torch.no_grad()
    def apply(self) -> None:
        """The step happens."""
        for table, (ids, rows, state) in self._staged.items():
            self.values[table][ids] = rows
            for name, each in state.items():
                if each.dim():
                    self.state[table][name][ids] = each
                else:
                    self.state[table][name] = each.clone()
        self._staged = {}

    def abandon(self) -> None:
        """It does not."""
        self._sums, self._staged = {}, {}


def added_up(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The sum of gradients of rows: which rows, ascending, and [rows, dim].

    Args:
        parts: rows, each once, and their gradients; added in this order.
    """
    ids = torch.unique(torch.cat([own for own, _ in parts]))
    total = torch.zeros(len(ids), parts[0][1].shape[1], dtype=parts[0][1].dtype)
    for own, gradient in parts:
        total[torch.searchsorted(ids, own)] += gradient
    return ids, total


def _laid_out(
    wanted: Sequence[tuple[tuple[int, ...], torch.dtype]], memory: Memory
) -> list[Tensor]:
    """Tensors one after the other in lasting memory."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in wanted]
    padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
    flat, at, found = memory.lasting(sum(padded)), 0, []
    for (shape, dtype), size, room in zip(wanted, sizes, padded, strict=True):
        found.append(flat[at : at + size].view(dtype).view(shape))
        at += room
    return found
