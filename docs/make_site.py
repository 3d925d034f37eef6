"""Build the documents as a web site with mkdocs-material, every link and heading checked.

    python docs/make_site.py build/site
    python docs/make_site.py --check         the links only: no theme, and no site is left

Pages stay where they are in the repository, with what they link to, so a link leads to the same
place in the site as in a checkout; a link to a folder leads to its files on the disk only, one to a
fragment of `changes` to its heading in the changelog. Needs `pip install 'instep[docs]'`, which is
in `make setup`. Nothing of the site is in the repository.
"""

from __future__ import annotations

import logging
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from make_changelog import changelog  # noqa: E402

FOLDERS = ("docs", "examples", "benchmarks", "containers", "src", "tests")
AT_THE_TOP = ("README.md", "CONTRIBUTING.md", "LICENSE")


def slug(heading: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", separator)


def settings(pages: Path, site: Path, *, plain: bool) -> dict[str, Any]:
    """The configuration of mkdocs; `plain` leaves out what no link depends on."""
    looks = {
        "theme": {"name": "material", "font": False, "features": ["navigation.indexes"]},
        "plugins": ["search"],
    }
    return {
        "site_name": "instep",
        "docs_dir": str(pages),
        "site_dir": str(site),
        "use_directory_urls": False,
        "strict": True,
        "markdown_extensions": [
            "tables",
            "fenced_code",
            {"toc": {"slugify": slug, "permalink": True}},
            *([] if plain else ["pymdownx.highlight", "pymdownx.superfences"]),
        ],
        "validation": {
            "omitted_files": "ignore",
            "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "info"},
        },
        **({"theme": {"name": "mkdocs", "highlightjs": False}, "plugins": []} if plain else looks),
    }


def lay_out(pages: Path) -> None:
    """Copy what the site has; of code, what pages link to."""
    for folder in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs", "make_*.py")
        shutil.copytree(ROOT / folder, pages / folder, ignore=skipped)
    for name in AT_THE_TOP:
        shutil.copy(ROOT / name, pages)
    (pages / "CHANGELOG.md").write_text(changelog(), encoding="utf-8")
    for page in pages.rglob("*.md"):
        text = page.read_text("utf-8")
        if (
            moved := re.sub(r"\]\(((?:\.\./)*)(changes/[\w.-]+\.md)\)", in_changelog, text)
        ) != text:
            page.write_text(moved, encoding="utf-8")


def in_changelog(link: re.Match[str]) -> str:
    """A link to a fragment as one to its heading in the changelog."""
    title = (ROOT / link[2]).read_text("utf-8").splitlines()[0].lstrip("# ")
    return f"]({link[1]}CHANGELOG.md#{slug(title, '-')})"


def main(site: Path, *, plain: bool = False) -> int:
    """Build the site; the exit code is 1 where a link leads nowhere."""
    from mkdocs.commands.build import build
    from mkdocs.config.base import load_config
    from mkdocs.exceptions import Abort

    with tempfile.TemporaryDirectory() as scratch:
        pages = Path(scratch) / "pages"
        pages.mkdir()
        lay_out(pages)
        empty = Path(scratch) / "mkdocs.yml"
        empty.write_text("")
        try:
            config = load_config(str(empty), **settings(pages, site.resolve(), plain=plain))
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
            build(config)
        except Abort as error:
            print(f"the site was not built: {error}", file=sys.stderr)
            return 1
    if not plain:
        print(f"site    {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        with tempfile.TemporaryDirectory() as nowhere:
            sys.exit(main(Path(nowhere), plain=True))
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")))
