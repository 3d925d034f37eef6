"""Cutting a model by its plan: parameters become DTensors that say what this rank has of them.

How a plan is found is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from instep.parallel.blocks import repeated_blocks
from instep.parallel.recompute import within
from instep.parallel.tensor.crossings import cross
from instep.parallel.tensor.layers import cut_dims, exchange, kind_of, widths
from instep.parallel.tensor.links import GroupLinks, Links
from instep.parallel.tensor.masks import CutDraws, around, as_planned
from instep.parallel.tensor.plan import Plan

Place = Callable[[nn.Parameter, int], nn.Parameter]
"""From a whole parameter and the dimension that is cut to this rank's part of it."""


def apply_plan(model: nn.Module, plan: Plan, mesh: DeviceMesh) -> None:
    """Cut a model over the ranks of `mesh`, in place; build the optimizer afterwards.

    Where a process has one stage of the model, only the layers that it holds are cut.
    Whatever makes blocks run again in the backward pass comes afterwards too.

    Parameters that are cut become DTensors on `mesh`; names, order and ties stay. Every rank must
    have the same whole parameters, must pass the same micro-batch, and must have the same random
    state when a pass begins.

    Args:
        model: as it was when the plan was found; on the meta device too.
        plan: for as many ranks as `mesh` has.
        mesh: of one dimension.
    """
    assert plan.ranks == mesh.size(), "a plan is for one number of ranks"
    links, plan = GroupLinks(mesh.get_group()), _of_stage(plan, model)

    def place(whole: nn.Parameter, dim: int) -> nn.Parameter:
        first, stop = links.part(whole.shape[dim])
        local = whole.detach().narrow(dim, first, stop - first).clone()
        made = DTensor.from_local(
            local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(made, requires_grad=whole.requires_grad)

    install(model, plan, links, place)
    for name, draws in plan.draws.items():
        whole = as_planned(draws, links, name)
        around(model.get_submodule(name), partial(CutDraws, whole))
        within(model.get_submodule(name), partial(CutDraws, whole))


def _of_stage(plan: Plan, model: nn.Module) -> Plan:
    """The part of a plan that is of layers which are held here: others have no parameters."""

    def there(name: str) -> bool:
        owner, _, key = name.rpartition(".")
        return model.get_submodule(owner)._parameters[key] is not None

    cuts = {name: cut for name, cut in plan.cuts.items() if there(f"{name}.weight")}
    if len(cuts) == len(plan.cuts):
        return plan

    def around_some(name: str) -> bool:
        return not name or any(f"{cut}.".startswith(f"{name}.") for cut in cuts)

    return replace(
        plan,
        cuts=cuts,
        edits={name: values for name, values in plan.edits.items() if around_some(name)},
        summed=tuple(name for name in plan.summed if there(name)),
        draws={name: dims for name, dims in plan.draws.items() if around_some(name)},
    )


def install(model: nn.Module, plan: Plan, links: Links, place: Place) -> Callable[[], None]:
    """Exchange the layers of a plan and what they hold; returns what undoes it."""
    undo: list[Callable[[], None]] = []
    placed: dict[nn.Parameter, nn.Parameter] = {}
    for name, cut in plan.cuts.items():
        module = model.get_submodule(name)
        dims, width = cut_dims(kind_of(module), cut), widths(module)[1]
        for key, parameter in list(module._parameters.items()):
            if parameter is None or key not in dims:
                continue
            if parameter not in placed:
                placed[parameter] = place(parameter, dims[key])
        before = exchange(module, name, cut, links, width)
        undo.append(partial(setattr, module, "__class__", before))
    for module in model.modules():  # every owner of a shared parameter gets the same part
        for key, parameter in module._parameters.items():
            if parameter in placed:
                module._parameters[key] = placed[parameter]
                undo.append(partial(module._parameters.__setitem__, key, parameter))
    for name, values in plan.edits.items():
        module = model.get_submodule(name)
        for key, value in values.items():
            undo.append(partial(setattr, module, key, getattr(module, key)))
            setattr(module, key, value)
    for holder, names in _holders(model, plan.summed).items():
        undo += [each.remove for each in _sum_gradients(holder, names, links)]
    for name, crossings in plan.sequence.items():
        undo += [each.remove for each in cross(model.get_submodule(name), name, crossings, links)]
    if plan.sequence:
        forget = model.register_forward_hook(lambda *_: links.forget(), always_call=True)
        undo.append(forget.remove)

    def undo_all() -> None:
        for each in reversed(undo):
            each()

    return undo_all


def _holders(
    model: nn.Module, summed: Iterable[str]
) -> dict[nn.Module, list[tuple[nn.Module, str]]]:
    """For each block, or each module outside of blocks: its parameters to be summed, by owner."""
    blocks = repeated_blocks(model)
    found: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for name in summed:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        within = (block for path, block in blocks.items() if owner.startswith(f"{path}."))
        found.setdefault(next(within, module), []).append((module, key))
    return found


def _sum_gradients(
    holder: nn.Module, names: list[tuple[nn.Module, str]], links: Links
) -> list[Any]:
    """Have modules read whole parameters as copies whose gradients are summed over the ranks.

    One sum serves all that a block has. A hook on the parameters themselves would be lost where
    FSDP2 puts others in their place.
    """
    copies: dict[tuple[nn.Module, str], Tensor] = {}

    def begin(*_: Any) -> None:
        found: dict[tuple[nn.Module, str], Any] = {
            (module, key): module._parameters[key] for module, key in names
        }
        found = {place: each for place, each in found.items() if each.requires_grad}
        if found and torch.is_grad_enabled():
            made = links.copy_parameters(list(found.values()))
            copies.update(zip(found, made, strict=True))

    def end(*_: Any) -> None:
        copies.clear()

    handles: list[Any] = [
        holder.register_forward_pre_hook(begin),
        holder.register_forward_hook(end, always_call=True),
    ]
    for module in dict.fromkeys(module for module, _ in names):
        handles += _reads(module, copies)
    return handles


def _reads(module: nn.Module, copies: Mapping[tuple[nn.Module, str], Tensor]) -> list[Any]:
    """Have a module read copies of its parameters, as far as there are any, while it is called."""
    kept: list[dict[str, Any]] = []

    def enter(*_: Any) -> None:
        own: Any = module._parameters
        kept.append({key: each for key, each in own.items() if (module, key) in copies})
        own.update({key: copies[module, key] for key in kept[-1]})

    def leave(*_: Any) -> None:
        module._parameters.update(kept.pop())

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
    ]


def squared_norm(parameters: Iterable[Tensor], mesh: DeviceMesh) -> Tensor:
    """This rank's part of the squared norm of the gradients, float64, a scalar.

    Summed over the ranks of `mesh` it is the squared norm of the whole gradients: what is cut
    counts on each rank, what is whole on the first only.
    """
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        grad: Any = parameter.grad
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            grad = grad.to_local()
        elif mesh.get_local_rank():
            continue
        if grad.is_sparse:
            grad = grad.coalesce().values()
        total = total.to(grad.device) + grad.double().square().sum()
    return total
