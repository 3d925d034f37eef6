"""The optimizer of a server that moves the parameters by one micro-batch at a time.

The learning rate still follows the steps of the job: a scheduler advances when as many samples are
committed as a step has. Where there are several servers each moves its part; the first one has the
scheduler, and tells the others what the groups of its optimizer say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from instep.data.order import key
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.skipping import scale_gradients
from instep.engine.update import OF_UPDATE
from instep.errors import RecipeError
from instep.recipe.build import set_generators
from instep.sync import norm
from instep.sync.generation import Piece


class LeasedUpdate(ServedUpdate):
    """What moves the parameters, by each gradient as it comes.

    Args:
        given, named: what `Update` takes.

    Raises:
        RecipeError: the optimizer has no learning rate.
    """

    where = "sync.servers above 1"

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._in_parts = False
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} has no 'lr' in its param_groups, "
                "which this strategy needs. Use an optimizer of torch.optim, or all_reduce."
            )

    def hold(self, pieces: Mapping[Piece, nn.Parameter]) -> None:
        """As in `ServedUpdate`; without it all parameters are moved."""
        super().hold(pieces)
        self._in_parts = True

    def squares(self) -> list[float]:
        """The squares of the gradient, by block; nothing where nobody wants its norm."""
        gradients = [each.grad for each in self._moving if each.grad is not None]
        return norm.squares(gradients).tolist() if self.clips else []

    def move(self, number: int, rate: float, factor: float = 1.0) -> None:
        """Move what is moved here by its `.grad`.

        Args:
            number: of the update.
            rate: what the learning rate is multiplied by.
            factor: what the gradient is multiplied by.
        """
        if factor != 1.0:
            scale_gradients(self._moving, factor)
        groups = self.optimizer.param_groups
        usual = [group["lr"] for group in groups]
        if rate != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * rate
        if self._in_parts:
            self.step(number, self.held)
        else:
            set_generators(key(self._seed, OF_UPDATE, number))
            self.optimizer.step()
        if rate != 1.0:
            for group, lr in zip(groups, usual, strict=True):
                group["lr"] = lr

    @property
    def _moving(self) -> Sequence[nn.Parameter]:
        return [*self.held.values()] if self._in_parts else self.parameters

    def options(self) -> list[dict[str, Any]]:
        """What groups of the optimizer say beside their parameters, as numbers and text."""
        kinds = (bool, int, float, str, tuple, Tensor)
        return [
            {
                name: value.item() if isinstance(value, Tensor) else value
                for name, value in group.items()
                if isinstance(value, kinds) and name != "params"
            }
            for group in self.optimizer.param_groups
        ]

    def take_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Have the groups say what `options` gave on another server."""
        for group, told in zip(self.optimizer.param_groups, options, strict=True):
            for name, value in told.items():
                own = group.get(name)
                if isinstance(own, Tensor):
                    own.fill_(value)
                else:
                    group[name] = tuple(value) if isinstance(value, list) else value
