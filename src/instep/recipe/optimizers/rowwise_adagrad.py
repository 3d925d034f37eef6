"""Adagrad with one number for each row, for embeddings.

As in the deep learning recommendation model (Naumov et al. 2019, arXiv:1906.00091) and FBGEMM's
`EXACT_ROWWISE_ADAGRAD`: the mean of the squares of a row's gradient is added up, and the whole row
has the rate that follows. For an embedding of dim 64 that is 1/64 of the state of Adagrad, and
1/128 of that of Adam.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.errors import RecipeError


class RowwiseAdagrad(Optimizer):
    """Row-wise Adagrad; a row is what has one index in the first dim of a parameter.

    A row without a gradient does not move, so a sparse gradient gives what a dense one does.

    Args:
        params: as for every optimizer of torch.
        lr: the rate, at least 0.
        eps: added to the root, above 0.
        initial_accumulator_value: what each row's sum begins with, at least 0.

    Raises:
        RecipeError: a value is below that.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-8,
        initial_accumulator_value: float = 0.0,
    ) -> None:
        given = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in given.items():
            if not (value > 0.0 or (value == 0.0 and name != "eps")):
                least = "above 0" if name == "eps" else "at least 0"
                raise RecipeError(f"RowwiseAdagrad: {name} = {value!r} needs to be {least}.")
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "sum" not in state:
            begin = group["initial_accumulator_value"]
            state["sum"] = parameter.new_full(parameter.shape[:1], begin)
        total: Tensor = state["sum"]
        lr, eps = group["lr"], group["eps"]
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            new = total[rows] + _mean_square(values)
            total[rows] = new
            parameter.index_add_(0, rows, values / _along(new.sqrt().add_(eps), values), alpha=-lr)
        else:
            total += _mean_square(gradient)
            parameter.addcdiv_(gradient, _along(total.sqrt().add_(eps), gradient), value=-lr)


def _mean_square(values: Tensor) -> Tensor:
    """[rows] of [rows, ...]."""
    return values.square() if values.dim() < 2 else values.square().flatten(1).mean(1)


def _along(rows: Tensor, values: Tensor) -> Tensor:
    return rows.view(-1, *[1] * (values.dim() - 1)) if values.dim() > 1 else rows
