"""Before a replica of several processes trains: do its optimizers move what one process would move?

A process has a part of the parameters, and an optimizer may look at more: at the norm of a whole
parameter, or of all of them. So both sides take two steps with the same made-up gradients, with
optimizers that are thrown away, and the moves are compared. How gradients come about is compared
by `mesh_check.py`.
"""

from __future__ import annotations

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
from instep.recipe.optimizers.combined import parts_of
from instep.state.boxes import box_of
from instep.worker.mesh_trial import gradients as mesh_check
from instep.worker.replica.replica import Replica

Build = Callable[[nn.Module], Optimizer]
"""Makes the recipe's optimizer for a model."""

STEPS = 2

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
        self._reference: dict[str, Tensor] | None = None
        if first and needed and small:
            try:
                own = copied(model)
                with _put_back({**dict(model.named_parameters()), **dict(model.named_buffers())}):
                    self._reference, _ = self._moves(own, dict(own.named_parameters()))
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
        parameters = dict(model.named_parameters())
        slots = dict(zip(parameters, replica.slots(list(parameters.values())), strict=True))
        frozen = {name: slots.pop(name) for name in list(slots) if name not in self._trained}
        try:
            with _put_back({**frozen, **dict(model.named_buffers())}) as written:
                moves, optimizer = self._moves(model, slots)
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
        sums = torch.zeros(len(self._trained), 3, dtype=torch.float64, device=device)
        for place, (name, shape) in enumerate(self._trained.items()):
            known = torch.zeros(shape, dtype=torch.float64, device=device)
            if self._reference is not None:
                known.copy_(self._reference[name])
            comm.broadcast(known)
            if name in moves:
                move, slot = known[_slices(box_of(parameters[name]))], slots[name]
                rounding = _ROUNDING * torch.finfo(slot.dtype).eps * slot.detach().norm()
                sums[place, 0] = (moves[name] - move).square().sum()
                sums[place, 1] = (NEAR * move.norm() + rounding).square()
                sums[place, 2] = move.square().sum()
        comm.all_reduce(sums).wait()
        self._judge(sums.sqrt().cpu())
        return ""

    def _unknown(self, model: nn.Module) -> str:
        with preserved():
            optimizer: Any = self._build(model)
        every = [optimizer, *parts_of(optimizer)]
        hooks = any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in every)
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
        wrong = [
            (name, apart / max(length, 1e-300))
            for name, (apart, allowed, length) in zip(self._trained, found.tolist(), strict=True)
            if not apart <= allowed
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
        self, model: nn.Module, held: Mapping[str, nn.Parameter]
    ) -> tuple[dict[str, Tensor], Optimizer]:
        """The moves of all trained parameters that are `held` here, and what made them; parameters
        are put back.

        Args:
            model: its parameters may be DTensors.
            held: this process's part of each, on the same memory.
        """
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        before = {name: parameter.detach().clone() for name, parameter in held.items()}
        grads = [parameter.grad for parameter in parameters.values()]
        with preserved():
            optimizer = self._build(model)
            self._named, self._options = type(optimizer).__name__, optimizer.defaults
            try:
                for step in range(1, 1 + STEPS):
                    for name, parameter in parameters.items():
                        held[name].grad = self._gradient(name, parameter, held[name], step)
                    own = list(parameters)
                    give([held[name] for name in own], list(parameters.values()))
                    set_generators(key(self._seed, step))
                    optimizer.step()
                moves = {name: held[name].detach() - before[name] for name in parameters}
                return moves, optimizer
            finally:
                with torch.no_grad():
                    for name, value in before.items():
                        held[name].copy_(value)
                        held[name].grad = None
                for parameter, grad in zip(parameters.values(), grads, strict=True):
                    parameter.grad = grad

    def _gradient(self, name: str, parameter: Tensor, held: Tensor, step: int) -> Tensor:
        """Made up, as large as gradients are: the part of it that is held here."""
        generator = torch.Generator().manual_seed(key(self._seed, zlib.crc32(name.encode()), step))
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 10
        part = noise[_slices(box_of(parameter))].to(held.device, held.dtype)
        return part.to_sparse(1) if name in self._sparse else part


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
