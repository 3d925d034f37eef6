"""Tables of named parts: strategies, codecs, launchers, sources.

An entry is written as `"module:attribute"` and imported when it is first
looked up, so listing the names of a table costs nothing and never imports
torch. A wrong name answers with the near miss and the list.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from importlib import import_module
from typing import Any

from instep.errors import SpecError, near_miss


class Registry(Mapping[str, Any]):
    """Name to part. `kind` says what the parts are, for messages.

    Args:
        kind: a noun for one entry, such as `"sync strategy"`.
        entries: name to `"module:attribute"`.
        open: whether a user's own part may be named so too, in place of one of the table.
    """

    def __init__(self, kind: str, entries: dict[str, str], *, open: bool = False) -> None:
        self.kind, self._open = kind, open
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Any:
        """The part itself, imported now.

        Raises:
            SpecError: nothing has that name, or a user's own cannot be imported.
        """
        self.check(name)
        if name not in self._entries:
            return self._imported(name)
        module, attribute = self._entries[name].split(":")
        return getattr(import_module(module), attribute)

    def _imported(self, name: str) -> Any:
        """A user's own part."""
        module, _, attribute = name.partition(":")
        try:
            found = import_module(module)
        except ImportError as error:
            raise SpecError(
                f"the {self.kind} {name!r} cannot be imported: {error}. Put {module}.py beside the "
                "recipe's file, or install it."
            ) from error
        if not hasattr(found, attribute):
            classes = [name for name, value in vars(found).items() if inspect.isclass(value)]
            raise SpecError(f"{module} has no {attribute!r}. {near_miss(attribute, classes)}")
        return getattr(found, attribute)

    def factory(
        self,
        name: str,
        options: Mapping[str, Any],
        *,
        where: str,
        apart: Collection[str] = (),
        beside: Collection[str] = (),
    ) -> Any:
        """The part, which has these options: a class or function that takes them by name.

        Args:
            options: of the job file.
            where: the section that has them, for messages.
            apart: parameters that are no options.
            beside: options that are no parameters: others read them.

        Raises:
            SpecError: nothing has that name, or it has no such option.
        """
        part = self[name]
        known = [option for option in inspect.signature(part).parameters if option not in apart]
        known += beside
        for option in options:
            if option not in known:
                raise SpecError(
                    f"{where}: {name} has no option {option!r}. {near_miss(option, known)}"
                )
        return part

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def check(self, name: str, where: str = "") -> None:
        """Raise `SpecError` unless `name` is in the table, or reads like a user's own; imports
        nothing.

        Args:
            where: the key of the job that has it, for the message.
        """
        if name not in self._entries and not (self._open and _is_path(name)):
            key = f"{where}: " if where else ""
            raise SpecError(f"{key}no {self.kind} is called {name!r}. {near_miss(name, self)}")


def _is_path(name: str) -> bool:
    """Whether it reads `module:attribute`."""
    module, colon, attribute = name.partition(":")
    parts = [*module.split("."), attribute]
    return bool(colon) and all(part.isidentifier() for part in parts)
