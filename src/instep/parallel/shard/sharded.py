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

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from instep.errors import RecipeError
from instep.parallel.blocks import repeated_blocks
from instep.parallel.meta_start import give_memory
from instep.parallel.shard.block_order import BlockOrder
from instep.parallel.shard.lockstep import (
    END,
    SUM,
    CheckedGather,
    CollectiveCheck,
    ReduceScatter,
    ShardUnit,
)
from instep.parallel.shard.shardable import owners_of, unshardable
from instep.parallel.shard.whole_sums import sum_gradients
from instep.parallel.slots import Slots

Answer = TypeVar("Answer")


def shard(
    model: nn.Module,
    device_mesh: DeviceMesh,
    *,
    zero: Literal[2, 3] = 3,
) -> Sharded:
    """Share out a model's parameters, in place; the parameters become DTensors, same names.

    Parameters on the meta device (`meta_start.py`) get memory for this rank's rows, to be filled
    from a file. Each block of `repeated_blocks` is gathered by itself, the rest with the first use
    of the model. Parameters that several blocks share are of the rest.

    Args:
        model: the same on all ranks, with the same values.
        device_mesh: one-dimensional, the ranks that share.
        zero: 3: a block's parameters are freed after its forward pass; 2: after the backward pass.

    Raises:
        RecipeError: torch is too old.
    """
    return Sharded(model, device_mesh, zero)


class Sharded:
    """A model shared out over ranks: how it is run, and what this rank holds."""

    slots: Slots
    """What this rank has of each parameter: its rows, or the whole of one that stays whole. The
    optimizer and the strategies move these, in place.

    Their hooks run once per pass with the pass's summed gradient. Not for a parameter that no rank
    used. The order is the same on all ranks: blocks during `backward`, the last used first, each in
    the order of its parameters; the rest of the model at the end of `backward`; parameters that
    stay whole in `finish_pass`."""

    def __init__(self, model: nn.Module, device_mesh: DeviceMesh, zero: int) -> None:
        _check_torch()
        self.model, self._group = model, device_mesh.get_group()
        blocks = repeated_blocks(model)
        owners = owners_of(model, blocks)
        whole = unshardable(model, owners)
        stays = [p in whole for p in model.parameters()]
        names = {p: name for name, p in model.named_parameters()}
        for parameter in model.parameters():
            if parameter not in whole and not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        self._root = _RootPass(model, {p: n for p, n in names.items() if owners[p] == ""})
        modules: dict[str, nn.Module] = {**blocks, "": self._root}
        self._units = [
            ShardUnit(number, name or "(the rest of the model)", 0)
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
        if any(parameter.is_meta for parameter in model.parameters()):
            give_memory(self._root, torch.device(device_mesh.device_type))
        self._by_name = dict(model.named_parameters())
        self._whole = [p for p, kept in zip(self._by_name.values(), stays, strict=True) if kept]
        self.slots = Slots(self._by_name.values())
        self._trained: list[list[nn.Parameter]] = []
        for name, module in modules.items():
            trained = [n for n in held[name] if self._by_name[n].requires_grad]
            self._trained.append(self._watched(module, units[name], trained, block=bool(name)))
        self._whole_unit = ShardUnit(len(self._units), "(parameters kept whole)", len(self._whole))
        self._units.append(self._whole_unit)
        self._trained.append(self._whole)
        self._lockstep = CollectiveCheck(self._group, self._units)
        self._order = BlockOrder(
            self._lockstep,
            [(units[name], block) for name, block in blocks.items()],
            units[""],
            torch.device(device_mesh.device_type),
        )
        for name, module in modules.items():
            _communicate(module, self._lockstep, units[name], asked=bool(name))

    def _watched(
        self, module: nn.Module, unit: ShardUnit, trained: list[str], *, block: bool
    ) -> list[nn.Parameter]:
        """The parameters of a unit that are trained, with hooks that note how it is used."""
        unit.used = [False] * len(trained)
        module.register_forward_pre_hook(_Notes(unit, self.model, trained))
        if block:
            module.register_forward_hook(unit.leave, always_call=True)
            _run_methods(module, unit)
        parameters = [self._by_name[name] for name in trained]
        for place, parameter in enumerate(parameters):
            parameter.register_post_accumulate_grad_hook(self._summed(unit, place))
        return parameters

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of this rank's next passes count. Where they do not, they may be
        anything, and only the other ranks' are summed."""
        self._lockstep.counts = counts

    def run(self, function: Callable[..., Answer], *arguments: Any) -> Answer:
        """Call a function that uses the model: all of it, its methods, or its parameters.

        What it returns must hold every tensor that `backward` is called on. Without gradients, and
        in eval mode, what was gathered is freed again at the end. All ranks call this together.
        """
        for unit in self._units:
            unit.begin_pass()
        self._order.begin_pass()
        try:
            answer: Answer = self._root(lambda: self._order.end_forward(function(*arguments)))
        except RuntimeError as error:
            if "RegisterPostBackwardFunction" not in str(error):  # FSDP2's, around a block's input
                raise
            raise RecipeError(
                "[mesh] shard: a block of the model changes what it is called with in place, which "
                "cannot be split. Write x = x + y in it instead of x += y, and leave inplace = "
                "True out of its first layers."
            ) from error
        for unit in self._units:
            unit.end_forward()
        if not (torch.is_grad_enabled() and self.model.training):
            self._root.reset_iter_state()  # type: ignore[operator]  # FSDP2's, of torch 2.13
        return answer

    def finish_pass(self) -> None:
        """End a pass after `backward`: the gradients of parameters that stay whole are summed.

        All ranks call this after each `backward`; when it returns, all gradients have been told.
        """
        for place, parameter in enumerate(self._whole):
            if not self._lockstep.counts:
                parameter.grad = None
            self._whole_unit.used[place] = parameter.grad is not None
        self._lockstep.begin(self._whole_unit, SUM if self._whole else END).end()
        for unit, parameters in zip(self._units, self._trained, strict=True):
            if unit.runs > 1:
                self._tell(unit, parameters)
        used = [p for p, u in zip(self._whole, self._whole_unit.used, strict=True) if u]
        if used:
            for parameter, total in zip(used, sum_gradients(used, self._group), strict=True):
                parameter.grad = total
            self._tell(self._whole_unit, self._whole)

    def _summed(self, unit: ShardUnit, place: int) -> Callable[[Tensor], None]:
        """FSDP2 calls this when a parameter's gradient is summed, once for each run of a block."""

        def told(parameter: Tensor) -> None:
            if unit.runs == 1:
                self._tell_one(parameter, unit.used[place])

        return told

    def _tell(self, unit: ShardUnit, parameters: list[nn.Parameter]) -> None:
        for parameter, used in zip(parameters, unit.used, strict=True):
            self._tell_one(parameter, used)

    def _tell_one(self, parameter: Tensor, used: bool) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        self.slots.tell(parameter, gradient if used else None)


def _check_torch() -> None:
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise RecipeError(
            f"[mesh] shard needs torch 2.13 or later, and this is torch {torch.__version__}: "
            "update torch, or leave [mesh] out."
        )


def _communicate(
    module: nn.Module, lockstep: CollectiveCheck, unit: ShardUnit, *, asked: bool
) -> None:
    """Make a module gather its parameters, and sum its gradients, in lockstep."""
    assert isinstance(module, FSDPModule)
    gather: Any = CheckedGather(lockstep, unit, asked=asked)
    scatter: Any = ReduceScatter(lockstep, unit)
    module.set_custom_all_gather(gather)
    module.set_custom_reduce_scatter(scatter)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)
    module.set_reduce_scatter_unused_params(True, recurse=False)


class _RootPass(nn.Module):
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


def _run_methods(block: nn.Module, unit: ShardUnit) -> None:
    """Have FSDP2 see the block's own methods, if others call them instead of the block.

    It gathers parameters only for `forward`, so for such a call the method takes its place.
    """

    def run(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run_as_forward(*arguments: Any, **options: Any) -> Any:
            if unit.inside:
                return method(*arguments, **options)
            before = block.__dict__.get("forward")
            block.__dict__["forward"] = method
            try:
                return block(*arguments, **options)
            finally:
                del block.__dict__["forward"]
                if before is not None:
                    block.__dict__["forward"] = before

        return run_as_forward

    for each in type(block).__mro__:
        if each in (nn.Module, object) or each.__module__.startswith("torch."):
            continue
        for name, member in vars(each).items():
            if inspect.isfunction(member) and not name.startswith("_") and name not in _NO_RUN:
                block.__dict__.setdefault(name, run(getattr(block, name)))


_NO_RUN = ("forward", "extra_repr", "reset_parameters")


class _Notes:
    """Notes which gathered parameters get a gradient in a pass."""

    def __init__(self, unit: ShardUnit, model: nn.Module, names: list[str]) -> None:
        self._unit = unit
        self._places = [
            (model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name in names
        ]
        self._seen: nn.Parameter | None = None

    def __call__(self, module: nn.Module, arguments: Any) -> None:
        self._unit.enter()
        if self._places and self._seen is not getattr(*self._places[0]):
            self._seen = getattr(*self._places[0])
            for place, (owner, name) in enumerate(self._places):
                getattr(owner, name).register_post_accumulate_grad_hook(self._note(place))

    def _note(self, place: int) -> Callable[[Tensor], None]:
        def note(parameter: Tensor) -> None:
            self._unit.used[place] |= parameter.grad is not None

        return note
