"""Imports a file of the user's, and finds a function in it. Importing this imports no torch.

Way in: `load_function`.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import SOURCE_SUFFIXES, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from instep.errors import InstepError, RecipeError, file_beside, near_miss
from instep.recipe.given import given
from instep.system.causes import sentence
from instep.words import a_or_an


def load_function(
    reference: str, what: str = "recipe", places: Sequence[str] = ()
) -> Callable[..., Any]:
    """The function that `file.py:function` names.

    Args:
        reference: of the function; that of a recipe is loaded first.
        what: it makes; a file that is not the recipe's is imported as `instep_WHAT`.
        places: `python_path` of the job.

    Raises:
        RecipeError: no such file or function, or importing the file failed.
    """
    if (function := given(reference)) is not None:
        return function
    file, _, name = reference.rpartition(":")
    if name == "__main__":
        raise RecipeError(f"{file} is a script with a loop of its own, and a recipe is wanted.")
    module = load_module(Path(file), what, places)
    function = getattr(module, name, None)
    if function is None:
        public = [n for n, v in vars(module).items() if inspect.isfunction(v)]
        raise RecipeError(f"{file} has no function {name!r}. {near_miss(name, public)}")
    if not callable(function):
        raise RecipeError(f"{name!r} in {file} is {a_or_an(function)}, but a function is wanted.")
    return function  # type: ignore[no-any-return]


def load_module(path: Path, what: str = "recipe", places: Sequence[str] = ()) -> ModuleType:
    """Import a file, once in a process, as `instep_WHAT`; a recipe's file serves all.

    A file in a package is imported as the package's module, so that it may import what its package
    has; any other may import what lies beside it.
    """
    name = f"instep_{what}"
    for known in (name, "instep_recipe"):
        loaded = sys.modules.get(known)
        if loaded is not None and loaded.__file__ == str(path):
            return loaded
    if not path.is_file():
        raise RecipeError(f"there is no {what} file {str(path)!r}. {file_beside(path, '*.py')}")
    for place in reversed(places):
        if place not in sys.path:
            sys.path.insert(0, place)
    try:
        sys.modules[name] = module = _in_package(path, places) or _alone(path, name)
    except BaseException as error:
        if isinstance(error, InstepError) or not isinstance(error, Exception):
            raise
        raise RecipeError(f"{path} cannot be imported: {sentence(error)}") from error
    return module


def _in_package(path: Path, places: Sequence[str]) -> ModuleType | None:
    """A file imported as the module of its package; None if it is in none."""
    package, root = package_of(path, places)
    if not package:
        return None
    for place, at in ((str(root), 0), (str(path.parent), len(sys.path) + 1)):
        if place not in sys.path:
            sys.path.insert(at, place)
    try:
        parent = importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name and f"{package}.".startswith(f"{error.name}."):
            return None  # another package of that name was imported before
        raise
    if str(path.parent) not in map(str, getattr(parent, "__path__", ())):
        return None
    name = package if path.name == "__init__.py" else f"{package}.{path.stem}"
    module = sys.modules.get(name) or _alone(path, name)
    setattr(parent, path.stem, module)
    return module


def package_of(path: Path, places: Sequence[str]) -> tuple[str, Path]:
    """The package that a file is in, and the folder above it.

    Args:
        path: of the file.
        places: `python_path`: below these, a folder is a package also without an `__init__.py`.

    Returns:
        `("net.models", Path("/home/me/src"))`; an empty name if it is in none.
    """
    parts, root = list[str](), path.parent
    while root.name.isidentifier() and (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    above = [Path(place) for place in places if path.parent.is_relative_to(place)]
    for place in sorted(above, key=lambda each: -len(each.parts)) if not parts else ():
        parts = [*path.parent.relative_to(place).parts]
        if all(part.isidentifier() for part in parts):
            return ".".join(parts), place
    return ".".join(parts), root


def _alone(path: Path, name: str) -> ModuleType:
    """A file imported under this name."""
    loader = _AsItIs(name, str(path)) if path.suffix in SOURCE_SUFFIXES else None
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # so that a recipe can import files beside it
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


class _AsItIs(SourceFileLoader):
    """Compiles a file anew.

    Byte code that Python has kept is taken for it after an edit in the same second that leaves the
    length as it was.
    """

    def get_code(self, fullname: str) -> CodeType | None:
        return self.source_to_code(self.get_data(self.path), self.path)
