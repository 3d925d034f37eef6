"""The changelog: versions are in `CHANGELOG.md`, what came since in the fragments of `changes/`.

    python docs/make_changelog.py            print what came since the newest version
    python docs/make_changelog.py 0.4.0      begin a version with it, and remove the fragments

A version begins with a line for each fragment: its title. Then group and merge them by hand, as
`CONTRIBUTING.md` says.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES, FILE = ROOT / "changes", ROOT / "CHANGELOG.md"


def fragments() -> list[Path]:
    """What came since the newest version, the newest first."""
    return sorted(CHANGES.glob("*.md"), reverse=True)


def changelog() -> str:
    """The file, with the fragments above its newest version, as the site shows it."""
    since = [fragment(file) for file in fragments()]
    return _above_the_newest("\n".join(["## Since then\n", *since])) if since else _versions()


def fragment(file: Path) -> str:
    """Its text, with its heading below that of a version."""
    title, *lines = file.read_text("utf-8").strip().splitlines()
    heading = f"### {title.lstrip('# ')}"
    text = "\n".join([heading, *_below(lines), ""])
    return text.replace("](../", "](")  # it is read from a folder above


def _below(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"##{line}" if line.startswith("#") else line


def begin(version: str) -> None:
    """Put a line for each fragment above the newest version, and remove the fragments."""
    files = fragments()
    lines = [f"- {file.read_text('utf-8').splitlines()[0].lstrip('# ')}." for file in files]
    text = _above_the_newest("\n".join([f"## {version}\n", *lines, ""]))
    FILE.write_text(text, encoding="utf-8")
    for file in files:
        file.unlink()


def _versions() -> str:
    return FILE.read_text("utf-8")


def _above_the_newest(text: str) -> str:
    opening, newest, rest = _versions().partition("\n## ")
    return f"{opening}\n{text}{newest}{rest}"


def main(arguments: list[str]) -> int:
    """Print what came since, or begin a version; returns the exit code."""
    if not arguments:
        print("\n".join(map(fragment, fragments())))
    elif len(arguments) == 1 and re.fullmatch(r"\d+\.\d+\.\d+", arguments[0]):
        begin(arguments[0])
    else:
        print(__doc__)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
