"""Shapes of batches that code of the user's makes: what pads to the longest shows in them.

The trial compares a few batches, and a step may have one of another shape: a long sample is
seldom, or all long ones come last. So the trial says where different shapes were compared in one
step, and a run looks at each batch (`ShapeWatch.odd`): where they were not, it notices a shape that
is another than before. (A step with two shapes has one that is another than in the step before, in
some worker.) torch's own `default_collate` never pads.
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


class ShapeWatch:
    """The shapes that are known to give the result of one machine beside each other.

    Args:
        known: of each tensor of a batch: `ANY`, or the one that all had which were compared in one
            place; empty if no batch was compared.
    """

    def __init__(self, known: Sequence[Sequence[int]] = ()) -> None:
        self._known = [tuple(each) for each in known]
        self._compared = False
        self.tries = 0
        """How often `learn` was told of passes."""

    @property
    def known(self) -> tuple[Shape, ...]:
        """For `ShapeWatch`."""
        return tuple(self._known)

    def compared(self, batches: Iterable[tuple[Any, int]]) -> None:
        """Take in the batches of one place, which were compared without a difference."""
        of_place = [shapes_of(*each) for each in batches]
        if not self._compared:
            self._known, self._compared = list(of_place[0]), True
        if any(len(shapes) != len(self._known) for shapes in of_place):
            self._known = []  # lists of samples: nothing is padded
        self._known = [
            ANY if known == ANY or len({*shapes}) > 1 else known
            for known, *shapes in zip(self._known, *of_place, strict=False)
        ]

    def mixed(self, of_step: Sequence[Sequence[Shape]]) -> bool:
        """Whether a step has different shapes of a tensor of which none were compared.

        Args:
            of_step: of each of its micro-batches, as `shapes_of` gives them.
        """
        return any(
            known != ANY and len({*shapes}) > 1
            for known, *shapes in zip(self._known, *of_step, strict=False)
        )

    def learn(self, known: Sequence[Sequence[int]], *, tried: bool = True) -> None:
        """Take in what another step has shown, which from now on counts as the one before.

        Args:
            known: as for `ShapeWatch`.
            tried: whether passes were compared, and not only shapes.
        """
        self.tries += tried
        others = [tuple(each) for each in known]
        if len(others) == len(self._known):
            pairs = zip(self._known, others, strict=True)
            self._known = [ANY if ANY in (own, other) else other for own, other in pairs]

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
