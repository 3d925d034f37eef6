"""Build the documents as a web site with mkdocs-material, every link and heading checked.

    python docs/make_site.py build/site

Pages stay where they are in the repository, with what they link to, so a link leads to the same
place in the site as in a checkout; a link to a folder leads to its files on the disk only. Needs
`pip install 'instep[docs]'`. Nothing of the site is in the repository.
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


def settings(pages: Path, site: Path) -> dict[str, Any]:
    """The configuration of mkdocs."""
    return {
        "site_name": "instep",
        "docs_dir": str(pages),
        "site_dir": str(site),
        "use_directory_urls": False,
        "strict": True,
        "theme": {"name": "material", "font": False, "features": ["navigation.indexes"]},
        "markdown_extensions": [
            "tables",
            "fenced_code",
            {"toc": {"slugify": slug, "permalink": True}},
            "pymdownx.highlight",
            "pymdownx.superfences",
        ],
        "validation": {
            "omitted_files": "ignore",
            "links": {"not_found": "warn", "anchors": "warn", "unrecognized_links": "info"},
        },
        "plugins": ["search"],
    }


def lay_out(pages: Path) -> None:
    """Copy what the site has; of code, what pages link to."""
    for folder in FOLDERS:
        skipped = shutil.ignore_patterns("__pycache__", "*.egg-info", "runs", "make_*.py")
        shutil.copytree(ROOT / folder, pages / folder, ignore=skipped)
    for name in AT_THE_TOP:
        shutil.copy(ROOT / name, pages)
    (pages / "CHANGELOG.md").write_text(changelog(), encoding="utf-8")


def main(site: Path) -> int:
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
            config = load_config(str(empty), **settings(pages, site.resolve()))
            logging.basicConfig(level=logging.WARNING, format="%(message)s")
            build(config)
        except Abort as error:
            print(f"the site was not built: {error}", file=sys.stderr)
            return 1
    print(f"site    {site / 'index.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/site")))
