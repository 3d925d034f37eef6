"""Buffers that a forward pass changes, such as BatchNorm's running statistics.

Each pass of a step starts from the committed buffers and proposes new ones;
the step's are the mean of the proposals, weighted by samples, over all passes
of all workers. So they are the same at any number of workers, and for an
exponential average the step counts once, with the mean of its micro-batches'
statistics. Where they must be the same to the bit, each pass's proposal
travels in a row of its own, and every worker adds the rows in one order.
Buffers that nothing changes cost nothing. What a hook of the optimizer writes
(an average of the weights) comes after that mean, and is committed as it is.

A pass may give a buffer its shape: an observer of quantisation begins with empty ones, and a
module may register one as None. All passes of a step must then give it the same shape, which
the ranks that ran none of them are told; the step's value is the mean of those that did.

How a change is seen, `live_buffers.py` knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.engine.state.frozen import FrozenParameters
from instep.engine.state.live_buffers import DIMS, DTYPES, LiveBuffers
from instep.errors import RecipeError, one_line

_RESHAPED = float(1 << 20)
"""What a rank adds to the mark of a buffer that its passes gave another shape; a multiple of it
is more than the ranks of any group."""

_ROUNDING = 1e-9
"""Weights that miss 1 by less are whole; times an infinite old value, it would not be nothing."""


class BufferLayout(NamedTuple):
    """What a pass made of a buffer, but for its values."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class Buffers:
    """The buffers of one model, watched from pass to pass.

    Args:
        model: whose.
        parts: 0 for means that are equal to rounding; else the passes of a
            step, at most, and the mean has the same bits whichever worker runs which.
        alone: whether each step is one pass, which may do what one machine may.
    """

    def __init__(self, model: nn.Module, *, parts: int = 0, alone: bool = False) -> None:
        self._rows = parts or 1
        self._frozen = FrozenParameters(() if alone else model.named_parameters())
        self._all = LiveBuffers(model)
        self._proposed: dict[int, dict[int, tuple[float, Tensor]]] = {}  # buffer, row
        self._layouts: dict[int, BufferLayout] = {}
        """Of the buffers to which the passes of this step gave another shape."""
        self._agreed: _Agreed | None = None  # staged until `apply`
        self._seldom: set[int] = set()
        """Those moved uncounted that a pass beside those of the samples moved first."""
        self.moved: set[int] = set()
        """The identity (`id`) of each buffer that a committed step has moved."""

    def __len__(self) -> int:
        return len(self._all)

    def begin_step(self) -> None:
        """Passes are about to run, and may give buffers their shape."""
        self._all.begin_step()

    def after_pass(self, weight: float, number: int, *, beside: bool = False) -> bool:
        """Take in what a pass did to the buffers, undo it, and say whether it did anything.

        Args:
            weight: what the pass counts in the step; at 0 what it did is undone, and no more.
            number: of the pass, among all of the step.
            beside: whether it is one beside those that compute the samples: then it has to do
                only with the buffers that it changes.
        """
        self._frozen.refuse_written()
        return bool(self._all) and self._take_in(weight, number, beside=beside)

    @torch.no_grad()
    def _take_in(self, weight: float, number: int, *, beside: bool) -> bool:
        known = set(self._all.uncounted)
        moved = self._all.moved()
        self._all.seen()
        self._seldom |= self._all.uncounted - known if beside else set()
        moved = [i for i in moved if not (beside or i in self._seldom) or self._all.differs(i)]
        if not weight:
            for index in moved:
                self._all.restore(index)
            return False
        for index in moved:
            now = self._all.now(index, "the forward pass")
            self._note_layout(index, now)
            rows = self._proposed.setdefault(index, {})
            sum_of_weights, total = rows.get(number % self._rows, (0.0, torch.zeros(())))
            total = total.to(now.device) + weight * now.to(torch.float64)
            rows[number % self._rows] = (sum_of_weights + weight, total)
            self._all.restore(index)
        return bool(moved)

    def moved_by_pass(self) -> dict[int, Tensor]:
        """What a pass made of the buffers that it moved, by number; before `after_pass`."""
        return {i: self._all.now(i, "the forward pass").clone() for i in self._all.moved()}

    def refuse_reshaped(self, why: str) -> None:
        """Refuse a pass that gave a buffer another shape; before `after_pass`.

        Args:
            why: it may not, and what to do.

        Raises:
            RecipeError: names the buffer.
        """
        for index in self._all.moved():
            self._all.in_shape(index, "the forward pass", f" {why}")

    def move(self, moved: Mapping[int, Tensor]) -> None:
        """Move them as a pass did, of which `moved_by_pass` told."""
        self._all.move(moved)

    def after_update(self) -> None:
        """What wrote since `apply` was the optimizer or a hook of it, as one that averages the
        weights: alike on every worker, and once in the step. So it is committed as it is."""
        if self._all:
            self._commit_written()
        self._frozen.note()

    @torch.no_grad()
    def _commit_written(self) -> None:
        for index in self._all.moved():
            now, committed = self._all.in_shape(index, "a hook of the optimizer")
            committed.copy_(now)
            self.moved.add(id(self._all.live[index]))
            self._all.restore(index)

    def _note_layout(self, index: int, now: Tensor) -> None:
        """Keep the shape that a pass gave a buffer, if it is another than the committed one.

        Raises:
            RecipeError: another pass of the step gave it another one.
        """
        committed, given = self._all.committed[index], BufferLayout(now.dtype, tuple(now.shape))
        known = self._layouts.get(index)
        if known is None and committed is not None:
            if committed.shape == now.shape:
                return
            if index in self._proposed:
                known = BufferLayout(committed.dtype, tuple(committed.shape))
        if known is not None and known.shape != given.shape:
            raise unequal(*self._all.owners[index], [known.shape, given.shape])
        self._layouts[index] = known or given

    def marks(self) -> list[float]:
        """[buffers]: above 0 for each that this rank's passes moved, to be summed over the
        ranks."""
        return [
            _RESHAPED if index in self._layouts else 1.0 if index in self._proposed else 0.0
            for index in range(len(self._all.live))
        ]

    def forget(self) -> None:
        """Drop what the passes proposed, and what was agreed on: they run again."""
        self._proposed.clear()
        self._layouts.clear()
        self._agreed = None

    def undo(self) -> None:
        """Give every buffer its committed value: a pass may have ended in the middle."""
        self.forget()
        self._all.restore_all()

    def exchange(self, marks: list[float], comm: Comm, *, read: float = 1.0) -> None:
        """Agree on every buffer that some rank's passes moved; they move with `apply`.

        Args:
            marks: those of all ranks, summed; equal on each.
            read: the weight of all passes of the step together; below 1 where samples
                were left out, whose share then falls to the others.

        Raises:
            RecipeError: passes gave a buffer different shapes, or move it twice.
            PeerError: another rank went away.
        """
        moved = [index for index, mark in enumerate(marks) if mark > 0]
        if moved:
            self._agree(moved, marks, comm, read)

    @torch.no_grad()
    def _agree(self, moved: list[int], marks: list[float], comm: Comm, read: float) -> None:
        device = self._all.device(moved[0])
        reshaped = [index for index in moved if marks[index] >= _RESHAPED]
        layouts = self._agree_on_layouts(reshaped, comm, device)
        shapes = [self._shape_of(index, layouts) for index in moved]
        width = sum(1 + shape.numel() for shape in shapes)
        table = torch.zeros(self._rows, width, dtype=torch.float64, device=device)
        at = 0
        for index, shape in zip(moved, shapes, strict=True):
            stop = at + 1 + shape.numel()
            for row, (weight, total) in self._proposed.get(index, {}).items():
                table[row, at] = weight
                table[row, at + 1 : stop] = total.expand(shape).reshape(-1)
            at = stop
        comm.all_reduce(table).wait()
        mean = table[0]
        for row in table[1:]:
            mean = mean + row
        if read < 1:
            mean = mean / read
        at = 0
        for index, shape in zip(moved, shapes, strict=True):
            if float(mean[at]) > 1 + _ROUNDING:
                module, name = self._all.owners[index]
                raise RecipeError(
                    f"the buffer {name!r} of a {type(module).__name__} is moved by Recipe.embed "
                    "and by Recipe.batch_loss: one step would move it twice. Use a layer of "
                    "its own for each."
                )
            at += 1 + shape.numel()
        self._proposed.clear()
        self._layouts.clear()
        self._agreed = _Agreed(moved, mean, layouts)

    def _shape_of(self, index: int, layouts: Mapping[int, BufferLayout]) -> torch.Size:
        committed = self._all.committed[index]
        if index in layouts or committed is None:
            return torch.Size(layouts[index].shape)
        return committed.shape

    def _agree_on_layouts(
        self, reshaped: list[int], comm: Comm, device: torch.device
    ) -> dict[int, BufferLayout]:
        """What passes made of the buffers to which some rank's gave another shape.

        Raises:
            RecipeError: not all gave it the same.
        """
        if not reshaped:
            return {}
        table = torch.zeros(comm.size, len(reshaped), 2 + DIMS, dtype=torch.float64)
        for place, index in enumerate(reshaped):
            if index in self._proposed:
                table[comm.rank, place] = torch.tensor(
                    _coded(self._layouts.get(index), self._all.committed[index]),
                    dtype=torch.float64,
                )
        table = table.to(device)
        comm.all_reduce(table).wait()
        layouts = {}
        for index, column in zip(reshaped, table.transpose(0, 1).long().tolist(), strict=True):
            given = [_layout(row) for row in column if row[0]]
            if len(shapes := {each.shape for each in given}) > 1:
                raise unequal(*self._all.owners[index], [*shapes])
            layouts[index] = given[0]
        return layouts

    def apply(self) -> None:
        """Give the buffers the values agreed on, with the parameters of the same step."""
        if self._agreed is not None:
            agreed, self._agreed = self._agreed, None
            self._give(*agreed)

    @torch.no_grad()
    def _give(self, moved: list[int], flat: Tensor, layouts: dict[int, BufferLayout]) -> None:
        at = 0
        for index in moved:
            shape, committed = self._shape_of(index, layouts), self._all.committed[index]
            weight, mean = flat[at], flat[at + 1 : at + 1 + shape.numel()]
            at += 1 + shape.numel()
            value = mean.view(shape)
            if index in layouts:  # no pass has left it as it was: that has another shape
                value = value / weight if 1 - weight > _ROUNDING else value
                dtype = layouts[index].dtype if committed is None else committed.dtype
                committed = torch.empty(shape, dtype=dtype, device=value.device)
                self._all.committed[index] = committed
            elif 1 - weight > _ROUNDING:  # some passes left it as it was
                assert committed is not None
                value = value + (1 - weight) * committed.to(torch.float64)
            assert committed is not None
            committed.copy_(value if committed.is_floating_point() else value.round())
            self._all.restore(index)
            self.moved.add(id(self._all.live[index]))


class _Agreed(NamedTuple):
    moved: list[int]
    mean: Tensor
    layouts: dict[int, BufferLayout]


def _coded(layout: BufferLayout | None, committed: Tensor | None) -> list[int]:
    """The layout that this rank's passes gave a buffer, as numbers: dimensions come after
    their count, so that all are zero where there was no pass."""
    if layout is None:
        assert committed is not None, "else it has another shape"
        layout = BufferLayout(committed.dtype, tuple(committed.shape))
    dims = len(layout.shape)
    return [1 + DTYPES.index(layout.dtype), dims, *layout.shape, *[0] * (DIMS - dims)]


def _layout(coded: list[int]) -> BufferLayout:
    dtype, dims, *shape = coded
    return BufferLayout(DTYPES[dtype - 1], tuple(shape[:dims]))


def unequal(module: nn.Module, name: str, shapes: Sequence[Sequence[int]]) -> RecipeError:
    """The error of passes that gave a buffer different shapes."""
    one, other = (list(shape) for shape in sorted({tuple(shape) for shape in shapes})[:2])
    return RecipeError(
        f"the forward pass gives the buffer {name!r} of a {type(module).__name__} the shape {one} "
        f"after one batch and {other} after another, and a step of several micro-batches cannot "
        "keep both: the shape of what a module keeps must not depend on the batch. Keep it out of "
        "the buffers, or train with workers = 1 and train.micro_batches = 1."
    )


def grown(name: str, error: Exception) -> RecipeError:
    """The error of a pass that failed after one that gave a buffer another shape."""
    return RecipeError(
        f"the buffer {name!r} gets another shape in a pass, and the next pass failed "
        f"({type(error).__name__}: {one_line(error)}): each begins with the buffers as the last "
        "committed step has left them, on whatever worker. Make a table that grows a plain "
        "attribute of its module (self.table = ...), or a buffer of its full length."
    )
