"""The page of benchmarks and the README show what was measured, each figure once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_benchmarks  # noqa: E402
from make_benchmarks import Source, pairs, row  # noqa: E402
from questions.base import Answer, Question, found  # noqa: E402


def test_the_pages_are_what_the_results_say():
    script = [sys.executable, str(ROOT / "docs" / "make_benchmarks.py"), "--check"]
    done = subprocess.run(script, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_result_that_was_noted_has_a_page_and_every_page_a_question():
    asked = {question.page for part in make_benchmarks.PARTS.values() for question in part}
    pages = {page.stem for page in (ROOT / "benchmarks" / "measured").glob("*.md")}
    assert asked == pages


def test_no_page_has_another_number_of_pairs():
    said = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text("utf-8").replace("\n", " ")
        said |= set(re.findall(r"(\d+) of (\d+) \[?pairs", text))
    assert said == {tuple(map(str, pairs()))}


@pytest.fixture
def measured(monkeypatch):
    """Results by their stems, the newest first."""

    def these(**contents):
        every = [Source(stem.replace("_", "-"), None, each) for stem, each in contents.items()]
        newest_first = sorted(every, key=lambda source: source.stem, reverse=True)
        monkeypatch.setattr(make_benchmarks, "sources", lambda: newest_first)

    return lambda contents: these(**contents)


def speed(**aims):
    return Question("speed", "page", "net", lambda result: found(result["speed"]), **aims)


def test_the_newest_result_that_has_a_figure_gives_it(measured):
    measured(
        {
            "2026-11-20-net": {"speed": 1.0},
            "2026-11-22-net": {"speed": 2.0},
            "2026-11-23-net": {"another figure": 3.0},
            "2026-11-24-mesh-net": {"speed": 4.0},
        }
    )
    assert (row(speed()).answer.figure, row(speed()).source.date) == ("2.00", "2026-11-22")
    with pytest.raises(LookupError, match="no result answers 'speed'"):
        row(speed()._replace(results="nothing"))


@pytest.mark.parametrize(
    ("aims", "reached"),
    [({}, ""), ({"least": 2.0}, "yes"), ({"most": 1.9}, "**no**"), ({"least": 2.1}, "**no**")],
)
def test_an_aim_that_is_not_reached_says_so(aims, reached):
    assert speed(**aims).reached(found([2.0, 2.0])) == reached


def test_every_value_has_to_reach_an_aim():
    assert speed(most=2.0).reached(found([1.0, 2.5])) == "**no**"
    assert speed(most=2.0).reached(Answer("not known")) == "**no**"
