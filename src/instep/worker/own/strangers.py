"""Finds what an own loop trains without `prepare` knowing of it.

A loss with parameters and an optimizer of its own, a discriminator, a learnt temperature: their
gradients are not exchanged, so each process would move them by its own samples, and no checkpoint
has them. Two things give them away: an optimizer steps within an iteration that the session does
not have; or tensors that the loss's graph ends in have other values in a later iteration, though
they are not the model's. What lives for one iteration only, such as a perturbation of its inputs,
is the iteration's own affair. The graph is walked twice in an epoch.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from instep.errors import SpecError
from instep.state.digest import digests

_REMEDY = (
    "their gradients are not exchanged, so each process would move them by its own samples, and no "
    "checkpoint has them. Make them part of the model that prepare() gets (model.criterion = "
    "criterion), and of its one optimizer (a group of its own has its own rate)."
)


class Strangers:
    """Optimizers and parameters that an own loop uses beside those of the session.

    Args:
        model: that the session trains.
        iteration: a number of the present iteration, or None outside of one and while the
            session's optimizer moves.
    """

    def __init__(self, model: nn.Module, iteration: Callable[[], int | None]) -> None:
        self._own = {id(p) for p in model.parameters()}
        self._iteration = iteration
        self._stepped: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._reached: dict[int, tuple[ref[Tensor], int]] = {}
        self._epoch, self._walks, self._walked_in = -1, 0, 0
        self._thread = threading.get_ident()
        self.close = register_optimizer_step_pre_hook(self._steps).remove
        """Let optimizers step again."""

    def _steps(self, optimizer: Optimizer, *_: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        now = self._iteration()
        if now is None:
            return
        held = [p for group in optimizer.param_groups for p in group["params"]]
        trained = any(id(p) in self._reached and self._reached[id(p)][0]() is p for p in held)
        if not trained and self._stepped.setdefault(optimizer, now) == now:
            return  # it may be of this iteration alone
        raise SpecError(
            f"{type(optimizer).__name__}.step() was called in the loop for {_named(held)}, which "
            f"prepare() does not know: {_REMEDY} An optimizer of one iteration alone is made in it."
        )

    def look(self, loss: Tensor, epoch: int) -> None:
        """Walk the graph of a loss before its backward pass, in the first two of an epoch.

        Raises:
            SpecError: it ends in tensors that are not the model's, and that were written to
                since the pass before.
        """
        now = self._iteration() or 0
        self._walks = self._walks if epoch == self._epoch else 0
        if self._walks == 2 or now == self._walked_in:
            return
        self._epoch, self._walks, self._walked_in = epoch, self._walks + 1, now
        found = [leaf for leaf in _leaves(loss) if id(leaf) not in self._own]
        before = self._reached
        self._reached = {
            id(leaf): (ref(leaf), digest)
            for leaf, digest in zip(found, digests(found), strict=True)
        }
        for leaf in found:
            known, digest = before.get(id(leaf), (None, 0))
            if known is not None and known() is leaf and digest != self._reached[id(leaf)][1]:
                raise SpecError(
                    f"the loop trains {_named([leaf])}, which prepare() does not know: {_REMEDY}"
                )


def _leaves(loss: Tensor) -> Iterator[Tensor]:
    """The tensors that a backward pass gives a gradient to."""
    waiting, seen = [loss.grad_fn], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            yield leaf
        waiting += [following for following, _ in node.next_functions]


def _named(tensors: Iterable[Tensor]) -> str:
    """Tensors by the module that has them, where one is found."""
    wanted = {id(tensor): tensor for tensor in tensors}
    whole = [f"a tensor of shape {list(tensor.shape)}" for tensor in wanted.values()]
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]
    for module in modules:
        for name, parameter in module._parameters.items():
            if id(parameter) in wanted:
                whole.insert(0, f"{name!r} of {type(module).__name__}")
    more = len(wanted) - 1
    return whole[0] + (f" and {more} more" if more else "")
