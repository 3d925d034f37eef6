"""Write `CHANGELOG.md`: what a user can do now, by version, from the fragments in `changes/`.

    python docs/make_changelog.py            write the file
    python docs/make_changelog.py --check    exit 1 if it is not what would be written

A version is a folder of `changes/`, with the fragments that it has; those of the next one lie in
`changes/` itself. `make dist` writes the file anew; it is not in the repository.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHANGES, FILE = ROOT / "changes", ROOT / "CHANGELOG.md"


def changelog() -> str:
    """The whole file; the newest version and the newest fragments come first."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    earlier = [folder for folder in CHANGES.iterdir() if folder.is_dir() and folder.name != version]
    earlier.sort(key=lambda folder: [*map(int, folder.name.split("."))], reverse=True)
    parts = ["# Changes\n"]
    for name, folder in [(version, CHANGES), *((each.name, each) for each in earlier)]:
        parts.append(f"## {name}\n")
        parts += [fragment(file) for file in sorted(folder.glob("*.md"), reverse=True)]
    return "\n".join(parts)


def fragment(file: Path) -> str:
    """Its text, with its heading below that of a version."""
    title, *lines = file.read_text("utf-8").strip().splitlines()
    heading = f"### {title.lstrip('# ')}"
    text = "\n".join([heading, *_below(lines), ""])
    return text.replace("](../", "](")  # it is read from a folder above


def _below(lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield f"##{line}" if line.startswith("#") else line


def main(arguments: list[str]) -> int:
    """Write the file, or with `--check` compare it; returns the exit code."""
    wanted = changelog()
    if arguments == ["--check"]:
        return int(not FILE.is_file() or FILE.read_text("utf-8") != wanted)
    FILE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
