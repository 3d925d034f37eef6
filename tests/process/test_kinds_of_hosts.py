"""Hosts whose processors compute with other instructions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from instep.cli import main

RECIPE = """
import os
import torch
from torch import nn
from torch.utils.data import TensorDataset
import instep
if "AS_A_GPU" in os.environ:
    from instep.worker.loop import kinds
    kinds.kind_of = lambda device: "cuda: made up"

def recipe():
    x = torch.randn(64, 20, generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 5))
    for each in model.parameters():
        nn.init.normal_(each, std=0.1)
    return instep.Recipe(
        model=model,
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


STRATEGIES = {
    "all_reduce": [],
    "servers": ["sync.name=server_sync", "sync.servers=1"],
    "rounds": ["sync.name=averaging", "sync.options.local_steps=2", "sync.participants=4"],
}
MESHES = {"replicas of two": ["workers=4", "mesh.shard=2"], "one replica": ["mesh.shard=2"]}


GPU_AND_CPU = """launch.hosts=["env AS_A_GPU=1 ATEN_CPU_CAPABILITY=default", "env"]"""


def written(folder: Path) -> None:
    """Leave a job on two hosts there, and the same job on this machine."""
    (folder / "net.py").write_text(RECIPE)
    (folder / "mixed.toml").write_text(JOB)
    here = JOB.partition("[launch]")[0].replace('network = "private"', "")
    (folder / "one.toml").write_text(here)


def trained(name: str, *settings: str) -> tuple[dict[str, torch.Tensor], list[dict[str, object]]]:
    """The model of a run, and what was told when workers took parameters."""
    chosen = [option for each in (f"name={name}", *settings) for option in ("--set", each)]
    assert main(["run", f"{name}.toml", *chosen]) == 0
    run = Path("runs") / name
    lines = map(json.loads, (run / "events.jsonl").read_text().splitlines())
    taken = [each for each in lines if each["event"] == "parameters_taken"]
    return load_file(run / "model.safetensors"), taken


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(HERE == "DEFAULT", reason="this processor has no further instructions")
@pytest.mark.parametrize("way", [*STRATEGIES, *MESHES])
def test_hosts_of_two_kinds_begin_with_the_parameters_of_the_first_one(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    model, taken = trained("mixed", *STRATEGIES.get(way, []), *MESHES.get(way, []))
    one, nothing = trained("one", *STRATEGIES.get(way, []), "workers=1")
    for name, tensor in one.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-5)
    assert not nothing
    assert taken
    assert all(0 < each["apart"] < 1e-5 for each in taken)  # type: ignore[operator]


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.skipif(HERE == "DEFAULT", reason="this processor has no further instructions")
def test_a_worker_whose_tensors_go_by_host_memory_trains_with_one_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    monkeypatch.chdir(tmp_path)
    model, taken = trained("mixed", GPU_AND_CPU)
    one, _ = trained("one", "workers=1")
    for name, tensor in one.items():
        torch.testing.assert_close(model[name], tensor, rtol=1e-5, atol=1e-5)
    assert [each["worker"] for each in taken] == [1]
    codec = ["--set", GPU_AND_CPU, "--set", "sync.codec=int8", "--set", "name=coded"]
    assert main(["run", "mixed.toml", *codec]) == 2
    assert "sync.codec = 'int8': rank 0 computes on 'cuda: made up'" in capsys.readouterr().err
