"""A model whose parameters are shared out over the ranks of an axis (FSDP2; ZeRO 2 and 3).

Each rank passes its own micro-batches and holds its rows of each parameter, of its gradient and
of the optimizer's state. Parameters are gathered for one block at a time. Gradients are summed,
never averaged: losses are weighted before `backward`. Steps, replicas, strategies and checkpoints
are not known here.

Not everything can be cut into rows: parameters without dimensions, of sparse gradients, or of
another type of numbers than the rest of their block stay whole on every rank, and their gradients
are summed after the pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from instep.errors import RecipeError
from instep.parallel.blocks import repeated_blocks
from instep.parallel.lockstep import (
    END,
    SUM,
    Gather,
    Lockstep,
    ReduceScatter,
    Unit,
    all_gather,
    wait,
)

Answer = TypeVar("Answer")


def shard(model: nn.Module, device_mesh: DeviceMesh, *, zero: Literal[2, 3] = 3) -> Sharded:
    """Share out a model's parameters, in place; the parameters become DTensors, same names.

    The model may be on the meta device. Each block of `repeated_blocks` is gathered by itself, the
    rest with the first use of the model. Parameters that several blocks share are of the rest.

    Args:
        model: the same on all ranks, with the same values.
        device_mesh: one-dimensional, the ranks that share.
        zero: 3: a block's parameters are freed after its forward pass; 2: after the backward pass.

    Raises:
        RecipeError: torch is too old.
    """
    return Sharded(model, device_mesh, zero)


class Sharded:
    """A model shared out over ranks: how it is run, and what this rank holds.

    The optimizer and the strategies move `local_parameters`, in place.
    """

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, zero: int) -> None:
        if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
            raise RecipeError(
                f"[mesh] shard needs torch 2.13 or later, and this is torch {torch.__version__}: "
                "update torch, or leave [mesh] out."
            )
        self.model, self._group = model, device_mesh.get_group()
        blocks = repeated_blocks(model)
        owners = _owners(model, blocks)
        whole = _unshardable(model, owners)
        self._whole = [p for p in model.parameters() if p in whole]
        names = {p: name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter not in whole and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        self._root = _Pass(model, {p: n for p, n in names.items() if owners[p] == ""})
        modules: dict[str, nn.Module] = {**blocks, "": self._root}
        self._units = [
            Unit(number, name or "(the rest of the model)", 0)
            for number, name in enumerate(modules)
        ]
        units = dict(zip(modules, self._units, strict=True))
        held: dict[str, list[str]] = {name: [] for name in modules}
        for parameter, name in names.items():
            if parameter not in whole:
                held[owners[parameter]].append(name)
        others = {
            name: {p for p in module.parameters() if owners[p] != name or p in whole}
            for name, module in modules.items()
        }
        for name, module in modules.items():
            if name:
                module.register_forward_hook(_own_memory)  # before FSDP2's
            fully_shard(
                module,
                mesh=device_mesh,
                reshard_after_forward=zero == 3 and bool(name),
                ignored_params=others[name],
            )
        self.fsdp: list[FSDPModule] = [m for m in modules.values() if isinstance(m, FSDPModule)]
        self._by_name = dict(model.named_parameters())
        self._local = {p: _local(p) for p in self._by_name.values()}
        self._whole_locals = {self._local[p] for p in self._whole}
        self._notes = []
        for name, module in modules.items():
            trained = [n for n in held[name] if self._by_name[n].requires_grad]
            units[name].used = [False] * len(trained)
            self._notes.append(_Notes(units[name], model, trained))
            module.register_forward_pre_hook(self._notes[-1])
            for place, each in enumerate(trained):
                self._by_name[each].register_post_accumulate_grad_hook(
                    self._summed(units[name], place)
                )
        self._whole_unit = Unit(len(self._units), "(parameters kept whole)", len(self._whole))
        self._units.append(self._whole_unit)
        self._lockstep = Lockstep(self._group, self._units)
        for name, module in modules.items():
            assert isinstance(module, FSDPModule)
            gather: Any = Gather(self._lockstep, units[name])
            scatter: Any = ReduceScatter(self._lockstep, units[name])
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            module.set_reduce_scatter_unused_params(True, recurse=False)

    def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function that uses the model: all of it, its methods, or its parameters.

        What it returns must hold every tensor that `backward` is called on. Without gradients,
        what was gathered is freed again at the end. All ranks call this together.
        """
        for unit in self._units:
            unit.used = [False] * len(unit.used)
        answer: Answer = self._root(lambda: function(*arguments))
        if not torch.is_grad_enabled():
            self.free()
        return answer

    def free(self) -> None:
        """Forget the gathered parameters, as after a pass without `backward`."""
        for module in self.fsdp:
            module.reshard()

    def finish_pass(self) -> None:
        """End a pass after `backward`: the gradients of parameters that stay whole are summed.

        All ranks call this after each `backward`; when it returns, all gradients have been told.
        """
        for place, parameter in enumerate(self._whole):
            self._whole_unit.used[place] = parameter.grad is not None
        self._lockstep.begin(self._whole_unit, SUM if self._whole else END).end()
        for place, parameter in enumerate(self._whole):
            if self._whole_unit.used[place]:
                parameter.grad = self._sum(parameter)
                self._tell(parameter)

    def local_parameters(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter of the model, a plain one that shares the memory of what is held here.

        Their hooks (`register_post_accumulate_grad_hook`) run once per pass with the pass's summed
        gradient in `.grad`, and may take it away; what they leave is added to in the next pass.
        Not for a parameter that no rank used. The order is the same on all ranks: blocks during
        `backward`, the last used first, each in the order of its parameters; the rest of the
        model at the end of `backward`; parameters that stay whole in `finish_pass`.

        Returns:
            This rank's rows of each, the whole of it if it stays whole; may have no elements. The
            same objects each time.
        """
        return [self._local[parameter] for parameter in parameters]

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds a local parameter to a sum over the ranks, as of squares.

        Rows count where they are, a whole parameter on rank 0.
        """
        return self._group.rank() == 0 or parameter not in self._whole_locals

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a DTensor, on every rank; all call this together. Others as they are."""
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def _summed(self, unit: Unit, place: int) -> Callable[[Tensor], None]:
        def told(parameter: Tensor) -> None:
            if unit.used[place]:
                self._tell(parameter)
            else:
                parameter.grad = None

        return told

    def _tell(self, parameter: Tensor) -> None:
        """Move a summed gradient to the plain parameter, and run its hooks."""
        assert isinstance(parameter, nn.Parameter)
        local, gradient, parameter.grad = self._local[parameter], parameter.grad, None
        if isinstance(gradient, DTensor):
            gradient = gradient.to_local()
        assert gradient is not None
        local.grad = gradient if local.grad is None else local.grad + gradient
        for hook in (getattr(local, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(local)

    @torch.no_grad()
    def _sum(self, parameter: nn.Parameter) -> Tensor:
        own = parameter.grad
        if own is None:
            own = torch.zeros_like(parameter)
        own = own.to_dense() if own.is_sparse else own.contiguous()
        every = own.new_empty(self._group.size(), own.numel())
        wait(all_gather(self._group, every.view(-1), own.view(-1)))
        total = every[0].clone()
        for part in every[1:]:
            total += part
        return total.view_as(own)


class _Pass(nn.Module):
    """The root that FSDP2 sees: its forward pass is any function of the model.

    So a recipe may call the model's methods or parts, or read its parameters.
    """

    def __init__(self, model: nn.Module, shared: dict[nn.Parameter, str]) -> None:
        super().__init__()
        self.model = model
        for parameter, name in shared.items():  # else FSDP2 would miss those within blocks
            self.register_parameter(name.replace(".", "/"), parameter)

    def forward(self, function: Callable[[], Any]) -> Any:
        return _own(function())


def _own_memory(module: nn.Module, arguments: Any, output: Any) -> Any:
    return _own(output)


def _own(output: Any) -> Any:
    """Outputs that are no views: FSDP2's hooks on a view are lost, without an error, if the
    program changes it in place."""
    if isinstance(output, Tensor):
        return output if output._base is None or not output.requires_grad else output.clone()
    if type(output) in (tuple, list):
        return type(output)(_own(each) for each in output)
    if isinstance(output, dict):
        for name, each in output.items():
            output[name] = _own(each)
    return output


class _Notes:
    """Notes which gathered parameters get a gradient in a pass."""

    def __init__(self, unit: Unit, model: nn.Module, names: list[str]) -> None:
        self._unit = unit
        self._places = [
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in names
        ]
        self._seen: nn.Parameter | None = None

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        if self._places and self._seen is not getattr(*self._places[0]):
            self._seen = getattr(*self._places[0])
            for place, (owner, name) in enumerate(self._places):
                getattr(owner, name).register_post_accumulate_grad_hook(self._note(place))

    def _note(self, place: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._unit.used[place] = True

        return note


def _owners(model: nn.Module, blocks: dict[str, nn.Module]) -> dict[nn.Parameter, str]:
    """Name of the block that each parameter is gathered with; "" for the rest of the model."""
    inside: dict[nn.Module, str] = {}
    owners: dict[nn.Parameter, str] = {}
    for name, block in blocks.items():
        for module in block.modules():
            inside[module] = "" if module in inside else name
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owner = inside.get(module, "")
            owners[parameter] = owner if owners.get(parameter, owner) == owner else ""
    return owners


def _unshardable(model: nn.Module, owners: dict[nn.Parameter, str]) -> set[nn.Parameter]:
    """Parameters that FSDP2 cannot cut into rows."""
    whole: set[nn.Parameter] = {p for p in model.parameters() if p.dim() == 0 or p.numel() == 0}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            whole.update(module.parameters(recurse=False))
    sizes: dict[str, dict[torch.dtype, int]] = {}
    for parameter, owner in owners.items():
        if parameter not in whole and parameter.requires_grad:
            types = sizes.setdefault(owner, {})
            types[parameter.dtype] = types.get(parameter.dtype, 0) + parameter.numel()
    for parameter, owner in owners.items():
        types = sizes.get(owner, {})
        if (
            parameter.requires_grad
            and types
            and parameter.dtype != max(types, key=types.__getitem__)
        ):
            whole.add(parameter)
    return whole


def _local(parameter: nn.Parameter) -> nn.Parameter:
    held = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return nn.Parameter(held.detach(), requires_grad=parameter.requires_grad)
