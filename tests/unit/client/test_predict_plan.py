"""Which job, mesh and batches a command predicts with, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from instep.cli import main
from instep.client.job_checks import check_job
from instep.client.predict.plan import PredictSource, source_of
from instep.errors import SpecError
from instep.job.file import build


def of_file(folder: Path, *overrides: str, workers: int | None = None) -> PredictSource:
    file = folder / "net.safetensors"
    save_file({"weight": torch.zeros(2)}, file)
    return source_of(file, "net.py:recipe", overrides, workers)


def test_a_batch_is_that_of_the_job_and_the_number_of_workers_is_not_limited_by_micro_batches(
    tmp_path: Path,
):
    few = ("train.global_batch=24", "train.micro_batches=3", "train.merge=never")
    source = of_file(tmp_path, *few, workers=40)
    assert (source.job.workers, source.batch) == (40, 8)
    assert of_file(tmp_path, *few[:2], workers=2).batch == 24


def test_workers_make_whole_replicas(tmp_path: Path):
    mesh = of_file(tmp_path, "mesh.shard=4", "mesh.checkpointing=blocks", workers=8).job.mesh
    assert (mesh.shard, mesh.ranks, mesh.checkpointing) == (4, 4, "none")
    assert of_file(tmp_path, "mesh.shard=4", "workers=4").job.workers == 4
    with pytest.raises(SpecError, match=r"workers = 6: a replica has 4 processes .* so 4, 8, ..."):
        of_file(tmp_path, "mesh.shard=4", workers=6)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("mesh.shards=2", "Did you mean 'shard'?"),
        ("mesh.shard=0", "mesh.shard = 0: needs to be at least 1"),
        ("train.micro_batches=0", "train.micro_batches = 0: needs to be at least 1"),
        ("mesh=2", "mesh = 2"),
    ],
)
def test_a_mesh_that_cannot_predict_is_refused(tmp_path: Path, override: str, says: str):
    with pytest.raises(SpecError) as refused:
        of_file(tmp_path, override, workers=4)
    assert says in str(refused.value)


@pytest.mark.parametrize(
    "mesh",
    [
        {"sequence": True},
        {"tensor": 2, "stages": 2, "sequence": True},
        {"plan": {"blocks.*": "column"}},
        {"schedule": "gpipe"},
        {"tensor": 2, "pipeline_batches": 2},
        {"cuts": ["blocks.1"], "shard": 4},
        {"shard": 2, "stages": 2},
    ],
    ids=str,
)
def test_a_mesh_that_cannot_train_is_refused_in_the_same_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, Any]
):
    table = {"recipe": "net.py:recipe", "workers": 4, "mesh": mesh}
    with pytest.raises(SpecError) as trained:
        check_job(build(table, source="job.toml"))
    file = tmp_path / "net.safetensors"
    save_file({"weight": torch.zeros(2)}, file)
    overrides = [f"mesh.{key}={json.dumps(value)}" for key, value in mesh.items() if key != "plan"]
    overrides += ['mesh.plan={"blocks.*" = "column"}'] if "plan" in mesh else []
    with pytest.raises(SpecError) as predicted:
        source_of(file, "net.py:recipe", overrides, 4)
    assert str(predicted.value) == str(trained.value)
    assert "[mesh]" in str(trained.value) or "mesh." in str(trained.value)
    out = ("--data", "net.py:data", "--out", "out.npz", "--recipe", "net.py:recipe")
    sets = [part for each in overrides for part in ("--set", each)]
    (tmp_path / "net.py").write_text("")
    monkeypatch.chdir(tmp_path)
    assert main(["predict", str(file), *out, "--workers", "4", *sets]) == SpecError.exit_code
