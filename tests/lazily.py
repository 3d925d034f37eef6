"""Packages that few tests need: imported once one of these runs, not by all who collect them."""

import importlib
import importlib.util
from typing import Any

import pytest


class Lazy:
    """Stands for a package, and imports it when it is asked for something.

    Args:
        name: of the package, or of one of its modules.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(
            "_"
        ):  # pytest asks whatever it collects for `_mock_name`, `__wrapped__`
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def needs(package: str) -> pytest.MarkDecorator:
    """Mark of tests that are skipped where a package is not installed."""
    found = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not found, reason=f"needs the package {package!r}")
