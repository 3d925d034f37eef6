"""The optimizer of a run with servers: each server has it move a part of the parameters.

The recipe's own optimizer object is kept, with its groups: a scheduler that was made for it goes
on to work. Only while it steps do its groups hold the pieces that this process moves; the state
that it makes for them is kept here. Who has which piece, the strategy knows
(`sync/server_sync.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn, optim

from instep.data.order import key
from instep.errors import CheckpointError, RecipeError, SpecError
from instep.recipe.build import set_generators
from instep.sync.base import Piece
from instep.sync.norm import norm
from instep.worker.step.update import OF_UPDATE, Update

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

NUMBERS = {int: torch.int64, float: torch.float64}
"""The tensors in which numbers of an optimizer's state lie, under names that end with `:int`."""


class ServedUpdate(Update):
    """What moves the parameters, where servers do.

    Args:
        given, named: what `Update` takes.

    Raises:
        SpecError: the job wants what cannot be had with servers.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if self.scaler.is_enabled():
            raise SpecError(
                "train.precision = 'float16' scales the loss by what the optimizer meets, which "
                "sync.name = 'server_sync' has on servers. Use bfloat16, or all_reduce."
            )
        self.held: Mapping[Piece, nn.Parameter] = {}
        self._states: dict[Piece, dict[str, Any]] = {}
        self._norm: float | None = None

    @property
    def by_element(self) -> bool:
        """Whether the optimizer may be given a part of a parameter."""
        return type(self.optimizer) in BY_ELEMENT

    def hold(self, pieces: Mapping[Piece, nn.Parameter]) -> None:
        """From now on these are what the optimizer moves here; it keeps state for nothing else.

        Raises:
            RecipeError: the optimizer does more in a step than to move its parameters.
        """
        optimizer = self.optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise RecipeError(
                "the optimizer has step hooks, which look at whole parameters: with sync.name = "
                "'server_sync' each server has only a part. Leave them out (averages of the "
                "weights, as EMA), or use all_reduce."
            )
        self.held, whole = dict(pieces), optimizer.state
        self._states = {
            piece: {
                name: _part(value, piece, self._parameters[piece.slot])
                for name, value in whole.get(self._parameters[piece.slot], {}).items()
            }
            for piece in pieces
        }
        optimizer.state = defaultdict(dict)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or schedulers warn on workers

    def limit(self, squares: Tensor) -> float:
        """Note the norm of the gradient; what to multiply it by."""
        self._norm = norm(squares.tolist())
        return self.factor(self._norm)

    def step(self, number: int) -> None:
        """Move what is held here by its `.grad`."""
        set_generators(key(self._seed, OF_UPDATE, number))
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        whole = [group["params"] for group in groups]
        slots = {id(parameter): slot for slot, parameter in enumerate(self._parameters)}
        optimizer.state = defaultdict(dict)
        for piece, parameter in self.held.items():
            optimizer.state[parameter] = self._states[piece]
        for group in groups:
            mine = {slots.get(id(parameter), -1) for parameter in group["params"]}
            group["params"] = [own for piece, own in self.held.items() if piece.slot in mine]
        drawn = torch.get_rng_state()
        try:
            optimizer.step()
        finally:
            for group, parameters in zip(groups, whole, strict=True):
                group["params"] = parameters
            self._states = {piece: optimizer.state[own] for piece, own in self.held.items()}
            optimizer.state = defaultdict(dict)
        if not self.by_element and not torch.equal(drawn, torch.get_rng_state()):
            raise RecipeError(
                f"the optimizer {type(optimizer).__name__} draws random numbers in its step: with "
                "sync.name = 'server_sync' each server would draw its own. Use all_reduce."
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
            for name, value in state.items():
                kind = type(value)
                if kind in NUMBERS:
                    name, value = (
                        f"{name}:{kind.__name__}",
                        torch.tensor(value, dtype=NUMBERS[kind]),
                    )
                if type(value) is not Tensor or type(name) is not str or "/" in name:
                    raise RecipeError(
                        f"the optimizer {type(self.optimizer).__name__} keeps {name!r} as "
                        f"{kind.__name__} in its state: with sync.name = 'server_sync' it can keep "
                        "tensors and numbers. Use an optimizer of torch.optim, or all_reduce."
                    )
                found[f"{piece.slot}/{name}/{piece.start}:{piece.stop}"] = value
        return found

    def load_states(self, states: Mapping[str, Tensor]) -> None:
        """Take up copies of what `states` gave, in place of what is kept."""
        self._states = {piece: {} for piece in self.held}
        for name, value in states.items():
            slot, kept, elements = name.split("/")
            start, stop = elements.split(":")
            state = self._states[Piece(int(slot), int(start), int(stop))]
            kept, state_value = _taken(kept, value)
            state[kept] = state_value


def _taken(name: str, value: Tensor) -> tuple[str, Any]:
    """What an optimizer kept, and by which name; a tensor is copied."""
    name, _, kind = name.partition(":")
    numbers: dict[str, Any] = {number.__name__: number for number in NUMBERS}
    return name, numbers[kind](value.item()) if kind else value.clone()


def _part(value: Any, piece: Piece, whole: nn.Parameter) -> Any:
    """Of an optimizer's state for a parameter, that for a piece of it."""
    if not isinstance(value, Tensor):
        return value
    if value.shape == whole.shape and piece.stop - piece.start < whole.numel():
        return value.reshape(-1)[piece.start : piece.stop].clone()
    return value.clone()


def put_together(shards: Mapping[str, Tensor], model: nn.Module) -> dict[Tensor, dict[str, Any]]:
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
    whole: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
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
        kept, value = _taken(kept, joined)
        whole[own][kept] = value
    return whole
