"""The optimizer of a run with servers: each server has it move a part of the parameters.

The recipe's own optimizer object is kept, with its groups: a scheduler that was made for it goes
on to work. Only while it steps do its groups hold the pieces that this process moves; the state
that it makes for them is kept here. Who has which piece, the strategy knows
(`sync/servers/server_sync.py`).
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim

from instep.comm.buckets import laid_out_like
from instep.data.order import key
from instep.engine.beside import BESIDE, beside, with_each
from instep.engine.served.written import kept_as, taken
from instep.engine.update import OF_UPDATE, Update, options_of
from instep.errors import RecipeError, SpecError
from instep.recipe.build import set_generators
from instep.recipe.optimizers.combined import parts_of, step_hooks
from instep.recipe.optimizers.made_up import STEPS, MadeUp, fitting, tried
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
        if any(any(step_hooks(each)) for each in every):
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
        optimizer, kept = self.optimizer, self._beside
        slots = {id(parameter): slot for slot, parameter in enumerate(self.parameters)}
        chosen = list[int]()  # coupling shows in any two: the smallest of each group
        for group in optimizer.param_groups:
            own = [slots[id(p)] for p in group["params"] if id(p) in slots and p.numel()]
            chosen += sorted(own, key=lambda slot: self.parameters[slot].numel())[:2]
        made = MadeUp({str(slot): self.parameters[slot].shape for slot in chosen}, 0)
        ends = list[list[dict[Piece, int]]]()
        for together in ([chosen], [[slot] for slot in chosen]):
            ends.append([{} for _ in STEPS])
            for some in together:
                with tried(optimizer):
                    options = [options_of(group) for group in optimizer.param_groups]
                    self._try(some, made, ends[-1])
                    learnt = [options_of(group) for group in optimizer.param_groups] != options
                if learnt:
                    raise RecipeError(
                        f"the optimizer {type(optimizer).__name__} changes values of its "
                        f"param_groups in its step: with {self.where} each server "
                        "would have its own. Use all_reduce."
                    )
        self._beside = kept
        if ends[0] != ends[1]:
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} moves parameters otherwise when it has "
                "all of them than when it has one, so they cannot be shared out over servers. "
                "Use all_reduce."
            )

    def _try(self, slots: Sequence[int], made: MadeUp, ends: Sequence[dict[Piece, int]]) -> None:
        """Move copies of some parameters by made-up gradients, and note the checksum of each."""
        whole, state = [self.parameters[slot] for slot in slots], self.optimizer.state
        held = {
            Piece(slot, 0, parameter.numel()): _like(parameter)
            for slot, parameter in zip(slots, whole, strict=True)
        }
        starts = [
            parameter.detach() if parameter.any() else fitting(made.weight(str(slot)), parameter)
            for slot, parameter in zip(slots, whole, strict=True)
        ]
        states = {
            piece: copy.deepcopy(dict(state.get(parameter, {})))
            for piece, parameter in zip(held, whole, strict=True)
        }
        self._beside = copy.deepcopy(beside(state))
        for number, step in enumerate(STEPS):
            for (piece, own), start in zip(held.items(), starts, strict=True):
                own.data.copy_(start).mul_(step.scale)
                gradient = fitting(made.gradient(str(piece.slot), number), own)
                own.grad = laid_out_like(gradient, own)
            states = self._moved(held, states)
            for piece, own in held.items():
                ends[number][piece] = _checksum(own.detach())

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


def _like(parameter: nn.Parameter) -> nn.Parameter:
    """A copy to try something on."""
    tried = nn.Parameter(parameter.detach().clone())
    vars(tried).update(vars(parameter))
    return tried


def _checksum(value: Tensor) -> int:
    """A checksum of values; NaN equals NaN, and -0 equals 0."""
    plain = value.nan_to_num().add(0.0).cpu().contiguous().view(-1)
    return zlib.crc32(plain.view(torch.uint8).numpy().data)


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
