"""Data in parts on the disks of hosts: the bits of a run that has all of them, whoever is lost."""

import json
import shutil
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from parts import SAMPLES, SHARDS, net, pair, samples
from safetensors.torch import load_file
from started import RECIPES, Start, Started

from instep.data.order import position
from instep.data.parts.cut import cut
from instep.data.parts.order import PartsOrder
from instep.data.shards.dataset import Shards
from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, write_manifest
from instep.data.shards.writer import ShardWriter
from instep.recipe.build import seed_everything

pytestmark = pytest.mark.process

BATCH, MICRO_BATCHES, EPOCHS, PARTS, WINDOW, SEED = 24, 6, 3, 4, 120, 3
EACH = SAMPLES // SHARDS
FIRST, SECOND = range(SHARDS // 2), range(SHARDS // 2, SHARDS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with all shards."""
    folder, made = tmp_path_factory.mktemp("whole"), samples()
    columns, shards = encode(made, None).columns, []
    for number in range(SHARDS):
        name = f"{number:02}.arrow"
        with ShardWriter(folder / name, columns) as writer:
            part = made[number * EACH : (number + 1) * EACH]
            writer.write(encode(part, columns).views)
            writer.close()
        shards.append(Shard(name, EACH, writer.bytes))
    size = sum(shard.bytes for shard in shards)
    manifest = Manifest(
        columns=columns, samples=SAMPLES, bytes=size, sha256="of these", bad=0, shards=shards
    )
    write_manifest(folder, manifest)
    return folder


def disk(whole: Path, folder: Path, shards: range) -> None:
    folder.mkdir(parents=True)
    for name in ["manifest.json", *(f"{number:02}.arrow" for number in shards)]:
        shutil.copy(whole / name, folder / name)


def begin(start: Start, folder: Path, hosts: tuple[str, ...], *more: str) -> Started:
    """A run with a worker on each host, which has the disk of that name."""
    job = folder / "job.toml"
    words = json.dumps([f"env DISK={host}" for host in hosts])
    job.write_text(
        f'name = "parts"\nrecipe = "{RECIPES / "parts.py"}:recipe"\nworkers = {len(hosts)}\n'
        f"seed = {SEED}\n[train]\nepochs = {EPOCHS}\nglobal_batch = {BATCH}\nthreads = 1\n"
        f'micro_batches = {MICRO_BATCHES}\ndeterminism = "bits"\n'
        f'[data]\norder = "windowed"\nwindow = {WINDOW}\nparts = {PARTS}\nloaders = 0\n'
        f'[arguments]\nfolder = "{folder / "disks"}"\n'
        f'[launch]\nhosts = {words}\naddress = "127.0.0.1"\n'
    )
    sets = [word for setting in more for word in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def plainly(folder: Path) -> dict[str, torch.Tensor]:
    """A loop in plain PyTorch over the same samples, each global batch in one pass."""
    seed_everything(SEED)
    model, dataset = net(), Shards(folder, transform=pair)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    bounds = cut(np.full(SHARDS, EACH), PARTS)
    order = PartsOrder([EACH] * SHARDS, bounds, WINDOW, SEED, batch=BATCH, lanes=MICRO_BATCHES)
    for step in range(1, EPOCHS * SAMPLES // BATCH + 1):
        chosen = order.indices(*position(step, SAMPLES, BATCH)).tolist()
        inputs, targets = map(torch.stack, zip(*dataset.__getitems__(chosen), strict=True))
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    return model.state_dict()


@pytest.fixture(scope="module")
def everywhere(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Started:
    """A run of one worker that has all shards."""
    folder = tmp_path_factory.mktemp("everywhere")
    disk(whole, folder / "disks" / "all", range(SHARDS))
    program = begin(lambda *words: Started(folder, words), folder, ("all",))
    assert program.end() == 0, program.stderr
    return program


def check_same(program: Started, everywhere: Started) -> None:
    assert program.summary["parameters_sha256"] == everywhere.summary["parameters_sha256"]
    assert (program.summary["repeated_samples"], program.summary["missing_samples"]) == (0, 0)


@pytest.mark.tail
def test_hosts_with_half_each_have_the_bits_of_one_with_all_and_no_sample_crosses_in_an_epoch(
    start: Start, tmp_path: Path, whole: Path, everywhere: Started
) -> None:
    for name, value in plainly(whole).items():
        found = load_file(everywhere.run / "model.safetensors")[name]
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)
    disk(whole, tmp_path / "disks" / "h0", SECOND)  # the first worker has the last parts
    disk(whole, tmp_path / "disks" / "h1", FIRST)
    program = begin(start, tmp_path, ("h0", "h1"), "train.deal=even", "data.loaders=1")
    assert program.end() == 0, program.stderr
    check_same(program, everywhere)
    placed = program.events("parts_placed")[-1]  # one for each generation
    assert placed["held"] == {"0": [0, 0, 120, 120], "1": [120, 120, 0, 0]}
    given = program.events("samples_given")
    for worker in (0, 1):
        first, *later = [e["samples"] for e in given if e["worker"] == worker]
        assert later == [first] * (EPOCHS - 1)  # what was read before the first step, and no more


@pytest.mark.tail
@pytest.mark.parametrize("by", ["the user", "the run"])
def test_a_lost_host_that_comes_back_with_an_empty_disk_is_replaced_by_its_copy(
    by: str, start: Start, tmp_path: Path, whole: Path, everywhere: Started
) -> None:
    copied = SECOND if by == "the user" else range(0)
    for name, shards in (("h0", FIRST), ("h1", SECOND), ("h2", copied)):
        disk(whole, tmp_path / "disks" / name, shards)
    slow = "arguments.slow=h1", "arguments.pause_s=0.2"
    more = [] if by == "the user" else ["data.copies=2"]
    program = begin(start, tmp_path, ("h0", "h1", "h2"), *slow, *more)
    program.until(lambda: program_trains(program), "it trains")
    there = tmp_path / "disks" / "h2"
    program.until(lambda: all((there / f"{n:02}.arrow").exists() for n in SECOND), "copies")
    joined = {e["worker"]: e for e in program.events("worker_joined")}
    (lost,) = [e for e in joined.values() if e["host"] == 1]
    fork_server = psutil.Process(lost["pid"]).parent()
    assert fork_server is not None
    for number in SECOND:
        (tmp_path / "disks" / "h1" / f"{number:02}.arrow").unlink()
    for each in (fork_server, *fork_server.children(recursive=True)):
        each.kill()
    assert program.end() == 0, program.stderr
    check_same(program, everywhere)
    assert program.events("parts_placed")[-1]["held"] != program.events("parts_placed")[0]["held"]


def program_trains(program: Started) -> bool:
    folder = program.work / "runs"
    return folder.is_dir() and any(folder.iterdir()) and len(program.ledger) > 3


@pytest.mark.tail
@pytest.mark.parametrize("partition", ["parts", "random"])
def test_participants_are_computed_where_their_data_lie_and_the_bits_are_the_same(
    partition: str, start: Start, tmp_path: Path, whole: Path
) -> None:
    rounds = (
        "sync.name=averaging",
        f"sync.participants={PARTS}",
        "sync.options.local_steps=2",
        f"sync.options.partition={partition}",
        f"train.micro_batches={PARTS}",
        "train.deal=even",
    )
    for name, shards in (("all", range(SHARDS)), ("h0", SECOND), ("h1", FIRST)):
        disk(whole, tmp_path / "disks" / name, shards)
    alone = begin(start, tmp_path, ("all",), *rounds)
    assert alone.end() == 0, alone.stderr
    program = begin(start, tmp_path, ("h0", "h1"), *rounds)
    assert program.end() == 0, program.stderr
    check_same(program, alone)
    (placed,) = program.events("parts_placed")
    assert np.sum(list(placed["held"].values()), axis=0).tolist() == placed["sizes"]
    if partition == "parts":
        assert placed["held"] == {"0": [0, 0, 120, 120], "1": [120, 120, 0, 0]}
        given = [e["samples"] for e in program.events("samples_given") if e["worker"] == 0]
        assert len(set(given)) == 1  # what was read before the first step, and no more


@pytest.mark.tail
def test_a_shard_that_lies_nowhere_and_another_manifest_are_said_before_anything_is_read(
    start: Start, tmp_path: Path, whole: Path
) -> None:
    disk(whole, tmp_path / "disks" / "h0", FIRST)
    disk(whole, tmp_path / "disks" / "h1", range(12, 23))
    program = begin(start, tmp_path, ("h0", "h1"))
    assert program.end() == 4, program.stderr
    assert "1 shard of" in program.error
    assert "(23.arrow) lies on none of the hosts of the run. Copy it to one" in program.error
