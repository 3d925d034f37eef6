"""Loops that Numba compiles when their module is imported, and keeps in files beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(
    *arguments: str, returns: str = "void"
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Compile for arguments of these types; without a file where none can be written."""

    def of(loop: Callable[..., Any]) -> Callable[..., Any]:
        signature = f"{returns}({', '.join(arguments)})"
        options: Any = {"nogil": True, "error_model": "numpy"}
        try:
            made = njit(signature, cache=True, **options)(loop)
        except RuntimeError:  # no folder for the file
            made = njit(signature, **options)(loop)
        return made

    return of
