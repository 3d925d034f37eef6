"""Planned batches are the same at any number of workers, and through kills and a resume."""

import json

import pytest
from started import RECIPES

from instep.cli import main
from instep.store.run_folder import RunFolder

pytestmark = [pytest.mark.process, pytest.mark.slow]

WAYS = {
    "tokens": ("by_length", {"train.tokens_per_batch": 60, "data.window": 40}),
    "length sampler": ("by_length", {"train.global_batch": 9, "arguments.sampler": "buckets"}),
    "resample": ("unbalanced", {"data.balance": "resample", "train.global_batch": 12}),
    "stratified": ("unbalanced", {"data.balance": "stratified", "train.global_batch": 12}),
    "augment": ("unbalanced", {"data.balance": "augment", "arguments.noise": True}),
    "reweight": ("unbalanced", {"data.balance": "reweight", "train.global_batch": 12}),
    "weighted sampler": ("unbalanced", {"arguments.sampled": True, "train.global_batch": 12}),
}


def job_of(folder, way, **keys):
    recipe, own = WAYS[way]
    folder.mkdir(parents=True, exist_ok=True)
    keys = {
        "train.micro_batches": 8,
        "train.determinism": "bits",
        "data.loaders": 0,
        "check.content": "all",
        **own,
        **keys,
    }
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    job = folder / "job.toml"
    head = f'name = "planned"\nrecipe = "{RECIPES / recipe}.py:recipe"\nseed = 5\n'
    job.write_text(head + "\n".join(lines) + "\n")
    return str(job)


def answered(capsys, *command):
    code = main([*command, "--json"])
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


@pytest.mark.parametrize("way", WAYS)
def test_the_batches_are_the_same_at_1_2_3_5_and_7_workers(tmp_path, way, capsys):
    hashes = set()
    for workers in (1, 2, 3, 5, 7):
        job = job_of(tmp_path / f"{workers}", way, **{"train.epochs": 2})
        runs = ("--runs", str(tmp_path / f"{workers}"))
        code, told = answered(capsys, "run", job, "--workers", f"{workers}", *runs)
        assert code == 0
        code, proof = answered(capsys, "audit", str(tmp_path / f"{workers}/planned"), "--content")
        assert code == 0
        assert proof["exact"]
        hashes.add(told["parameters_sha256"])
    assert len(hashes) == 1


@pytest.mark.parametrize("way", ["tokens", "resample", "weighted sampler"])
def test_they_are_the_same_through_50_kills_and_a_resume_at_another_size(tmp_path, way, capsys):
    whole = {"train.steps": 500}
    job = job_of(tmp_path / "whole", way, **whole)
    code, told = answered(capsys, "run", job, "--workers", "2", "--runs", str(tmp_path / "whole"))
    assert code == 0
    stopped = {"train.stop_after_steps": 300, "arguments.pause_s": 0.004, **whole}
    job = job_of(tmp_path / "killed", way, **stopped)
    runs = ("--workers", "3", "--runs", str(tmp_path / "killed"))
    code, verdict = answered(capsys, "chaos", job, "--kills", "50", "--seed", "3", *runs)
    assert (code, verdict["holds"]) == (0, True)
    assert verdict["injected"] == 50
    run = tmp_path / "killed" / "planned-disturbed"
    code, resumed = answered(capsys, "resume", str(run), "--workers", "5")
    assert code == 0
    assert resumed["parameters_sha256"] == told["parameters_sha256"]
    assert resumed["steps"] == 500
    assert RunFolder(run).audit.exact
