"""The examples of the guides, added to a copy of instep as the guides say, train and survive."""

import json
import re
import shutil
from pathlib import Path

import pytest
from started import RECIPES, Start

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.process


def follow(guide: str, package: Path) -> list[str]:
    """Do the first two steps of a guide: its file, and its line in the table.

    Returns the other Python blocks of the guide.
    """
    text = (ROOT / "docs" / "guides" / guide).read_text("utf-8")
    file, table = re.findall(r"`src/(instep/\S+\.py)`", text)[:2]
    code, *others = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (line,) = re.findall(r'^```text\n(".+": .+,)\n```', text, re.M)
    (name,) = re.findall(r"`([A-Z_]+)` in\s+`src/instep", text)
    (package / file).write_text(code)
    pattern = re.compile(rf"(^{name}\b.*?)(^(?:    }},|}})$)", re.M | re.S)
    added, count = pattern.subn(rf"\1        {line}\n\2", (package / table).read_text())
    assert count == 1, f"{table} has {count} tables {name}"
    (package / table).write_text(added)
    return others


def check_survives_kills(start: Start, job: Path, package: Path) -> None:
    """Two workers of a job are killed, and the result is that of an undisturbed run."""
    chaos = ("-m", "instep", "chaos", job, "--kills", "2", "--roles", "worker", "--json")
    program = start(*chaos, environment={"PYTHONPATH": str(package)})
    assert program.end() == 0, program.stderr
    verdict = json.loads(program.stdout.splitlines()[-1])
    assert verdict["holds"]
    assert verdict["injected"] == 2


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a copy of instep, to add to."""
    copy = tmp_path / "copy"
    caches = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "src" / "instep", copy / "instep", ignore=caches)
    return copy


@pytest.mark.slow
def test_a_source_and_a_launcher_of_the_guides_train_and_survive_kills(
    start: Start, tmp_path: Path, package: Path
) -> None:
    (recipe,) = follow("adding-a-data-source.md", package)
    assert follow("adding-a-launcher.md", package) == []
    nice = "import os\n\nassert os.nice(0) >= 5, os.nice(0)\n"
    (tmp_path / "net.py").write_text(nice + recipe)
    rows = [f"{x},{y},{int(x > y)}" for x in range(8) for y in range(8)]
    (tmp_path / "points.csv").write_text("\n".join(["x,y,label", *rows]))
    job = tmp_path / "job.toml"
    job.write_text(
        'name = "net"\nrecipe = "net.py:recipe"\n'
        '[train]\nsteps = 40\nglobal_batch = 16\ndeterminism = "bits"\n'
        '[checkpoint]\nevery = 5\n[launch]\non = "nice"\n'
        f'[arguments]\ndata = "{tmp_path / "points.csv"}"\n'
    )
    check_survives_kills(start, job, package)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("guide", "key", "others"),
    [
        ("adding-a-strategy.md", 'name = "one_by_one"', 0),
        ("a-strategy-that-remembers.md", 'name = "rounded"', 0),
        ("adding-a-codec.md", 'codec = "float8"', 1),  # a hook, of which another test knows
    ],
)
def test_a_strategy_and_a_codec_of_the_guides_train_and_survive_kills(
    start: Start, tmp_path: Path, package: Path, guide: str, key: str, others: int
) -> None:
    assert len(follow(guide, package)) == others
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "net"\nrecipe = "{RECIPES / "tiny.py"}:recipe"\n'
        f"[train]\nsteps = 40\n[checkpoint]\nevery = 5\n[sync]\n{key}\n"
    )
    check_survives_kills(start, job, package)
