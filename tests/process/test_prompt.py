"""A recipe that was typed at Python's prompt trains on forks of that Python."""

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]

TYPED = """
import torch, instep
def recipe():
    data = torch.utils.data.TensorDataset(torch.randn(80, 8), torch.zeros(80).long())
    return instep.Recipe(
        model=torch.nn.Linear(8, 2), loss=torch.nn.CrossEntropyLoss(), train=data,
        optimizer=torch.optim.AdamW)

run = instep.train(recipe, workers=2, train={"epochs": 1, "global_batch": 40})
print("ended", run.summary["outcome"])
"""


@pytest.mark.parametrize("way", [("-i", "-q"), ("-c", TYPED)])
def test_it_trains_as_in_a_notebook(tmp_path, way):
    done = subprocess.run(
        [sys.executable, *way], input=TYPED, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "ended completed" in done.stdout
    assert json.loads((tmp_path / "runs/recipe/summary.json").read_text())["workers"] == 2
