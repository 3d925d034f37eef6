"""What is prepared on the hosts of a cluster, or over encrypted links, is the same."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from on_ray import cluster as ray_cluster
from started import Start
from test_partitions import needs_hosts
from test_ray import short_folder

import slurm
from instep.lab.netlab import OUTSIDE, Network
from instep.prepare.asked import Asked
from instep.prepare.prepare import prepare

pytestmark = pytest.mark.process

__all__ = ["ray_cluster", "short_folder"]  # the fixtures

MAP = """
import random

def record(raw):
    return {"id": raw["id"], "x": raw["id"] / 3, "draw": random.random()}
"""


@pytest.fixture
def raw(tmp_path: Path) -> list[str]:
    """The words of a command but where it runs, and the digest of its result."""
    (tmp_path / "clean.py").write_text(MAP)
    lines = [json.dumps({"id": i, "name": "x" * 60}) for i in range(50_000)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    return [str(tmp_path / "a.jsonl"), "--map", f"{tmp_path / 'clean.py'}:record"]


def check(start: Start, raw: list[str], folder: Path, on: str, *changes: str, **more: dict) -> None:
    """Prepare on two hosts; the same as here."""
    words = ["-m", "instep", "prepare", *raw, "--to", folder / "out", "--on", on, "--workers", 2]
    changes = (*changes, *([] if on == "hosts" else ["launch.nodes=2"]))
    sets = [word for change in changes for word in ("--set", change)]
    program = start(*words, "--json", *sets, **more)
    assert program.end() == 0, program.stderr
    found = json.loads(program.stdout.splitlines()[-1])
    assert (found["workers"], found["workers_lost"]) == (2, 0)
    asked = Asked(sources=raw[:1], map=raw[2], to=str(folder / "here"))
    manifest = prepare(asked, lambda _: None, workers=1).manifest
    assert manifest is not None
    assert found["sha256"] == manifest.sha256


RECIPE = """
import torch
import instep
from instep.data.sources import shards

def recipe():
    return instep.Recipe(
        model=lambda: torch.nn.Linear(1, 1),
        loss=torch.nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=shards(FOLDER, transform=lambda raw: (raw["x"].view(1) / 2e4, raw["draw"].view(1))),
    )
"""


@pytest.mark.tail
def test_a_job_prepares_on_its_hosts_and_then_trains_there(
    start: Start, raw: list[str], tmp_path: Path
) -> None:
    """With the result of the same job on this machine."""
    found = {}
    for name, launch in (
        ("here", ""),
        ("hosts", '[launch]\nhosts = ["env N=0", "env N=1"]\naddress = "127.0.0.1"\n'),
    ):
        (folder := tmp_path / name).mkdir()
        (folder / "net.py").write_text(RECIPE.replace("FOLDER", repr(str(folder / "shards"))))
        job = folder / "job.toml"
        job.write_text(
            f'recipe = "net.py:recipe"\nworkers = {2 if launch else 1}\n'
            '[train]\nsteps = 20\nthreads = 1\ndeterminism = "bits"\n'
            f'[prepare]\nsources = ["{raw[0]}"]\nto = "shards"\nmap = "{raw[2]}"\n{launch}'
        )
        program = start("-m", "instep", "run", job)
        assert program.end() == 0, program.stderr
        assert ("on 2 hosts" in program.stderr) == bool(launch)
        manifest = json.loads((folder / "shards" / "manifest.json").read_text())
        found[name] = manifest["sha256"], program.summary["parameters_sha256"]
        assert len({e["host"] for e in program.events("worker_joined")}) == (2 if launch else 1)
    assert found["here"] == found["hosts"]


@pytest.mark.slow
def test_a_ray_cluster_prepares_the_same(
    start: Start, raw: list[str], tmp_path: Path, short_folder: None, ray_cluster: object
) -> None:
    check(start, raw, tmp_path, "ray", "launch.address=127.0.0.1")


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Two nodes of a Slurm cluster."""
    if reason := slurm.why_not():
        pytest.skip(reason)
    (folder := tmp_path / "slurm").mkdir()
    cluster = slurm.Slurm(folder, 2)
    try:
        with cluster.allocation(2) as environment:
            yield environment
    finally:
        cluster.close()


@pytest.mark.slow
def test_an_allocation_of_slurm_prepares_the_same(
    start: Start, raw: list[str], tmp_path: Path, allocation: dict[str, str]
) -> None:
    check(start, raw, tmp_path, "slurm", "launch.address=127.0.0.1", environment=allocation)


@pytest.mark.tail
@needs_hosts
def test_hosts_prepare_the_same_over_encrypted_links(
    start: Start, raw: list[str], tmp_path: Path
) -> None:
    with Network(2) as network:
        hosts = [f"ip netns exec {network.name}-{host}" for host in network.hosts]
        address = f"launch.address={network.address(OUTSIDE)}"
        check(start, raw, tmp_path, "hosts", f"launch.hosts={json.dumps(hosts)}", address)
