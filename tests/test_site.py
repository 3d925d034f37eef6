"""The changelog has every fragment, and the site every page, with links that lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_site  # noqa: E402
from make_changelog import changelog  # noqa: E402
from make_site import FOLDERS  # noqa: E402


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
    pages = [*ROOT.glob("*.md"), *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.md"))]
    assert len(pages) > 100
    for page in pages:
        name = "index.html" if page.name == "README.md" else f"{page.stem}.html"
        assert (tmp_path / "site" / page.relative_to(ROOT).with_name(name)).is_file(), page


def test_the_check_of_the_site_names_a_link_that_leads_nowhere(tmp_path, monkeypatch, caplog):
    pytest.importorskip("mkdocs", reason="needs the extra `docs`")
    (tmp_path / "README.md").write_text("# instep\n\nSee [this](docs/a.md#there), [that](b.md).\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.md").write_text("# a\n")
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    monkeypatch.setattr(make_site, "changelog", lambda: "# Changes\n")
    monkeypatch.setattr(make_site, "FOLDERS", ("docs",))
    monkeypatch.setattr(make_site, "AT_THE_TOP", ("README.md",))
    assert make_site.main(tmp_path / "site", plain=True) == 1
    assert "'docs/a.md#there'" in caplog.text
    assert "'b.md'" in caplog.text


def test_a_link_to_a_fragment_leads_to_its_heading_in_the_changelog():
    title = (ROOT / "changes" / "0011-chaos.md").read_text().splitlines()[0].lstrip("# ")
    link = re.match(r"\]\(((?:\.\./)*)(.*)\)", "](../changes/0011-chaos.md)")
    assert make_site.in_changelog(link) == f"](../CHANGELOG.md#{make_site.slug(title, '-')})"
