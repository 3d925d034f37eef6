"""Parameters that no pass may write to, as workers run different passes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from instep.errors import RecipeError


class FrozenParameters:
    """Parameters that are not trained; no pass may write to one, as workers run different passes.

    Args:
        named: parameters of a model by name, also those that are trained.
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        self._named = [
            (name, parameter) for name, parameter in named if not parameter.requires_grad
        ]
        self.note()

    def note(self) -> None:
        """Take what they are now for what passes must leave."""
        self._versions = [parameter._version for _, parameter in self._named]

    def refuse_written(self) -> None:
        """Refuse a pass that wrote to one.

        Raises:
            RecipeError: names the parameter.
        """
        for (name, parameter), version in zip(self._named, self._versions, strict=True):
            if parameter._version != version:
                raise written(name, trained=False)


def written(name: str, *, trained: bool) -> RecipeError:
    """The error of a pass that wrote to a parameter."""
    if trained:
        return RecipeError(
            f"the forward pass wrote to the parameter {name!r} (an embedding with max_norm does, "
            "and a clamp in forward): workers run other passes, and would end with other models. "
            "Do it before the optimizer's step, in a parametrization, or with workers = 1 and "
            "train.micro_batches = 1."
        )
    return RecipeError(
        f"the forward pass wrote to the frozen parameter {name!r}: make it a buffer "
        "(register_buffer), so that workers can agree on it."
    )
