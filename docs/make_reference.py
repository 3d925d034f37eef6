"""Write `docs/reference/job-file.md` from the fields of `instep.job`.

    python docs/make_reference.py            write the page
    python docs/make_reference.py --check    exit 1 if the page is not what would be written

It knows nothing of what a key does: names, types, defaults and texts are
those of the spec, so the page cannot differ from the code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from instep.job.base import Section
from instep.job.spec import JobSpec, documentation

PAGE = Path(__file__).resolve().parent / "reference" / "job-file.md"

_OPENING = """# Job file

A job file says what to train and how. It is TOML, and only `recipe` is required:

```toml
recipe = "net.py:recipe"
workers = 4

[train]
epochs = 3
```

```sh
instep run job.toml
instep run job.toml --set train.epochs=5
```

`--set section.key=value` overrides a value of the file. Another `sync.name` or `sync.codec` keeps
the options that it has too; the others are left out, and each is
[said](command-line.md#instep-run). An unknown key, a wrong type or an impossible value is refused
before anything starts; the message names the file, or the `--set`, the key, the given value and the
valid ones. A renamed key is refused with its new name. Paths of the recipe and of the model to
start from are relative to the job file. `job.toml` in the run folder has the job as run, with every
key. [Strategies](../concepts/strategies.md) explains `[sync]`.

`docs/make_reference.py` writes this page from `src/instep/job/`; change the texts there.
"""

_WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


Key = msgspec.structs.FieldInfo


def page() -> str:
    """The whole page."""
    fields = msgspec.structs.fields(JobSpec)
    tables = [key for key in fields if _is_table(key.type)]
    parts = [_OPENING, "## At the top\n", _text(JobSpec), ""]
    parts += [*_table(JobSpec, [key for key in fields if key not in tables]), ""]
    for key in tables:
        parts += [f"## [{key.name}]\n", *_section(key), ""]
    parts.append(
        "Next: [command line](command-line.md), or [your own model](../guides/your-own-model.md)."
    )
    return "\n".join(parts).rstrip() + "\n"


def _is_table(annotation: Any) -> bool:
    return get_origin(annotation) is dict or _is_section(annotation)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def _section(key: Key) -> Iterator[str]:
    if not _is_section(key.type):
        yield f"{documentation()['JobSpec', key.name]} Any keys that the recipe's function has."
        return
    yield _text(key.type)
    yield ""
    yield from _table(key.type, list(msgspec.structs.fields(key.type)))


def _text(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _table(section: type[Section], keys: list[Key]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    hints = get_type_hints(section, include_extras=True)
    for key in keys:
        text = documentation()[section.__name__, key.name].replace("|", "\\|")
        kinds = ", ".join(dict.fromkeys(_words(hints[key.name], "")))
        yield f"| `{key.name}` | {kinds} | {_default(key)} | {text} |"


def _default(key: Key) -> str:
    if key.default_factory is not msgspec.NODEFAULT:
        return f"`{key.default_factory()}`"
    if key.default is msgspec.NODEFAULT:
        return "required"
    return "not set" if key.default is None else f"`{_toml(key.default)}`"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _words(annotation: Any, limits: str) -> Iterator[str]:
    """The values that a key takes, one string for each alternative."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _words(inner[0], _limits(inner[1:]))
    elif origin in (Union, UnionType):
        for part in inner:
            if part is not type(None):
                yield from _words(part, limits)
    elif origin is Literal:
        yield from (f"`{_toml(value)}`" for value in inner)
    elif origin is dict:
        yield "table" if inner[1] is Any else f"table, each a {' or '.join(_words(inner[1], ''))}"
    elif origin is tuple:
        yield f"list of {' or '.join(_words(inner[0], ''))}"
    else:
        yield _WORDS[annotation] + limits


def _limits(metadata: tuple[Any, ...]) -> str:
    words = {"ge": " from ", "gt": " above "}
    found = [(words[rule], getattr(meta, rule)) for meta in metadata for rule in words]
    return "".join(f"{word}{limit}" for word, limit in found if limit is not None)


def main(arguments: list[str]) -> int:
    """Write the page, or with `--check` compare it; returns the exit code."""
    wanted = page()
    if arguments == ["--check"]:
        if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{PAGE} is not what src/instep/job says: run python {sys.argv[0]}.")
        return 1
    if arguments:
        print(__doc__)
        return 2
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
