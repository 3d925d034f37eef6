"""Before a replica of several processes trains: do its optimizers move what one process would move?

A process has a part of the parameters, and an optimizer may look at more: at the norm of a whole
parameter, or of all of them. So both sides take the same steps with made-up gradients of many sizes
(`recipe/optimizers/made_up.py`), with optimizers that are thrown away, and the moves are compared.
How gradients come about is compared by `gradients.py`.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.data.order import key
from instep.data.reading.generators import preserved
from instep.engine.slots import give
from instep.engine.state.parts import kept_tensors
from instep.errors import InstepError, RecipeError, one_line
from instep.parallel.copies import copied
from instep.parallel.gate import NEAR, Box
from instep.recipe.build import set_generators
from instep.recipe.optimizers.combined import parts_of, step_hooks
from instep.recipe.optimizers.made_up import STEPS, MadeUp, fitting, moving
from instep.state.boxes import box_of
from instep.worker.mesh_trial import gradients as mesh_check
from instep.worker.replica.replica import Replica

Build = Callable[[nn.Module], Optimizer]
"""Makes the recipe's optimizer for a model."""

BY_ELEMENT = frozenset(
    (
        *(torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam),
        *(torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.RMSprop, torch.optim.Rprop, torch.optim.SGD),
    )
)
"""Treat each element of a parameter by itself, so that a part of it moves as in the whole."""

_ROUNDING = 8
"""How many times the rounding of a parameter its moves may differ by."""

_NEAR, _ZERO = len(STEPS), len(STEPS) + 1
"""Rows of the table below those with the weights of moves: what they may differ by, and whether a
parameter is zero."""


class OptimizerCheck:
    """Compares the optimizers of a replica with that of one process.

    Args:
        model: whole.
        build: makes its optimizer.
        seed: of the job.
        first: whether this process is the first of its replica, which computes the reference.
        needed: whether there is anything to compare.
        small: whether the model has its values.
        stages: of the pipeline; with several a process has some of the parameters only.
    """

    def __init__(
        self,
        model: nn.Module,
        build: Build,
        seed: int,
        *,
        first: bool,
        needed: bool,
        small: bool,
        stages: int,
    ) -> None:
        self._build, self._seed, self._stages, self._needed = build, seed, stages, needed
        self._named, self._options = "the optimizer", dict[str, Any]()
        self._trained = {n: p.shape for n, p in model.named_parameters() if p.requires_grad}
        self._sparse = {
            name
            for prefix, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
            for name in [f"{prefix}.weight".lstrip(".")]
        }
        every = list(model.parameters())
        size = sum(parameter.numel() for parameter in every)
        small = small and size <= mesh_check.LARGEST and not any(p.is_meta for p in every)
        self._made = MadeUp(self._trained, seed)
        self._reference: dict[str, Tensor] | None = None
        self._table = torch.zeros(len(STEPS) + 2, len(self._trained), dtype=torch.float64)
        if first and needed and small:
            try:
                own = copied(model)
                with _put_back({**dict(model.named_parameters()), **dict(model.named_buffers())}):
                    held = dict(own.named_parameters())
                    self._reference, _ = self._moves(own, held, known=False)
            except Exception:  # the user's optimizer may raise anything, and will again
                self._reference = None

    def run(self, replica: Replica, model: nn.Module) -> str:
        """Compare; all processes of the replica call it, after the model has been split.

        Returns:
            Why an optimizer was not compared that may look at more than single elements; else "".

        Raises:
            RecipeError: a move differs, the optimizer cannot take a step there, or keeps what no
                checkpoint can have; or its steps write to the model what a stage cannot know.
        """
        comm, device = replica.comm, replica.device
        able = torch.tensor([float(self._reference is not None)], device=device)
        comm.broadcast(able)
        if not able.item():
            return self._unknown(model) if self._needed else ""
        table = self._table.to(device)
        comm.broadcast(table)
        self._table = table.cpu()
        parameters = dict(model.named_parameters())
        slots = dict(zip(parameters, replica.slots(list(parameters.values())), strict=True))
        frozen = {name: slots.pop(name) for name in list(slots) if name not in self._trained}
        try:
            with _put_back({**frozen, **dict(model.named_buffers())}) as written:
                moves, optimizer = self._moves(model, slots, known=True)
            for _ in kept_tensors(optimizer, model):
                pass  # raises if no checkpoint could have what it keeps
        except InstepError:
            raise
        except Exception as error:  # the user's
            options = [name for name in ("foreach", "fused") if self._options.get(name)]
            remedy = f"Leave {options[0]} = True out." if options else _REMEDY
            raise RecipeError(
                f"{self._named} cannot take a step where [mesh] splits the parameters "
                f"({type(error).__name__}: {one_line(error)}). {remedy}"
            ) from error
        if self._stages > 1:
            self._judge_writes(replica, written, set(frozen))
        squares = torch.zeros(len(self._trained), dtype=torch.float64, device=device)
        for place, (name, shape) in enumerate(self._trained.items()):
            whole = torch.zeros(shape, dtype=torch.float64, device=device)
            if self._reference is not None:
                whole.copy_(self._reference[name])
            comm.broadcast(whole)
            if name in moves:
                part = whole[_slices(box_of(parameters[name]))]
                squares[place] = (moves[name] - part).square().sum()
        comm.all_reduce(squares).wait()
        self._judge(squares.sqrt().cpu())
        if not self._table[:_NEAR].all():
            return f"{self._named} makes NaN of made-up gradients"
        return ""

    def _unknown(self, model: nn.Module) -> str:
        with preserved():
            optimizer: Any = self._build(model)
        every = [optimizer, *parts_of(optimizer)]
        hooks = any(any(step_hooks(each)) for each in every)
        if all(type(each) in BY_ELEMENT for each in every[1:]) and not hooks:
            return ""
        name = f"{type(optimizer).__name__}{' with hooks' if hooks else ''}"
        return (
            f"its optimizer ({name}) may look at more than single elements, and one process cannot "
            "take its step"
        )

    def _judge_writes(
        self, replica: Replica, written: Mapping[str, Tensor], frozen: set[str]
    ) -> None:
        """Each stage has other parameters, so what a hook makes of them is not the whole."""
        own = 0
        for name, value in written.items():
            number = zlib.crc32(value.cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
            own = key(own, zlib.crc32(name.encode()), number) >> 32
        if frozen & set(written):
            own = -1
        if len({*replica.gather(own), own}) > 1 or own < 0:
            name = repr(next(iter(written))) if written else "buffers or frozen parameters"
            raise RecipeError(
                f"the steps of {self._named} write {name} of the model, as a hook does that keeps "
                "an average of the weights: with mesh.stages a process has only some of the "
                "parameters, and the rest would be left out. Leave the hook or mesh.stages out."
            )

    def _judge(self, found: Tensor) -> None:
        found = found / math.sqrt(len(STEPS))
        wrong = [
            (name, apart)
            for name, apart, near in zip(
                self._trained, found.tolist(), self._table[_NEAR].tolist(), strict=True
            )
            if not apart <= near
        ]
        if wrong:
            name, by = wrong[0]
            others = f", and {len(wrong) - 1} other parameters" if len(wrong) > 1 else ""
            raise RecipeError(
                f"{self._named} would train another model with [mesh] than in one process: given "
                f"the same gradients, its step moves {name!r} otherwise, by {by:.2g} of the "
                f"move{others}. {_REMEDY}"
            )

    def _moves(
        self, model: nn.Module, held: Mapping[str, nn.Parameter], *, known: bool
    ) -> tuple[dict[str, Tensor], Optimizer]:
        """Sum the moves of all steps for the trained parameters that are `held` here; parameters
        are put back.

        Args:
            model: its parameters may be DTensors.
            held: this process's part of each, on the same memory.
            known: whether the table has the weights of moves, which this finds out otherwise: each
                move is about as long as any other then.

        Returns:
            The sums by name, and the optimizer that made them.
        """
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        before = {name: parameter.detach().clone() for name, parameter in held.items()}
        grads = [parameter.grad for parameter in parameters.values()]
        places = {name: place for place, name in enumerate(self._trained)}
        with preserved():
            optimizer = self._build(model)
            self._named, self._options = type(optimizer).__name__, optimizer.defaults
            moving(optimizer.param_groups)
            if not known:
                for name in parameters:
                    self._table[_NEAR, places[name]] = _near(before[name])
                    self._table[_ZERO, places[name]] = not before[name].any()
            starts = {
                name: _part(self._made.weight(name), parameters[name], held[name])
                if self._table[_ZERO, places[name]]
                else before[name]
                for name in parameters
            }
            moves = {name: _wide(torch.zeros_like(each)) for name, each in starts.items()}
            try:
                for number, step in enumerate(STEPS):
                    for name, parameter in parameters.items():
                        held[name].data.copy_(starts[name]).mul_(step.scale)
                        made = self._made.gradient(name, number)
                        part = _part(made, parameter, held[name])
                        held[name].grad = part.to_sparse(1) if name in self._sparse else part
                    own = list(parameters)
                    give([held[name] for name in own], list(parameters.values()))
                    set_generators(key(self._seed, number + 1))
                    optimizer.step()
                    for name, start in starts.items():
                        move = _wide(held[name].detach()) - _wide(start) * step.scale
                        if not known:
                            weight = _weight(move, start, step.scale)
                            self._table[number, places[name]] = weight
                        if weight := float(self._table[number, places[name]]):
                            moves[name].add_(move, alpha=weight)
                return moves, optimizer
            finally:
                with torch.no_grad():
                    for name, value in before.items():
                        held[name].copy_(value)
                        held[name].grad = None
                for parameter, grad in zip(parameters.values(), grads, strict=True):
                    parameter.grad = grad


def _part(whole: Tensor, parameter: Tensor, held: Tensor) -> Tensor:
    """The part of a made-up tensor that belongs to the part of a parameter that is held here."""
    return fitting(whole[_slices(box_of(parameter))], held)


def _wide(value: Tensor) -> Tensor:
    """In float32 at least, in which moves of 16 bits can be summed."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def _near(value: Tensor) -> float:
    """Bound the part of a move that may be rounding."""
    return max(NEAR, _ROUNDING * torch.finfo(value.dtype).eps)


def _weight(move: Tensor, start: Tensor, scale: float) -> float:
    """Weigh a move so that it has a length of 1, or less where rounding is large; 0 if it is not
    finite."""
    rounding = _ROUNDING * torch.finfo(start.dtype).eps * scale * float(_wide(start).norm())
    length = float(_wide(move).norm())
    return 1 / max(length + rounding / _near(start), 1e-30) if math.isfinite(length) else 0.0


@contextmanager
def _put_back(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Undo what is written to tensors; gives what they were, in the end, where it was undone."""
    tensors = {name: each.detach() for name, each in tensors.items() if not each.is_sparse}
    before = {name: each.clone() for name, each in tensors.items()}
    written: dict[str, Tensor] = {}
    try:
        yield written
    finally:
        for name, tensor in tensors.items():
            if not torch.equal(tensor, before[name]):
                written[name] = tensor.clone()
                tensor.copy_(before[name])


_REMEDY = (
    "A process has only a part of the parameters there. Use an optimizer that treats each element "
    "by itself, as SGD and AdamW do, another [mesh], or none."
)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(first, stop) for first, stop in box)
