"""Refuses what thaws a parameter in the middle of a run: nobody exchanges its gradient."""

from __future__ import annotations

from torch import nn

from instep.errors import RecipeError


class Frozen:
    """The parameters that need no gradient when training begins.

    Args:
        model: as it is then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._every = [(n, p) for n, p in model.named_parameters() if not p.requires_grad]

    def check(self, step: int) -> None:
        """Check them after the passes of a step.

        Raises:
            RecipeError: one needs a gradient now.
        """
        late = next((name for name, parameter in self._every if parameter.requires_grad), None)
        if late is not None:
            raise RecipeError(
                f"step {step}: the parameter {late!r} needs a gradient now, and did not when "
                "training began: gradients are exchanged only of parameters that needed one then. "
                "To train it later, let it need one from the beginning, and detach() what the "
                "layer gives until then."
            )
