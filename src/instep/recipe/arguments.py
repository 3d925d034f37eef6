"""Whether the job's `[arguments]` are those that the recipe function takes.

Nothing is imported: before a run starts, the function is looked up in the text of its file, and so
is a codec's class. Ways in: `check_arguments`, and `signature_in` and `members_in` for a file.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

from instep.errors import RecipeError, near_miss


def check_arguments(name: str, signature: Signature, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that a function does not take, and a lack of those that it needs.

    Args:
        name: of the function.
        signature: of the same.
        arguments: of the job.

    Raises:
        RecipeError: names one.
    """
    parameters = signature.parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    for argument in arguments:
        if argument not in parameters:
            raise RecipeError(
                f"[arguments] gives {argument!r}, which the recipe function {name!r} does not "
                f"take. {near_miss(argument, parameters)}"
            )
    for p in parameters.values():
        if p.default is p.empty and p.kind is not p.VAR_POSITIONAL and p.name not in arguments:
            raise RecipeError(
                f"the recipe function {name!r} needs {p.name!r}: give it under [arguments], "
                f"or with --set arguments.{p.name}=..."
            )


def signature_in(file: Path, name: str) -> Signature | None:
    """The parameters of a function, as its file has them; a default is there, or not.

    Returns:
        None where the text does not tell for certain: there is not exactly one such function at
        the top of the file, it is decorated, or the file is no Python. Importing it will tell.
    """
    function = _only(file, name)
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return None
    given = function.args
    plain = [*given.posonlyargs, *given.args]
    without = len(plain) - len(given.defaults)
    found = [
        Parameter(each.arg, Parameter.POSITIONAL_OR_KEYWORD, default=_DEFAULT[number >= without])
        for number, each in enumerate(plain)
    ]
    if given.vararg is not None:
        found.append(Parameter(given.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [
        Parameter(each.arg, Parameter.KEYWORD_ONLY, default=_DEFAULT[default is not None])
        for each, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    if given.kwarg is not None:
        found.append(Parameter(given.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


_DEFAULT = (Parameter.empty, ...)


def members_in(file: Path, name: str) -> dict[str, Any] | None:
    """What the objects of a class have: a constant as its file has it, all else as an ellipsis.

    Returns:
        None where the text does not tell for certain, as of `signature_in`; or the class inherits.
    """
    found = _only(file, name)
    if not isinstance(found, ast.ClassDef) or found.bases or found.keywords or found.decorator_list:
        return None
    members: dict[str, Any] = {}
    for top in found.body:
        value: Any = ...
        if isinstance(top, ast.Assign | ast.AnnAssign) and isinstance(top.value, ast.Constant):
            value = top.value.value
        inside = [top] if isinstance(top, ast.FunctionDef) else ast.walk(top)
        for bound in {each for node in inside for each in _bound_by(node)}:
            members[bound] = ... if bound in members else value
    for node in ast.walk(found):  # such as self.fixed_size = ...
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            members[node.attr] = ...
    return members


def _only(file: Path, name: str) -> ast.stmt | None:
    """The one statement at the top of a file that binds a name; None if there is no such."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None
    names = [node for top in body for node in ast.walk(top) if name in _bound_by(node)]
    return next((top for top in body if names == [top]), None)


def _bound_by(node: ast.AST) -> set[str]:
    """The names that a statement or expression may bind by itself."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return {node.id}
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {each.asname or each.name.partition(".")[0] for each in node.names}
    return set()
