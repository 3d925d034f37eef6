"""What the documents say holds: links lead somewhere, commands parse, code compiles."""

import copy
import difflib
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from instep import errors, events, vocabulary
from instep.cli import COMMANDS, GROUPS
from instep.cli.parsing import make_parser
from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.data import SOURCES
from instep.engine.gradients import Gradients
from instep.job import file as spec_file
from instep.records import Attempt
from instep.sync import STRATEGIES
from instep.sync.all_reduce import AllReduce
from instep.sync.generation import Generation

ROOT = Path(__file__).resolve().parent.parent
ZEROS = torch.zeros(50)
_BUILT = {".venv", "runs", "build", ".pytest_cache", ".hypothesis"}
PAGES = sorted(
    page
    for page in ROOT.rglob("*.md")
    if not _BUILT & set(page.relative_to(ROOT).parts) and ".egg-info" not in str(page)
)
JOB_KEYS = {"recipe"}
"""A TOML block with these keys at the top is a whole job file."""


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    """(language, text) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", page.read_text("utf-8"), re.M | re.S):
        yield match[1], match[2]


def shown_as(language: str) -> Iterator[tuple[Path, str]]:
    """(page, text) of every fenced block in a language."""
    for page in PAGES:
        yield from ((page, text) for name, text in blocks(page) if name == language)


def commands(page: Path) -> Iterator[list[str]]:
    """The arguments of every `instep ...` line in the page's fenced blocks."""
    for language, text in blocks(page):
        if language not in ("sh", "bash", "console"):
            continue
        for line in text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and Path(words[0]).name == "instep":
                yield words[1:]


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    return [match[1].replace("`", "") for match in re.finditer(r"^#+ (.+)$", text, re.M)]


def each(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_every_relative_link_leads_to_a_file_and_a_heading():
    anchors, wrong = cache(lambda target: set(map(slug, headings(target)))), []
    for page in PAGES:
        plain = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
        for link in re.findall(r"\]\(([^)\s]+)\)", plain):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            if re.match(r"[a-z]+:", link):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                wrong.append(f"{each(page)}: {link}")
    assert wrong == []


def test_every_command_that_is_shown_is_one_that_exists():
    parser = make_parser(GROUPS)
    shown = [(page, words) for page in PAGES for words in commands(page)]
    for page, words in shown:
        if not {"--help", "--version"} & set(words):
            try:
                parser.parse_args(words)
            except (SystemExit, errors.InstepError) as error:
                pytest.fail(f"{each(page)}: instep {shlex.join(words)}: {error}")


def test_every_python_block_compiles():
    for page, text in shown_as("python"):
        compile(text, each(page), "exec")


def test_every_job_file_that_is_shown_would_be_accepted():
    for page, text in shown_as("toml"):
        table = tomllib.loads(text)
        whole = table if set(table) >= JOB_KEYS else {"recipe": "a.py:recipe", **table}
        spec_file.build(whole, source=each(page))


def test_the_checks_above_have_something_to_check():
    readme = ROOT / "README.md"
    assert readme in PAGES
    assert len(list(commands(readme))) >= 2
    assert {"python", "toml"} <= {language for language, _ in blocks(readme)}


def test_the_reference_of_the_job_file_is_what_the_spec_says():
    script = [sys.executable, str(ROOT / "docs" / "make_reference.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0


def test_the_page_of_what_goes_together_is_what_jobs_are_checked_by():
    script = [sys.executable, str(ROOT / "docs" / "make_together.py"), "--check"]
    assert subprocess.run(script, check=False).returncode == 0


def test_every_error_has_its_heading_with_its_exit_code():
    text = (ROOT / "docs/reference/errors.md").read_text("utf-8")
    for error in vars(errors).values():
        if isinstance(error, type) and issubclass(error, errors.InstepError):
            pattern = rf"^## {error.__name__}\n\nExit code {error.exit_code}\."
            assert re.search(pattern, text, re.M), error.__name__
    assert str(errors.INTERRUPTED) in text


def test_every_event_and_record_field_is_on_the_page_of_events():
    text = (ROOT / "docs/reference/events.md").read_text("utf-8")
    names = [*vocabulary.EVENTS, *(events.LEDGER.names or ()), *(events.STEPS.names or ())]
    assert [name for name in names if f"`{name}`" not in text] == []
    for name, fields in vocabulary.EVENTS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        plain = re.sub(r"\(.*?\)", "", fields)
        missing = [f for f in re.findall(r"\b[a-z_0-9]+\b", plain) if f not in row]
        assert missing == [] or name == "worker_ready", f"{name} has {missing}"


def test_every_strategy_source_and_codec_has_its_heading():
    strategies = ("strategies", "strategies-with-rounds", "strategies-with-servers", "sign-vote")
    for table, pages in (
        (STRATEGIES, [f"concepts/{name}.md" for name in strategies]),
        (SOURCES, ["reference/sources.md"]),
        (CODECS, ["guides/adding-a-codec.md"]),
    ):
        assert set(table) <= {title for page in pages for title in headings(ROOT / "docs" / page)}


def test_every_command_has_its_heading_in_the_order_of_the_help():
    titles = headings(ROOT / "docs/reference/command-line.md")
    own = [title for title in titles if title.startswith("instep ")]
    assert own == [f"instep {name}" for name in COMMANDS]


def test_every_variable_that_is_set_in_the_environment_is_on_the_page():
    page = (ROOT / "docs/reference/command-line.md").read_text("utf-8")
    found = set()
    for file in (ROOT / "src/instep").rglob("*.py"):
        text = file.read_text("utf-8")
        for quote, name in re.findall(r'environ\.setdefault\(("?)(\w+)', text):
            constants = re.findall(rf'^{name} = "(\w+)"', text, re.M)
            found |= {name} if quote else set(constants)
    assert len(found) >= 5
    assert [name for name in sorted(found) if f"| `{name}` |" not in page] == []


def test_every_place_in_the_code_that_the_architecture_names_exists():
    text = (ROOT / "docs/architecture.md").read_text("utf-8")
    places = re.findall(r"`((?:\w+/)*\w+\.py):([\w.]+)`", text)
    texts = {path: path.read_text("utf-8") for path in (ROOT / "src/instep").rglob("*.py")}
    assert len(places) > 20
    for file, name in places:
        found = [path for path in texts if path.match(file)]
        assert found, f"there is no {file}"
        for part in name.split("."):
            pattern = rf"^ *(?:def|class) {part}\b"
            assert any(re.search(pattern, texts[p], re.M) for p in found), (file, name)


def test_the_strategy_that_the_guide_shows_equals_all_reduce():
    guide = ROOT / "docs/guides/adding-a-strategy.md"
    (code,) = (text for language, text in blocks(guide) if language == "python")
    shown: dict[str, Any] = {}
    exec(compile(code, each(guide), "exec"), shown)
    for mine, theirs in zip(agreed(shown["OneByOne"]), agreed(AllReduce), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_strategy_that_remembers_applies_or_keeps_all_of_every_gradient():
    guide = ROOT / "docs/guides/a-strategy-that-remembers.md"
    (code,) = (text for language, text in blocks(guide) if language == "python")
    shown: dict[str, Any] = {}
    exec(compile(code, each(guide), "exec"), shown)

    def one(comm: Any) -> list[torch.Tensor]:
        draws, parameter = torch.Generator().manual_seed(comm.rank), torch.nn.Parameter(ZEROS)
        mine, applied = shown["Rounded"](), ZEROS
        gradients = torch.randn(5, len(ZEROS), generator=draws)
        mine.start([parameter], comm, Generation(notes=1))
        for number, gradient in enumerate(gradients):
            mine.begin_step(Attempt(0, number + 1, 0))
            mine.begin_pass(1 / 3, last=True)
            mine.gradient(0, gradient)
            mine.exchange(torch.ones(1, dtype=torch.float64))
            mine.hand_out()
            applied = applied + mine.apply(lambda: parameter.grad.clone())
        mine.stop()
        return [applied, mine.own_state()["residual/0"], gradients.sum(0) / 3]

    applied, left, given = zip(*run_ranks(3, one), strict=True)
    assert all(torch.equal(each, applied[0]) for each in applied)
    assert all(each.any() for each in left)
    torch.testing.assert_close(applied[0] + sum(left), sum(given, ZEROS))


def test_the_source_that_the_guide_shows_reads_a_table_and_names_what_is_wrong(tmp_path):
    guide = ROOT / "docs/guides/adding-a-data-source.md"
    code, _ = (text for language, text in blocks(guide) if language == "python")
    shown: dict[str, Any] = {}
    exec(compile(code, each(guide), "exec"), shown)
    file = tmp_path / "points.csv"
    file.write_text("x,label,y\n1,0,2.5\n3,1,4\n")
    inputs, classes = shown["csv_table"](file).tensors
    assert inputs.tolist() == [[1, 2.5], [3, 4]]
    assert classes.tolist() == [0, 1]
    for text, wrong in (
        ("", "has no column 'label'. It has: none."),
        ("x,y\n1,2\n", "has no column 'label'. It has: x, y."),
        ("x,label\n1,2\n3,x\n", "line 3: ['3', 'x'] is not a row of numbers."),
        ("x,label\n1\n", "line 2: ['1'] is not a row of numbers."),
        ("label,x\n1\n", "line 2: 1 values for 2 columns."),
    ):
        file.write_text(text)
        with pytest.raises(errors.DataError, match=re.escape(wrong)):
            shown["csv_table"](file)


def agreed(strategy: Any) -> list[torch.Tensor]:
    """Gradients and notes of one step on three ranks with a pass each, of the last rank."""

    torch.manual_seed(0)
    whole = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))

    def one(comm: Any) -> list[torch.Tensor]:
        model = copy.deepcopy(whole)
        parameters, mine = list(model.parameters()), strategy()
        mine.start(parameters, comm, Generation(notes=1))
        listening = Gradients(parameters, mine.gradient)
        mine.begin_pass((comm.rank + 1) / 6, last=True)
        model(torch.full((5, 4), float(comm.rank))).square().mean().backward()
        notes = mine.exchange(torch.tensor([float(comm.rank)], dtype=torch.float64))
        mine.hand_out()
        gradients = mine.apply(lambda: [parameter.grad.clone() for parameter in parameters])
        listening.close()
        mine.stop()
        return [*gradients, notes]

    return run_ranks(3, one)[-1]


COMING_FROM = ROOT / "examples" / "coming_from"


def test_the_pages_for_those_who_come_from_elsewhere_show_the_programs_that_are_tested():
    shown = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        found = re.findall(r"^<!-- (examples/\S+) -->\n```python\n(.*?)^```", text, re.M | re.S)
        shown |= {ROOT / file: code for file, code in found}
    assert shown == {file: file.read_text("utf-8") for file in COMING_FROM.rglob("*.py")}


def test_at_most_ten_lines_of_a_script_for_ddp_go_and_at_most_ten_come():
    theirs, ours = (
        (COMING_FROM / "ddp" / f"with_{name}.py").read_text("utf-8").splitlines()
        for name in ("ddp", "instep")
    )
    changes = [line[0] for line in difflib.ndiff(theirs, ours)]
    gone, come = changes.count("-"), changes.count("+")
    assert max(gone, come) <= 10
    page = (ROOT / "docs/guides/from-ddp.md").read_text("utf-8")
    assert f"{gone} lines go and {come} come" in page
