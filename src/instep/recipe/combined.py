"""Several optimizers as one: each moves its own parameters.

A recipe returns a list of them where, say, embeddings need another one than the rest. The groups of
all are those of one optimizer, one after the other, so schedulers, checkpoints and servers see
one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps each of several optimizers.

    Args:
        optimizers: each parameter belongs to one of them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._counts = [len(each.param_groups) for each in optimizers]
        state = {p: kept for each in optimizers for p, kept in each.state.items()}
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups  # the same objects, as schedulers change them
        self.state.update(state)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each, with the groups and the state that this one has now."""
        assert closure is None, "instep gives none"
        for each, groups in self.parts():
            each.param_groups, each.state = groups, self.state
            each.step()

    def parts(self) -> Iterator[tuple[Optimizer, list[dict[str, Any]]]]:
        """Each of the optimizers, with its groups."""
        first = 0
        for each, count in zip(self._optimizers, self._counts, strict=True):
            yield each, self.param_groups[first : first + count]
            first += count


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that move a parameter: itself, or those of several that have one."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [each for each, groups in optimizer.parts() if any(g["params"] for g in groups)]
