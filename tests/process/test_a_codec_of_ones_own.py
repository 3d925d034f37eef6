"""What the guide shows, in a file beside the recipe's, trains a run and survives a kill."""

import os
import re
import signal
from pathlib import Path

import pytest
from started import RECIPES, Start

from marks import slow

pytestmark = pytest.mark.process

GUIDE = Path(__file__).resolve().parents[2] / "docs/guides/adding-a-codec.md"


@pytest.mark.tail
@pytest.mark.parametrize("number", [0, slow(1)], ids=["codec", "hook"])
def test_what_the_guide_shows_trains_as_it_says(start: Start, tmp_path: Path, number: int) -> None:
    text = GUIDE.read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)[number]
    section = re.findall(r"^```toml\n(\[sync\]\n.*?)^```", text, re.M | re.S)[number]
    (file,) = re.findall(r'codec = "(\w+):', section)
    (tmp_path / f"{file}.py").write_text(code)
    for name in ("tiny", "slow_tiny"):
        (tmp_path / f"{name}.py").write_text((RECIPES / f"{name}.py").read_text("utf-8"))
    job, held = tmp_path / "job.toml", tmp_path / "held"
    held.touch()
    job.write_text(
        'recipe = "slow_tiny.py:recipe"\nworkers = 2\n[train]\nsteps = 60\nglobal_batch = 16\n'
        f'[arguments]\nheld = "{held}"\n' + section
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    pids = {int(e["worker"]): int(e["pid"]) for e in program.events("worker_joined")}
    os.kill(pids[1], signal.SIGKILL)
    held.unlink()
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    assert not program.events("warning")
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
