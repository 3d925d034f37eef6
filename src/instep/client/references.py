"""How other processes find a recipe function that a program has given: its file and its packages.

Nothing is imported. Ways in: `reference_to` and `places_of`.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from instep.errors import RecipeError
from instep.recipe.given import give


def reference_to(function: Callable[..., Any]) -> str:
    """`/path/file.py:function` for a function that other processes can import.

    One that was defined in a cell of a notebook, or typed at a prompt, has no file: then the
    workers are forked from this process.

    Raises:
        RecipeError: it has no file, or is not at the top level of it, or is no function.
    """
    _check_is_function(function)
    name = getattr(function, "__qualname__", type(function).__name__)
    code = getattr(function, "__code__", None)
    if code is not None and not Path(code.co_filename).is_file():
        return give(function, code.co_filename)
    try:
        file = Path(inspect.getsourcefile(function) or "")
    except TypeError:
        file = Path()
    if not file.is_file() or not name.isidentifier():
        raise RecipeError(
            f"the recipe {name!r} cannot be imported by other processes: define it with def "
            "at the top level of a .py file."
        )
    return f"{file.resolve()}:{name}"


def _check_is_function(given: Any) -> None:
    """Refuse what people give in place of a function, with what to give.

    Raises:
        RecipeError: it was called already, has its arguments bound, or is a model.
    """
    kind = type(given)
    if kind.__name__ == "Recipe" and kind.__module__.startswith("instep."):
        raise RecipeError(
            "a Recipe was given, but every process calls the function that makes it: give the "
            "function recipe itself, not what recipe() returns. What it takes goes into "
            "arguments={...}."
        )
    if isinstance(given, functools.partial):
        name = getattr(given.func, "__name__", "recipe")
        bound = ", ".join(f"{key!r}: {value!r}" for key, value in given.keywords.items())
        raise RecipeError(
            f"functools.partial({name}, ...) was given, which other processes cannot import: give "
            f"the function {name}, and arguments={{{bound}}}."
        )
    if not callable(given) or hasattr(given, "forward"):
        raise RecipeError(
            f"{kind.__name__!r} was given for a recipe, but a function that returns an "
            "instep.Recipe is wanted."
        )


def places_of(function: Callable[..., Any]) -> list[str]:
    """Folders in which this process finds what the function's file imports, for `python_path`.

    Without those of Python itself, of installed packages, and the file's own. The one above its
    package is first, also for a package without an `__init__.py`.
    """
    try:
        file = Path(inspect.getsourcefile(function) or "").resolve()
    except TypeError:
        return []
    module = getattr(function, "__module__", "")
    if module == "__main__":  # python -m package.module
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        module = spec.name if spec is not None else ""
    parts, places = module.split("."), list[str]()
    if len(parts) > 1 and file.with_suffix("").parts[-len(parts) :] == tuple(parts):
        places.append(str(file.parents[len(parts) - 1]))
    known = [os.path.abspath(each) for each in os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    known += [str(file.parent), *places]
    for each in sys.path:
        place = os.path.abspath(each)
        if place not in known and os.path.isdir(place) and not _is_installed(place):
            places.append(place)
    return places


_INSTALLED = tuple({os.path.realpath(path) for path in sysconfig.get_paths().values()})


def _is_installed(place: str) -> bool:
    """Whether Python or a package manager put it there: other processes have it too."""
    packages = {"site-packages", "dist-packages"} & set(Path(place).parts)
    return bool(packages) or os.path.realpath(place).startswith(_INSTALLED)
