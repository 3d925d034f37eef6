"""What one rank of a replica has of model and optimizer, as tensors with names, and back.

A plain replica has whole tensors, and `capture.py` takes them as they are. A rank of a mesh has
parts: here they get the names that they have in the whole model, and no DTensor is left. What
is read may be of any other mesh. Way in: `captured_parts`, `restore_optimizer`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.comm.buckets import laid_out_like
from instep.comm.dtensors import is_split, split_like
from instep.engine.beside import put_back
from instep.engine.served.written import kept_as, taken
from instep.errors import CheckpointError, RecipeError
from instep.parallel.host_state import placed
from instep.state.boxes import BoxCut, MeshRank, cut_of, local, primary
from instep.state.pieces import Pieces
from instep.words import listed


class StateParts(NamedTuple):
    """What one rank has."""

    own: dict[str, Tensor]
    """What this rank writes to a checkpoint."""
    copies: dict[str, Tensor]
    """What another rank of the replica writes."""
    cuts: dict[str, BoxCut]
    """Of those that are not whole."""


def parameter_order(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """The names of an optimizer's parameters, in its order; empty for one of no model."""
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return parameter_names(every, model)


def parameter_names(parameters: Iterable[Tensor], model: nn.Module) -> list[str]:
    """The names of parameters in a model, in the order given; empty for one of no model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names.get(id(parameter), "") for parameter in parameters]


def in_order(
    state: dict[str, Any], before: Sequence[str], optimizer: Optimizer, model: nn.Module
) -> dict[str, Any]:
    """A state dict for the order that an optimizer has its parameters in now.

    A recipe that goes through a set of names has them in another order in each process, and a state
    dict knows them by their numbers.

    Args:
        state: of the same optimizer, in another process.
        before: the names of its parameters there, in the order of their numbers.
        optimizer: as the recipe makes it.
        model: has its parameters.

    Raises:
        ValueError: a group has other parameters.
    """
    now = parameter_order(optimizer, model)
    if list(before) == now or not all(before) or len({*before}) < len(before):
        return state
    number, groups = {name: at for at, name in enumerate(now)}, []
    for saved, live in zip(state["param_groups"], optimizer.param_groups, strict=False):
        names = {before[at] for at in saved["params"]}
        own = parameter_names(live["params"], model)
        if names != {*own}:
            other = listed(sorted(names ^ {*own}), 4)
            raise ValueError(f"one of its groups of parameters has others now: {other}")
        groups.append({**saved, "params": [number[name] for name in own]})
    kept = {
        number[before[of]] if isinstance(of, int) else of: each
        for of, each in state["state"].items()
    }
    return {**state, "state": kept, "param_groups": groups}


def captured_parts(
    model: Mapping[str, Tensor],
    aside: Mapping[str, Tensor],
    optimizers: Mapping[str, Optimizer],
    module: nn.Module,
    rank: MeshRank,
) -> StateParts:
    """The tensors of a rank, in their own memory, by their names in the whole model.

    Args:
        model: parameters and persistent buffers, by name.
        aside: other buffers.
        optimizers: by the name of their group.
        module: the model.
        rank: which one this is.

    Raises:
        CheckpointError: a tensor of the model is split in another way than into boxes.
        RecipeError: as `kept_tensors`.
    """
    parts = StateParts({}, {}, {})

    def add(name: str, tensor: Tensor, cut: BoxCut | None, writes: bool) -> None:
        (parts.own if writes else parts.copies)[name] = local(tensor)
        if cut is not None:
            parts.cuts[name] = cut

    for kind, tensors in (("model", model), ("aside", aside)):
        for name, tensor in tensors.items():
            add(f"{kind}/{name}", tensor, cut_of(tensor, name), primary(tensor, rank))
    for group, optimizer in optimizers.items():
        for name, parameter, kept, tensor, own in kept_tensors(optimizer, module):
            cut, writes = cut_of(parameter, name), primary(parameter, rank)
            begins = cut is None or not any(first for first, _ in cut.box)
            mine = writes and (own is not None or begins)  # a number is that of all parts
            add(f"{group}/{name}/{kept}", tensor, own, mine)
    return parts


def kept_tensors(
    optimizer: Optimizer, model: nn.Module
) -> Iterator[tuple[str, nn.Parameter, str, Tensor, BoxCut | None]]:
    """What an optimizer keeps: its parameter, by name too, its own name, and which part it is.

    Raises:
        RecipeError: it is neither a tensor nor a number, or split otherwise than its parameter.
        CheckpointError: the optimizer moves a parameter that is not one of the model's.
    """
    for name, parameter in _named(optimizer, model):
        cut = cut_of(parameter, name)
        for kept, value in optimizer.state.get(parameter, {}).items():
            kept, tensor = kept_as(kept, value, optimizer, "[mesh]")
            try:
                own = cut_of(tensor)
                fits = own is None or own == cut
            except CheckpointError:
                own, fits = None, False
            if not fits:
                raise RecipeError(
                    f"the optimizer {type(optimizer).__name__} keeps {kept!r} for {name} split "
                    "otherwise than the parameter, and with [mesh] no checkpoint can have that. "
                    "Use another optimizer, another [mesh], or none."
                )
            yield name, parameter, kept, tensor, own


def rank_state(
    own: Mapping[str, Tensor],
    remembered: Mapping[str, Mapping[str, Tensor]],
    model: nn.Module,
    rank: MeshRank,
) -> tuple[dict[str, Tensor], dict[str, BoxCut]]:
    """What a rank writes to a checkpoint beside model and optimizer, and which parts they are.

    Args:
        own: state of single workers, summed over the ranks of this place in all replicas, as
            `KIND/PARAMETER`; shaped like what this rank has of the parameter.
        remembered: by the name of its group, what a strategy has the same in all replicas.
        model: has the parameters.
        rank: which one this is.
    """
    parameters = dict(model.named_parameters())
    tensors, cuts = dict[str, Tensor](), dict[str, BoxCut]()
    for name, tensor in own.items():
        parameter = parameters[name.split("/", 1)[1]]
        if primary(parameter, rank):
            tensors[f"own/{name}"] = tensor
            if (cut := cut_of(parameter, name)) is not None:
                cuts[f"own/{name}"] = cut
    for group, state in remembered.items():
        tensors |= {f"{_of_rank(rank)}/{group}/{name}": tensor for name, tensor in state.items()}
    return tensors, cuts


def read_rank_state(
    pieces: Pieces, saved_on: object, model: nn.Module, rank: MeshRank | None
) -> dict[str, dict[str, Tensor]]:
    """By group, what `rank_state` gave: `own` on any mesh, the rest on the same one only.

    Args:
        pieces: of the checkpoint.
        saved_on: `mesh_of` the rank that saved; None for plain replicas.
        model: has the parameters.
        rank: which one this is; None where one process has a whole replica.
    """
    found: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    parameters = dict(model.named_parameters())
    for name in pieces.names("own"):
        parameter = parameters.get(name.split("/", 1)[1])
        if parameter is not None:  # not one of another stage
            cut = cut_of(parameter, name)
            found["own"][name] = pieces.read(f"own/{name}", cut and cut.box).to(parameter.device)
    if rank is not None and saved_on == mesh_of(rank):
        for name in pieces.names(_of_rank(rank)):
            group, _, own = name.partition("/")
            found[group][own] = pieces.read(f"{_of_rank(rank)}/{name}")
    return dict(found)


def mesh_of(rank: MeshRank) -> list[int]:
    """What a checkpoint says of the mesh that saved it."""
    return [rank.mesh.shard, rank.mesh.tensor, rank.mesh.stages]


def _of_rank(rank: MeshRank) -> str:
    return f"rank-{rank.worker % rank.mesh.ranks}"


def restore_optimizer(pieces: Pieces, group: str, optimizer: Optimizer, model: nn.Module) -> None:
    """Give an optimizer the state that was saved, for the parts of the parameters that it moves.

    Args:
        pieces: with tensors `GROUP/PARAMETER/STATE`, saved on any mesh.
        group: of this optimizer.
        optimizer: as the recipe makes it; what it keeps is replaced.
        model: has its parameters.

    Raises:
        CheckpointError: what was saved does not fit.
        KeyError, ValueError: it is of another optimizer.
    """
    options = dict(pieces.options[group])
    saved = options["param_groups"]
    live = optimizer.state_dict()["param_groups"]
    if len(saved) != len(live):
        raise ValueError(f"it had {len(saved)} groups of parameters and has {len(live)}")
    options["param_groups"] = [
        {**theirs, **{key: ours[key] for key in ("params", "param_names") if key in ours}}
        for theirs, ours in zip(saved, live, strict=True)
    ]
    others = {name: _copied(value) for name, value in options.get("state", {}).items()}
    optimizer.load_state_dict({**options, "state": others})
    kept: defaultdict[str, list[str]] = defaultdict(list)
    for name in dict.fromkeys([*pieces.names(group), *_numbers(pieces, group)]):
        moved, _, state = name.rpartition("/")
        kept[moved].append(state)
    aliases: defaultdict[int, list[str]] = defaultdict(list)
    for alias, tensor in model.named_parameters(remove_duplicate=False):
        aliases[id(tensor)].append(alias)
    moves = {id(parameter) for _, parameter in _named(optimizer, model)}
    for held, names in aliases.items():
        if held not in moves and (lost := next((name for name in names if name in kept), None)):
            raise ValueError(f"it moved {lost}, and does not now")
    for _, parameter in _named(optimizer, model):
        saved_as = next((each for each in aliases[id(parameter)] if each in kept), None)
        if saved_as is not None:
            of = f"{group}/{saved_as}"
            values = dict(_value(pieces, of, state, parameter) for state in kept[saved_as])
            optimizer.state[parameter] = placed(optimizer, values)
    put_back(optimizer.state)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _numbers(pieces: Pieces, group: str) -> Iterable[str]:
    return (name[len(group) + 1 :] for name in pieces.numbers if name.startswith(f"{group}/"))


def _value(pieces: Pieces, of: str, state: str, parameter: Tensor) -> tuple[str, Any]:
    """One thing that an optimizer keeps for a parameter, as it keeps it."""
    name = f"{of}/{state}"
    if name in pieces.numbers:
        if isinstance(value := pieces.numbers[name], Tensor | list | tuple | dict):
            raise CheckpointError(f"{name} is a {type(value).__name__}, which no mesh can split.")
        return state, value
    if pieces.shape(name) != tuple(parameter.shape) or state == "step":
        value = pieces.read(name)
        return taken(state, value if value.dim() == 0 else value.to(parameter.device))
    cut, own = cut_of(parameter), local(parameter)
    value = laid_out_like(pieces.read(name, cut and cut.box).to(parameter.device), own)
    if is_split(parameter):
        value = split_like(parameter, value)
    return state, value


def _named(optimizer: Optimizer, model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise CheckpointError(
                    f"the optimizer {type(optimizer).__name__} moves a parameter "
                    f"{list(parameter.shape)} that is not one of the model's: with [mesh] it "
                    "cannot be kept. Give it parameters of the model."
                )
            yield names[id(parameter)], parameter


def restore_aside(pieces: Pieces, buffers: Mapping[str, Tensor]) -> None:
    """Copy what was saved of buffers that the state dict leaves out."""
    with torch.no_grad():
        for name, buffer in buffers.items():
            if f"aside/{name}" in pieces:
                cut = cut_of(buffer, name)
                local(buffer).copy_(pieces.read(f"aside/{name}", cut and cut.box))
