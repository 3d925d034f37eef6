"""Hosts whose processors compute with other instructions."""

import pytest
import torch

from instep.cli import main

RECIPE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep

def recipe():
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    return instep.Recipe(
        model=nn.Linear(20, 5),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        train=TensorDataset(x, x[:, :5].argmax(dim=1)),
    )
"""
JOB = """
name = "net"
recipe = "net.py:recipe"
workers = 2
network = "private"
[train]
steps = 4
global_batch = 32
micro_batches = 4
[launch]
hosts = ["env ATEN_CPU_CAPABILITY=default", "env"]
address = "127.0.0.1"
"""
HERE = torch.backends.cpu.get_cpu_capability()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(HERE == "DEFAULT", reason="this processor has no further instructions")
def test_hosts_of_two_kinds_are_refused_by_name_for_the_same_bits(tmp_path, monkeypatch, capsys):
    (tmp_path / "net.py").write_text(RECIPE)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    assert main(["run", "job.toml", "--set", "train.determinism=bits"]) == 2
    said = capsys.readouterr().err
    assert "train.determinism = 'bits'" in said
    assert HERE in said
    assert "DEFAULT" in said
    records = tmp_path / "runs" / "net" / "steps.bin"
    assert not records.exists() or not records.read_bytes()
