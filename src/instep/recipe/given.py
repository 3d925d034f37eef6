"""Recipes without a file: defined in a cell of a notebook, or typed at a prompt.

No other program can import such a function. A process that is forked from this one has it: so the
fork server of such a run is a fork (`launch/forked.py`), and its workers find the function here, by
the reference that the job has. Way in: `give`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

_GIVEN: dict[str, Callable[..., Any]] = {}


def give(function: Callable[..., Any], file: str) -> str:
    """Have this process, and those forked from it, know a function.

    Args:
        function: of a recipe.
        file: where Python says that it was defined; there is no such file.

    Returns:
        Its reference, for a job.
    """
    name = getattr(function, "__name__", "")
    reference = f"{os.path.abspath(file)}:{name if name.isidentifier() else 'recipe'}"
    _GIVEN[reference] = function
    return reference


def given(reference: str) -> Callable[..., Any] | None:
    """The function that was given under this reference, if any."""
    return _GIVEN.get(reference)
