"""The optimizer of a run with servers: each server has it move a part of the parameters.

The recipe's own optimizer object is kept, with its groups: a scheduler that was made for it goes
on to work. Only while it steps do its groups hold the pieces that this process moves; the state
that it makes for them is kept here. Who has which piece, the strategy knows
(`sync/servers/server_sync.py`).
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from instep.comm.buckets import laid_out_like
from instep.data.order import key
from instep.engine.beside import BESIDE, beside, put_back, with_each
from instep.engine.update import OF_UPDATE, Update, options_of
from instep.errors import CheckpointError, RecipeError, SpecError
from instep.recipe.build import set_generators
from instep.recipe.optimizers.combined import parts_of
from instep.sync.generation import SERVED, Piece
from instep.sync.norm import norm

BY_ELEMENT = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.NAdam,
        optim.RAdam,
        optim.Adamax,
        optim.Adadelta,
        optim.Adagrad,
        optim.RMSprop,
        optim.ASGD,
        optim.Rprop,
    }
)
"""Those that move an element by nothing but its own gradient and state."""

NUMBERS = {bool: torch.bool, int: torch.int64, float: torch.float64}
"""The tensors in which numbers of an optimizer's state lie, under names that end with `:int`."""


class ServedUpdate(Update):
    """What moves the parameters, where servers do.

    Args:
        given, named: what `Update` takes.

    Raises:
        SpecError: the job wants what cannot be had with servers.
    """

    where = "sync.name = 'server_sync'"
    """The setting that has each server move a part, for messages."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.scaler.is_enabled():
            raise SpecError(
                "train.precision = 'float16' scales the loss by what the optimizer meets, which "
                "sync.name = 'server_sync' has on servers. Use bfloat16, or all_reduce."
            )
        self.held: Mapping[Piece, nn.Parameter] = {}
        self._states: dict[Piece, dict[str, Any]] = {}
        self._beside: dict[str, Any] = {}  # what the optimizer keeps for no parameter
        self._norm: float | None = None

    @property
    def by_element(self) -> bool:
        """Whether the optimizer may be given a part of a parameter."""
        return all(type(each) in BY_ELEMENT for each in parts_of(self.optimizer))

    def hold(self, pieces: Mapping[Piece, nn.Parameter]) -> None:
        """From now on these are what the optimizer moves here; it keeps state for nothing else.

        Raises:
            RecipeError: the optimizer does more in a step than to move its parameters, each by
                its own gradient.
        """
        optimizer = self.optimizer
        every = {id(each): each for each in (optimizer, *parts_of(optimizer))}.values()
        if any(o._optimizer_step_pre_hooks or o._optimizer_step_post_hooks for o in every):
            raise RecipeError(
                f"the optimizer has step hooks, which look at whole parameters: with {self.where} "
                "each server has only a part. Leave them out (averages of the weights, as EMA), "
                "or use all_reduce."
            )
        state: dict[Any, Any] = optimizer.state
        moved = ((of, kept) for of, kept in state.items() if isinstance(of, Tensor))
        served = {of: kept.pop(SERVED) for of, kept in moved if SERVED in kept}
        if pieces and not self.by_element:
            self._check_apart()
        self.held, whole = dict(pieces), optimizer.state
        for piece, own in self.held.items():
            if (parameter := self.parameters[piece.slot]) in served:
                own.data.copy_(_part(served[parameter], piece, parameter))
        for piece, own in self.held.items():  # what the user has marked a parameter with
            vars(own).update(vars(self.parameters[piece.slot]))
        self._states = {
            piece: {
                name: _fitting(_part(value, piece, self.parameters[piece.slot]), own)
                for name, value in whole.get(self.parameters[piece.slot], {}).items()
            }
            for piece, own in pieces.items()
        }
        self._beside = beside(whole)
        optimizer.state = defaultdict(dict)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn on workers

    def limit(self, squares: Tensor) -> float:
        """Note the norm of the gradient; what to multiply it by."""
        self._norm = norm(squares.tolist())
        return self.factor(self._norm)

    def step(self, number: int, pieces: Collection[Piece]) -> None:
        """Move some of what is held here by its `.grad`."""
        set_generators(key(self._seed, OF_UPDATE, number))
        self._states.update(
            self._moved({piece: self.held[piece] for piece in pieces}, self._states)
        )

    def _moved(
        self, held: Mapping[Piece, nn.Parameter], states: Mapping[Piece, dict[str, Any]]
    ) -> dict[Piece, dict[str, Any]]:
        """One step of the optimizer, of these pieces alone; the state that they have then.

        What it keeps for no parameter moves too.
        """
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        slots = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}
        optimizer.state = defaultdict(dict)
        optimizer.state.update(self._beside)  # type: ignore[arg-type]
        for piece, parameter in held.items():
            optimizer.state[parameter] = states[piece]
        for group in groups:
            mine = {slots.get(id(parameter), -1) for parameter in group["params"]}
            group["params"] = [own for piece, own in held.items() if piece.slot in mine]
        drawn = torch.get_rng_state()
        try:
            optimizer.step()
            states = {piece: optimizer.state[own] for piece, own in held.items()}
            self._beside = beside(optimizer.state)
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            optimizer.state = defaultdict(dict)
        if not self.by_element and not torch.equal(drawn, torch.get_rng_state()):
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} draws random numbers in its step: with "
                f"{self.where} each server would draw its own. Use all_reduce."
            )
        return states

    def _check_apart(self) -> None:
        """Try on copies whether parameters move alone as they do together.

        Raises:
            RecipeError: they do not, or the optimizer keeps in its groups what it has learnt.
        """
        optimizer, whole = self.optimizer, self.optimizer.state
        slots = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}
        chosen = list[int]()  # coupling shows in any two: the smallest of each group
        for group in optimizer.param_groups:
            own = [slots[id(p)] for p in group["params"] if id(p) in slots and p.numel()]
            chosen += sorted(own, key=lambda slot: self.parameters[slot].numel())[:2]
        generator = torch.Generator().manual_seed(0)
        gradients = {
            slot: [torch.randn(self.parameters[slot].shape, generator=generator) for _ in range(2)]
            for slot in chosen
        }
        attributes = dict(vars(optimizer))
        groups = [dict(group) for group in optimizer.param_groups]
        options = [options_of(group) for group in groups]
        ends, kept = list[dict[Piece, Tensor]](), self._beside
        for together in ([chosen], [[slot] for slot in chosen]):
            ends.append({})
            for some in together:
                self._beside = copy.deepcopy(beside(whole))
                held = {
                    Piece(slot, 0, self.parameters[slot].numel()): _like(self.parameters[slot])
                    for slot in some
                }
                states = {
                    piece: copy.deepcopy(dict(whole.get(self.parameters[piece.slot], {})))
                    for piece in held
                }
                for turn in range(2):
                    for piece, tried in held.items():
                        gradient = gradients[piece.slot][turn].to(tried.dtype, copy=True)
                        tried.grad = laid_out_like(gradient, tried)
                    states = self._moved(held, states)
                ends[-1].update({piece: tried.detach() for piece, tried in held.items()})
                learnt = [options_of(group) for group in optimizer.param_groups] != options
                vars(optimizer).update(attributes)
                for group, before in zip(optimizer.param_groups, groups, strict=True):
                    group.clear()
                    group.update(before)
                if learnt:
                    raise RecipeError(
                        f"the optimizer {type(optimizer).__name__} changes values of its "
                        f"param_groups in its step: with {self.where} each server "
                        "would have its own. Use all_reduce."
                    )
        self._beside = kept
        if not all(torch.equal(ends[0][piece], ends[1][piece]) for piece in ends[0]):
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} moves parameters otherwise when it has "
                "all of them than when it has one, so they cannot be shared out over servers. "
                "Use all_reduce."
            )

    def apply(self, step: int) -> float | None:
        """The servers have moved the parameters: the scheduler follows.

        Returns:
            The global norm of the gradient before clipping; None where nobody wants it.
        """
        set_generators(key(self._seed, OF_UPDATE, step))
        self.advance()
        return self._norm

    def states(self) -> dict[str, Tensor]:
        """What the optimizer keeps for what is held here, as `SLOT/NAME/START:STOP`.

        Raises:
            RecipeError: it keeps what is neither a tensor nor a number.
        """
        found: dict[str, Tensor] = {}
        for piece, state in self._states.items():
            for name, value in with_each(state, self._beside).items():
                name, value = kept_as(name, value, self.optimizer, self.where)
                found[f"{piece.slot}/{name}/{piece.start}:{piece.stop}"] = value
        return found

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Take up copies of what `states` gave, in place of what is kept."""
        self._states, self._beside = {piece: {} for piece in self.held}, {}
        for name, value in states.items():
            slot, kept, elements = name.split("/")
            start, stop = elements.split(":")
            piece = Piece(int(slot), int(start), int(stop))
            kept, own = taken(kept, value)
            if kept.startswith(BESIDE):
                self._beside[kept.removeprefix(BESIDE)] = own
            else:
                self._states[piece][kept] = _fitting(own, self.held[piece])


def kept_as(name: Any, value: Any, optimizer: object, where: str) -> tuple[str, Tensor]:
    """What an optimizer keeps for a parameter, as a tensor with a name; `taken` is the inverse.

    Args:
        name, value: as in its state.
        optimizer: whose it is, for the message.
        where: the setting that has parameters in parts, for the message.

    Raises:
        RecipeError: it is neither a tensor nor a number; or a tensor that is no number, and of no
            parameter.
    """
    kind = type(value)
    if kind in NUMBERS:
        name, value = f"{name}:{kind.__name__}", torch.tensor(value, dtype=NUMBERS[kind])
    large = isinstance(value, Tensor) and value.dim() and str(name).startswith(BESIDE)
    if large or not isinstance(value, Tensor) or type(name) is not str or "/" in name:
        if str(name).startswith(BESIDE):
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} keeps {name.removeprefix(BESIDE)!r} for "
                f"no parameter in its state: with {where} that can be a number. Use all_reduce."
            )
        raise RecipeError(
            f"the optimizer {type(optimizer).__name__} keeps {name!r} as "
            f"{kind.__name__} in its state: with {where} it can keep "
            "tensors and numbers. Use an optimizer of torch.optim, or all_reduce."
        )
    return name, value


def taken(name: str, value: Tensor) -> tuple[str, Any]:
    """What an optimizer kept, and by which name; a tensor is copied."""
    name, _, kind = name.partition(":")
    numbers: dict[str, Any] = {number.__name__: number for number in NUMBERS}
    return name, numbers[kind](value.item()) if kind else value.clone()


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """A copy to try something on."""
    tried = nn.Parameter(parameter.detach().clone())
    vars(tried).update(vars(parameter))
    return tried


def _fitting(value: Any, own: Tensor) -> Any:
    """What an optimizer keeps for a piece, in memory like its own."""
    return laid_out_like(value, own) if isinstance(value, Tensor) else value


def _part(value: Any, piece: Piece, whole: nn.Parameter) -> Any:
    """Of an optimizer's state for a parameter, that for a piece of it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == whole.shape and piece.stop - piece.start < whole.numel():
        return value.reshape(-1)[piece.start : piece.stop].clone()
    return value.clone()


def put_together(shards: Mapping[str, Tensor], model: nn.Module) -> dict[Any, dict[str, Any]]:
    """An optimizer's state for whole parameters, from that of pieces.

    Args:
        shards: as `PARAMETER/NAME/START:STOP`; of all servers.
        model: has the parameters.

    Raises:
        CheckpointError: pieces are missing, or belong to another model.
    """
    parameters = dict(model.named_parameters())
    pieces: defaultdict[tuple[str, str], list[tuple[int, int, Tensor]]] = defaultdict(list)
    for name, tensor in shards.items():
        parameter, kept, elements = name.rsplit("/", 2)
        start, stop = elements.split(":")
        pieces[parameter, kept].append((int(start), int(stop), tensor))
    whole: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for (name, kept), found in pieces.items():
        found.sort(key=lambda piece: piece[:2])
        own = parameters.get(name)
        ends = [0, *(stop for _, stop, _ in found)]
        if own is None or [start for start, *_ in found] != ends[:-1] or ends[-1] != own.numel():
            raise CheckpointError(
                f"the optimizer's {kept!r} for {name!r} is not in one piece in its shards."
            )
        joined = found[0][2]  # a number is the same in all pieces
        if len(found) > 1 and joined.dim():
            joined = torch.cat([tensor for *_, tensor in found]).view(own.shape)
        kept, value = taken(kept, joined)
        whole[own][kept] = value
    put_back(whole)
    return whole
