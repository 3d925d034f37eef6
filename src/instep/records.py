"""What commits and state are called, from one end of the house to the other: plain data."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class Attempt(NamedTuple):
    """One try at one commit; tuples order them."""

    course: int
    """How often the run went back before."""
    number: int
    """Of the commit."""
    generation: int
    """In which it is tried: the same commit may have been abandoned in an earlier one."""


BEGINNING = Attempt(0, 0, 0)
"""What a run begins from."""


class Law(StrEnum):
    """What becomes of state that one process alone has, when another takes its place."""

    SUM = "sum"
    """Only the sum over all holders counts: residuals. Or one holds it, and the others nothing."""
    MOVE = "move"
    """It goes where its work goes: a server's part of the optimizer's state."""
