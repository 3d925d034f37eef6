"""Shapes of batches that code of the user's makes: what pads to the longest shows in them.

The trial compares a few batches, and a step may have one of another shape: a long sample is
seldom. So the trial says which shapes it has seen beside each other, and a run looks at each
batch (`Watch.odd`). torch's own `default_collate` never pads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from instep.parallel.nested import tensors_in

Shape = tuple[int, ...]
ANY: Shape = (-1,)
"""Any shape: different ones were compared beside each other, and changed nothing."""


def shapes_of(batch: Any, samples: int) -> tuple[Shape, ...]:
    """The shape of one sample in each tensor of a batch."""
    return tuple(_of_one(tensor, samples) for tensor in tensors_in(batch) if tensor.dim())


def _of_one(tensor: Tensor, samples: int) -> Shape:
    shape = tuple(tensor.shape)
    if samples not in shape[:2]:  # some were left out, or all are packed
        return shape[1:]
    place = shape.index(samples)
    return (*shape[:place], *shape[place + 1 :])


def differ(batches: Iterable[tuple[Any, int]]) -> bool:
    """Whether samples of these batches have different shapes, each given with its size."""
    return len({shapes_of(*each) for each in batches}) > 1


class Watch:
    """The shapes that are known to give the result of one machine beside each other.

    Args:
        known: of each tensor of a batch; empty if no batch was compared.
    """

    def __init__(self, known: Sequence[Sequence[int]] = ()) -> None:
        self._known = [tuple(each) for each in known]
        self._compared = 0
        self.tries = 0
        """How often `learn` was called."""

    @property
    def known(self) -> tuple[Shape, ...]:
        """For `Watch`."""
        return tuple(self._known)

    def compared(self, batches: Iterable[tuple[Any, int]]) -> None:
        """Take in batches that were compared with each other, without a difference."""
        for batch, samples in batches:
            shapes = shapes_of(batch, samples)
            if not self._compared:
                self._known = list(shapes)
            elif len(shapes) != len(self._known):
                self._known = []  # lists of samples: nothing is padded
            self._known = [
                known if known in (ANY, shape) else ANY
                for known, shape in zip(self._known, shapes, strict=False)
            ]
            self._compared += 1

    def learn(self, known: Sequence[Sequence[int]]) -> None:
        """Take in what another comparison has shown."""
        self.tries += 1
        others = [tuple(each) for each in known]
        if len(others) == len(self._known):
            pairs = zip(self._known, others, strict=True)
            self._known = [ANY if other == ANY else own for own, other in pairs]

    def odd(self, batch: Any, samples: int) -> str:
        """The shapes of a batch that were not compared beside those that are known, in words."""
        if not self._known or all(known == ANY for known in self._known):
            return ""
        shapes = shapes_of(batch, samples)
        if len(shapes) != len(self._known):
            return ""
        pairs = zip(shapes, self._known, strict=True)
        return next(
            (
                f"{list(is_)} instead of {list(known)}"
                for is_, known in pairs
                if known not in (ANY, is_)
            ),
            "",
        )
