"""`instep plan` on this machine: real processes, which leave nothing."""

import json
import tempfile
from pathlib import Path

import pytest

from instep.cli import main
from instep.store.run_folder import RunFolder

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep

def recipe():
    x = torch.randn(256, 20)
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(20, 100), nn.ReLU(), nn.Linear(100, 5)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.Adam(p, lr=0.01),
        train=TensorDataset(x, x[:, :5].argmax(dim=1)),
    )
"""
JOB = """
name = "net"
recipe = "net.py:recipe"
[train]
steps = 6
global_batch = 32
micro_batches = 4
"""
PARAMETERS = 20 * 100 + 100 + 100 * 5 + 5


@pytest.mark.process
def test_a_plan_counts_bytes_as_they_are_and_leaves_no_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    temporary = Path(tempfile.gettempdir())
    there = {path.name for path in tmp_path.iterdir()}
    assert main(["plan", "job.toml", "--most", "2", "--seconds", "600", "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    rows = {row["way"]: row for row in table["ways"]}
    for name in ("1 worker", "2 all_reduce", "2 server_sync, 1 server"):
        assert rows[name]["measured"], (table["refused"], name)
        assert rows[name]["worker_bytes"] > 50e6
    both = rows["2 all_reduce"]["sent_bytes"], rows["2 server_sync, 1 server"]["sent_bytes"]
    for sent in both:  # a ring of two and a server: as much as the parameters, and small notes
        assert 4 * PARAMETERS <= sent <= 4 * PARAMETERS + 5000
    ranked = [row["step_s"] for row in table["ways"] if row["same_result"]]
    assert ranked == sorted(ranked)
    assert table["job"]["same_as_one_machine"] == "yes"
    assert {path.name for path in tmp_path.iterdir()} == there
    assert not list(temporary.glob("instep-plan-*"))


@pytest.mark.process
@pytest.mark.tail
def test_a_run_plans_its_workers_and_has_the_hash_of_one_that_does_not(
    tmp_path, monkeypatch, capsys
):
    (tmp_path / "net.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text(JOB.replace("steps = 6", "steps = 14"))
    monkeypatch.chdir(tmp_path)

    def run(*words):
        assert main(["run", "job.toml", "--set", "train.determinism=bits", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out.splitlines()[-1])

    planned = run("--workers", "auto")
    assert planned["workers"] == planned["planned"]["workers"]
    assert planned["planned"]["low_s"] <= planned["planned"]["step_s"]
    plain = run("--workers", "1")
    assert plain["planned"] is None
    assert plain["parameters_sha256"] == planned["parameters_sha256"]


@pytest.mark.process
@pytest.mark.tail
def test_the_workers_of_a_job_file_can_be_left_to_a_plan(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(RECIPE)
    few = JOB.replace("micro_batches = 4", "micro_batches = 2")  # so two workers at most
    (tmp_path / "job.toml").write_text(
        few.replace('name = "net"', 'name = "net"\nworkers = "auto"')
    )
    monkeypatch.chdir(tmp_path)
    assert main(["run", "job.toml", "--json"]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["workers"] == summary["planned"]["workers"]
    assert summary["workers"] in (1, 2)
    assert RunFolder(tmp_path / "runs" / "net").spec.workers == summary["workers"]
