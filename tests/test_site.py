"""The changelog has every fragment, and the site every page, with links that lead somewhere."""

import subprocess
import sys
from pathlib import Path

import pytest

import instep

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

from make_changelog import changelog  # noqa: E402


def test_the_changelog_has_every_fragment_below_its_version():
    lines = changelog().splitlines()
    titles = [file.read_text().splitlines()[0] for file in (ROOT / "changes").rglob("*.md")]
    assert lines[2] == f"## {instep.__version__}"
    assert all(title.startswith("# ") for title in titles)
    assert sorted(line for line in lines if line.startswith("### ")) == sorted(
        f"##{title}" for title in titles
    )
    assert "](../" not in "\n".join(lines)


@pytest.mark.slow
def test_the_site_has_every_page_and_no_link_that_leads_nowhere(tmp_path):
    pytest.importorskip("material", reason="needs the extra `docs`")
    words = [sys.executable, str(ROOT / "docs" / "make_site.py"), str(tmp_path / "site")]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in (ROOT / "docs").rglob("*.md"):
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (tmp_path / "site" / page.relative_to(ROOT).with_name(name)).is_file(), page
