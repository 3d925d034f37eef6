"""Several optimizers as one: each moves its own parameters.

A recipe returns a list of them where, say, embeddings need another one than the rest. The groups of
all are those of one optimizer, one after the other, so schedulers, checkpoints and servers see
one. What an optimizer keeps for no parameter has the optimizer's number before its name there:
`1.k` is `k` of the second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Steps each of several optimizers. Its class is called as theirs are: `Muon and AdamW`.

    Args:
        optimizers: each parameter belongs to one of them.
    """

    def __new__(cls, optimizers: Sequence[Optimizer] = ()) -> CombinedOptimizer:
        """One of a class with the names of the user's, as messages have it."""
        names = dict.fromkeys(type(each).__name__ for each in optimizers)
        kind = type(" and ".join(names), (cls,), {"__module__": cls.__module__}) if names else cls
        return object.__new__(kind)

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = list(optimizers)
        self._counts = [len(each.param_groups) for each in optimizers]
        groups = [group for each in optimizers for group in each.param_groups]
        super().__init__([{"params": group["params"]} for group in groups], {})
        self.param_groups = groups  # the same objects, as schedulers change them
        for number, each in enumerate(optimizers):
            self._take(number, each)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each, with the groups and the state that this one has now."""
        assert closure is None, "instep gives none"
        for number, (each, groups) in enumerate(self.parts()):
            each.param_groups, each.state = groups, self._state_of(number, groups)
            each.step()
            self._take(number, each)

    def _state_of(self, number: int, groups: Sequence[dict[str, Any]]) -> defaultdict[Any, Any]:
        own: defaultdict[Any, Any] = defaultdict(dict)
        every = (p for group in groups for p in group["params"])
        own.update((p, self.state[p]) for p in every if p in self.state)
        begin, every_name = f"{number}.", dict[Any, Any](self.state)
        for name in every_name:
            if isinstance(name, str) and name.startswith(begin):
                own[name.removeprefix(begin)] = every_name[name]
        return own

    def _take(self, number: int, each: Optimizer) -> None:
        state: dict[Any, Any] = each.state
        own: dict[Any, Any] = self.state
        for of, kept in state.items():
            own[f"{number}.{of}" if isinstance(of, str) else of] = kept

    def parts(self) -> Iterator[tuple[Optimizer, list[dict[str, Any]]]]:
        """Each of the optimizers, with its groups."""
        first = 0
        for each, count in zip(self._optimizers, self._counts, strict=True):
            yield each, self.param_groups[first : first + count]
            first += count


def step_hooks(optimizer: Optimizer) -> tuple[list[Any], list[Any]]:
    """Hooks before its steps, and after; none of one that did not call `super().__init__`."""
    own = vars(optimizer)
    before, after = own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks")
    return list((before or {}).values()), list((after or {}).values())


def parts_of(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizers that move a parameter: itself, or those of several that have one."""
    if not isinstance(optimizer, CombinedOptimizer):
        return [optimizer]
    return [each for each, groups in optimizer.parts() if any(g["params"] for g in groups)]


def name_of_part(optimizer: Optimizer, group: int) -> str:
    """What begins the names of values for no parameter that are of a group's optimizer."""
    if isinstance(optimizer, CombinedOptimizer):
        for number, (_, groups) in enumerate(optimizer.parts()):
            group -= len(groups)
            if group < 0:
                return f"{number}."
    return ""
