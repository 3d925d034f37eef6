"""Skips an import that takes half of the start-up time and is usually not needed.

Torch 2.11 to 2.14 import `torch._dynamo`, the compiler's front end, when the first optimizer is
made (`Optimizer.add_param_group` is wrapped in `torch._disable_dynamo`, `Optimizer.step` calls
`graph_break`). That takes about as long as torch itself, 2.4 s beside 2.6 s on two cores, and
outside of a compilation both calls do nothing.

So a stand-in for the module answers these two calls. It loads the real module as soon as anything
else is used: a program with `torch.compile` gets the real compiler.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_NAME = "torch._dynamo"


def spare_dynamo() -> None:
    """Put the stand-in in place, unless the compiler is already loaded."""
    if _NAME not in sys.modules:
        sys.modules[_NAME] = _StandIn(_NAME)


class _StandIn(ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._spared: list[Any] = []

    def graph_break(self, msg: str = "") -> None:
        """Outside of a compilation: nothing."""

    def disable(self, fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        """Outside of a compilation: the function itself."""
        self._spared.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # asked for by tools that list modules
            raise AttributeError(name)
        return getattr(self._give_way(), name)

    def _give_way(self) -> ModuleType:
        """Load the real module; it decides about what was left out so far."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        for fn in self._spared:
            fn.__dict__.pop("__dynamo_disable", None)  # where `torch._disable_dynamo` keeps it
        self._spared.clear()
        return importlib.import_module(_NAME)
