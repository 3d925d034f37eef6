"""`ReduceLROnPlateau` as the scheduler of a recipe: it takes its step after a validation.

Which validations count, and that each counts once whoever is killed, `Plateau.measured` says.
"""

from __future__ import annotations

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from instep.errors import RecipeError


class Plateau:
    """Steps with the validation loss, once for each validation, and not with each step.

    Args:
        scheduler: of the recipe.
        where: names it in messages.

    Raises:
        RecipeError: it waits for a larger value, and a loss should fall.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, where: str) -> None:
        if scheduler.mode != "min":
            raise RecipeError(
                f"{where} is a ReduceLROnPlateau with mode = {scheduler.mode!r}, but it is given "
                "the validation loss, which should fall. Leave mode out."
            )
        self._scheduler, self._last = scheduler, 0

    def step(self) -> None:
        """A step of the run is over: nothing."""

    def measured(self, step: int, loss: float) -> None:
        """A validation followed a step; one that is repeated, since a worker was lost meanwhile, is
        known by its step."""
        if step > self._last:
            self._last = step
            self._scheduler.step(loss)

    def state_dict(self) -> dict[str, Any]:
        """That of the scheduler, with the step of the last validation."""
        return {"validated": self._last, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self._last = state["validated"]
        self._scheduler.load_state_dict(state["scheduler"])
