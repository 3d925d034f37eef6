"""The shape of the package in figures that may only fall: `limits.toml` has those of today.

    python tests/limits.py            what is measured, beside the limit
    python tests/limits.py --lower    write the figures that have fallen

A figure above its limit fails `tests/test_house.py`. Raise one only with a note in docs/decisions
that says what it bought. Lines of the package have no limit: they grow with what it can do.
"""

from __future__ import annotations

import ast
import gc
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "instep"
LIMITS = ROOT / "tests" / "limits.toml"

LONG_FILE, LARGE_CLASS, LONG_FUNCTION = 350, 25, 60
"""Lines, methods, lines: of what is counted as too large."""

ROOMS_OF_A_STEP = ("instep.worker", "instep.engine", "instep.server", "instep.process")
"""Where a step is computed and committed."""

VAGUE = ("Of ", "What ", "Whose ", "As ", "The same", "Have ")
"""How no docstring is to begin: with a verb or a noun it says what is there."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One file of the package.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        text = path.read_text(encoding="utf-8")
        self.lines = text.count("\n")
        self.tree = ast.parse(text)
        self._nodes = defaultdict[type, list[Any]](list)
        for node in _all_below(self.tree):
            self._nodes[type(node)].append(node)
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        self.is_package = parts[-1] == "__init__"
        self.name = ".".join(parts[:-1] if self.is_package else parts)

    def of(self, *kinds: type[ast.AST]) -> list[Any]:
        """All nodes of these kinds."""
        return [node for kind in kinds for node in self._nodes.get(kind, ())]

    @property
    def classes(self) -> list[ast.ClassDef]:
        """All classes, nested ones too."""
        return self.of(ast.ClassDef)

    @property
    def functions(self) -> list[Function]:
        """All functions and methods, nested ones too."""
        return self.of(ast.FunctionDef, ast.AsyncFunctionDef)

    @property
    def texts(self) -> Iterator[str]:
        """Docstrings, and the strings that stand below an attribute."""
        for node in self.of(ast.Expr):
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                yield node.value.value

    def imported(self, known: set[str]) -> set[str]:
        """The modules of the package that it imports when it is imported, or for types."""
        found = set[str]()
        for node in _at_import(self.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in known else node.module for name in names]
            else:
                continue
            found.update(name for name in names if name in known and name != self.name)
        return found


def _all_below(tree: ast.AST) -> Iterator[ast.AST]:
    """As `ast.walk`, in another order and half the time."""
    left = [tree]
    while left:
        yield (node := left.pop())
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left += (each for each in value if isinstance(each, ast.AST))


def _at_import(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements outside of functions."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, Function):
            yield node
            yield from _at_import(node)


def methods(each: ast.ClassDef) -> int:
    """Functions in the body of a class."""
    return sum(isinstance(node, Function) for node in each.body)


def length(function: Function) -> int:
    """Lines of a function, without decorators."""
    return (function.end_lineno or function.lineno) - function.lineno + 1


def foreign(module: Module) -> int:
    """Assignments to an attribute of another object than `self`."""
    count = 0
    for node in module.of(ast.Assign, ast.AugAssign, ast.AnnAssign):
        targets = list(node.targets) if isinstance(node, ast.Assign) else [node.target]
        flat = chain(*(t.elts if isinstance(t, ast.Tuple) else [t] for t in targets))
        count += sum(isinstance(t, ast.Attribute) and not _is_own(t.value) for t in flat)
    return count


def _is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def asserted(module: Module) -> int:
    """`assert x is not None`, also as one of several."""
    return sum(_says_not_none(node.test) for node in module.of(ast.Assert))


def _says_not_none(test: ast.AST) -> bool:
    if isinstance(test, ast.BoolOp):
        return any(map(_says_not_none, test.values))
    if not isinstance(test, ast.Compare) or not isinstance(test.ops[0], ast.IsNot):
        return False
    right = test.comparators[0]
    return isinstance(right, ast.Constant) and right.value is None


def asked_for_strategy(module: Module) -> int:
    """`isinstance` of a class that comes from `instep.sync`."""
    of_sync = {
        alias.asname or alias.name
        for node in module.of(ast.ImportFrom)
        if (node.module or "").startswith("instep.sync")
        for alias in node.names
    }
    calls = [n for n in module.of(ast.Call) if len(n.args) == 2] if of_sync else []
    asked = [n.args[1] for n in calls if isinstance(n.func, ast.Name) and n.func.id == "isinstance"]
    names = ({each.id for each in ast.walk(a) if isinstance(each, ast.Name)} for a in asked)
    return sum(bool(each & of_sync) for each in names)


def compared_names(module: Module) -> int:
    """Comparisons of `sync.name`."""
    count = 0
    for node in module.of(ast.Compare):
        sides = [node.left, *node.comparators]
        named = [side for side in sides if isinstance(side, ast.Attribute) and side.attr == "name"]
        count += any(ast.unparse(side).endswith("sync.name") for side in named)
    return count


def arguments(module: Module) -> int:
    """Those of the constructor that takes most, without `self`."""
    inits = [f.args for f in module.functions if f.name == "__init__"]
    return max((len(a.posonlyargs + a.args + a.kwonlyargs) - 1 for a in inits), default=0)


def circles(modules: list[Module]) -> int:
    """Groups of modules that import each other when they are imported, or for types (Tarjan)."""
    known = {module.name for module in modules}
    imports = {module.name: module.imported(known) for module in modules}
    index, low, stack, found = dict[str, int](), dict[str, int](), list[str](), 0

    def visit(name: str) -> None:
        nonlocal found
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(imports[name]):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            found += len(stack) - place > 1
            del stack[place:]

    for name in sorted(imports):
        if name not in index:
            visit(name)
    return found


def measured() -> dict[str, int]:
    """All figures, by the names in `limits.toml`."""
    gc.disable()  # a tree stays to the end: looking for garbage takes as long as all the rest
    try:
        return _measured([Module(path) for path in sorted(PACKAGE.rglob("*.py"))])
    finally:
        gc.enable()


def _measured(modules: list[Module]) -> dict[str, int]:
    classes = [each for module in modules for each in module.classes]
    functions = [each for module in modules for each in module.functions]
    names = Counter(each.name for each in classes)
    outside = [m for m in modules if not m.name.startswith("instep.sync")]
    return {
        "lines_of_the_package": sum(module.lines for module in modules),
        "lines_of_the_largest_file": max(module.lines for module in modules),
        "files_over_350_lines": sum(module.lines > LONG_FILE for module in modules),
        "files_side_by_side": max(Counter(module.path.parent for module in modules).values()),
        "methods_of_the_largest_class": max(map(methods, classes)),
        "classes_over_25_methods": sum(methods(each) > LARGE_CLASS for each in classes),
        "class_names_used_twice": sum(count > 1 for count in names.values()),
        "functions_over_60_lines": sum(length(each) > LONG_FUNCTION for each in functions),
        "arguments_of_a_constructor": max(map(arguments, modules)),
        "assignments_into_other_objects_in_worker": sum(
            foreign(module) for module in modules if module.name.startswith(ROOMS_OF_A_STEP)
        ),
        "asserts_that_something_is_not_none": sum(map(asserted, modules)),
        "isinstance_of_a_strategy_outside_sync": sum(map(asked_for_strategy, outside)),
        "comparisons_of_a_strategys_name": sum(map(compared_names, modules)),
        "circles_of_imports": circles(modules),
        "docstrings_without_verb_or_noun": sum(
            text.lstrip().startswith(VAGUE) for module in modules for text in module.texts
        ),
    }


def limits() -> dict[str, int]:
    """Those that are written down."""
    found: dict[str, int] = tomllib.loads(LIMITS.read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the figures; with `--lower`, write those that have fallen."""
    found = measured()
    known = limits()
    for name, figure in found.items():
        print(f"{figure:8,}  {f'of {known[name]:,}' if name in known else '':8}  {name}")
    if "--lower" in sys.argv:
        kept = LIMITS.read_text(encoding="utf-8")
        head = "".join(line for line in kept.splitlines(True) if line.startswith("#"))
        lines = [f"{name} = {min(known[name], found[name])}\n" for name in known]
        LIMITS.write_text(head + "".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
