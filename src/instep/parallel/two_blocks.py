"""A model with two blocks of each list of repeated blocks, to test one that is too large for it.

Structure alone; devices and processes are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from instep.parallel.blocks import repeated_blocks

KEPT = 2
"""Of each list, the first ones."""


class TwoBlocks:
    """Which blocks of a model stay.

    Args:
        model: of the user.
    """

    def __init__(self, model: nn.Module) -> None:
        lists: dict[str, list[str]] = {}
        for name in repeated_blocks(model):
            owner, _, own = name.rpartition(".")
            lists.setdefault(owner, []).append(own)
        self.names = [
            f"{owner}.{own}".lstrip(".") for owner, own in _pairs(lists, slice(None, KEPT))
        ]
        """The names of the blocks that stay."""
        self._left_out = _pairs(lists, slice(KEPT, None))
        self._model = model

    def __bool__(self) -> bool:
        """Whether any block is left out."""
        return bool(self._left_out)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """In this context the lists have only these blocks; a copy of the model keeps that."""
        lists = {owner: self._model.get_submodule(owner) for owner, _ in self._left_out}
        before = {owner: dict(each._modules) for owner, each in lists.items()}
        try:
            for owner, own in self._left_out:
                del lists[owner]._modules[own]
            yield
        finally:
            for owner, each in lists.items():
                each._modules.clear()
                each._modules.update(before[owner])


def _pairs(lists: dict[str, list[str]], which: slice) -> list[tuple[str, str]]:
    return [(owner, own) for owner, names in lists.items() for own in names[which]]
