"""The optimizer of a server that moves the parameters by one micro-batch at a time.

The learning rate still follows the steps of the job: a scheduler advances when as many samples are
committed as a step has.
"""

from __future__ import annotations

from typing import Any

from instep.data.order import key
from instep.errors import RecipeError
from instep.recipe.build import set_generators
from instep.worker.step.update import OF_UPDATE, Update


class LeasedUpdate(Update):
    """What moves the parameters, by each gradient as it comes.

    Args:
        given, named: what `Update` takes.

    Raises:
        RecipeError: the optimizer has no learning rate.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        if any("lr" not in group for group in self.optimizer.param_groups):
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} has no 'lr' in its param_groups, "
                "which this strategy needs. Use an optimizer of torch.optim, or all_reduce."
            )

    def move(self, number: int, rate: float) -> float | None:
        """Move the parameters by their `.grad`.

        Args:
            number: of the update.
            rate: what the learning rate is multiplied by.

        Returns:
            The global norm of the gradient before clipping; None where nobody wants it.
        """
        set_generators(key(self._seed, OF_UPDATE, number))
        found, groups = self.clip(), self.optimizer.param_groups
        usual = [group["lr"] for group in groups]
        if rate != 1.0:
            for group in groups:
                group["lr"] = group["lr"] * rate
        self.optimizer.step()
        if rate != 1.0:
            for group, lr in zip(groups, usual, strict=True):
                group["lr"] = lr
        return found
