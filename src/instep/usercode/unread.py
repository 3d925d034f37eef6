"""Memories that are only added to: what a hook appends to a list, for a person to see.

No pass comes out otherwise for them, however they grow. Found in the byte code of the user's
modules, by name: whatever else is done with something of that name counts as reading. What a
function closes over is looked for in its own file.
"""

from __future__ import annotations

import dis
import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import CellType, CodeType, FrameType, FunctionType, ModuleType
from typing import Any

_ADDING = frozenset(("append", "appendleft", "extend", "add"))
_NOT_READING = ("STORE_", "DELETE_", "MAKE_", "LOAD_CLOSURE")


def unread(memory: Any, places: Collection[tuple[Any, str]], users: Iterable[ModuleType]) -> bool:
    """Check that the user's code only adds to a memory.

    Args:
        memory: a list, deque or set.
        places: where it is known to be: a cell or a dict, and the name there. Whatever else refers
            to it may read it, and what the garbage collector does not show, as after a fork.
        users: the modules of the user.
    """
    known = {id(holder) for holder, _ in places}
    referring = (each for each in gc.get_referrers(memory) if type(each) is not FrameType)
    if known != {id(each) for each in referring if not _looks_only(type(each))}:
        return False
    files = {str(module.__file__) for module in users}
    typed = list(_typed_in())
    try:
        return not any(
            _reads(code, name, in_cell=isinstance(holder, CellType))
            for holder, name in places
            for file in (_closing_over(holder) if isinstance(holder, CellType) else files)
            for code in (*_codes(file, Path(file).stat().st_mtime_ns), *typed)
        )
    except (OSError, SyntaxError, ValueError):
        return False  # what it does cannot be seen


def _looks_only(kind: type) -> bool:
    return str(kind.__module__).startswith("instep.")


def _typed_in() -> Iterator[CodeType]:
    """The code of functions and methods that no file has, as in a notebook."""
    main = sys.modules.get("__main__")
    if main is None or getattr(main, "__file__", None):
        return
    for value in list(vars(main).values()):
        for each in (value, *vars(value).values()) if isinstance(value, type) else (value,):
            if type(each) is FunctionType:
                yield from _with_inner(each.__code__)


def _closing_over(cell: CellType) -> set[str]:
    """The files of the functions that close over a cell."""
    closures = [each for each in gc.get_referrers(cell) if isinstance(each, tuple)]
    holding = [each for closure in closures for each in gc.get_referrers(closure)]
    files = {each.__code__.co_filename for each in holding if isinstance(each, FunctionType)}
    if not files:
        raise ValueError("no function is seen to close over it")
    return files


@lru_cache(64)
def _codes(file: str, _changed_ns: int) -> list[CodeType]:
    return list(_with_inner(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)))


def _with_inner(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_inner(constant)


def _reads(code: CodeType, name: str, *, in_cell: bool) -> bool:
    if name not in (code.co_freevars + code.co_cellvars if in_cell else code.co_names):
        return False
    return any(
        one.argval == name
        and ("DEREF" in one.opname) == in_cell
        and "_FAST" not in one.opname
        and not one.opname.startswith(_NOT_READING)
        and after.argval not in _ADDING
        for one, after in pairwise(dis.get_instructions(code))
    )
