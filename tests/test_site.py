"""The changelog has versions that can be read and every fragment since, the site every page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import instep

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_changelog  # noqa: E402
import make_site  # noqa: E402
from make_changelog import changelog  # noqa: E402
from make_site import FOLDERS  # noqa: E402


def test_the_newest_version_of_the_changelog_is_that_of_the_package_in_groups_of_single_lines():
    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    newest = text.split("\n## ")[1].splitlines()
    assert newest[0] == instep.__version__
    groups = [line for line in newest if line.startswith("### ")]
    lines = [line for line in newest if line.startswith("- ")]
    assert len(groups) >= 3
    assert 20 <= len(lines) <= 200
    assert max(map(len, lines)) <= 180
    beside = [line for line in newest[1:] if line[:2] not in ("- ", "##", "")]
    assert len(beside) <= 10  # no line goes on in a next one


def test_the_changelog_has_every_fragment_above_the_newest_version():
    since = changelog().partition(f"\n## {instep.__version__}\n")[0]
    titles = [file.read_text("utf-8").splitlines()[0] for file in (ROOT / "changes").glob("*.md")]
    assert all(title.startswith("# ") for title in titles)
    assert sorted(line for line in since.splitlines() if line.startswith("### ")) == sorted(
        f"##{title}" for title in titles
    )
    assert "](../" not in changelog()


def test_a_version_begins_with_a_line_for_each_fragment_and_removes_them(tmp_path, monkeypatch):
    changes, file = tmp_path / "changes", tmp_path / "CHANGELOG.md"
    changes.mkdir()
    monkeypatch.setattr(make_changelog, "CHANGES", changes)
    monkeypatch.setattr(make_changelog, "FILE", file)
    file.write_text("# Changes\n\nBy version.\n\n## 0.3.0\n\n- Trains.\n")
    assert changelog() == file.read_text()
    (changes / "0001-a.md").write_text("# `instep a`\n\nSays a.\n")
    (changes / "0002-b.md").write_text("# A second b\n\nSays b. See [a](../docs/a.md).\n")
    since = "## Since then\n\n### A second b\n\nSays b. See [a](docs/a.md).\n\n### `instep a`\n"
    assert since in changelog()
    assert make_changelog.main(["0.4.0"]) == 0
    assert file.read_text() == (
        "# Changes\n\nBy version.\n\n## 0.4.0\n\n- A second b.\n- `instep a`.\n\n"
        "## 0.3.0\n\n- Trains.\n"
    )
    assert not [*changes.iterdir()]
    assert make_changelog.main(["4"]) == 2


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


def test_a_link_to_a_fragment_leads_to_its_heading_in_the_changelog(tmp_path, monkeypatch):
    monkeypatch.setattr(make_site, "ROOT", tmp_path)
    (tmp_path / "changes").mkdir()
    (tmp_path / "changes" / "0011-chaos.md").write_text("# Chaos, and more\n\nText.\n")
    link = re.match(r"\]\(((?:\.\./)*)(.*)\)", "](../changes/0011-chaos.md)")
    assert make_site.in_changelog(link) == "](../CHANGELOG.md#chaos-and-more)"
