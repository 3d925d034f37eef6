"""Every server writes its file of a checkpoint, and the checkpoint has all of them, or is none."""

from types import SimpleNamespace

import pytest
import torch

from instep.comm.memory import run_ranks
from instep.errors import CheckpointError
from instep.job.mesh import MeshSpec
from instep.state.files.manifest import published
from instep.state.load import load
from instep.state.save import CheckpointWriter, Saved
from instep.state.snapshot import Snapshot
from instep.worker.loop.shard_files import write_shards

PARTS = {2: {"a/momentum/0:2": torch.tensor([1.0, 2.0])}, 3: {"a/momentum/2:3": torch.ones(1)}}


def a_snapshot():
    return Snapshot(step=7, tensors={"model": {"a": torch.zeros(3)}}, facts={})


def written(comm, run, parts, apart=()):
    warnings = []
    member = SimpleNamespace(
        run=run if comm.rank not in apart else run / "elsewhere",
        sees_run=comm.rank not in apart,
        job=SimpleNamespace(mesh=MeshSpec()),
        form=SimpleNamespace(servers=(2, 3), generation=5),
        emit=lambda name, **fields: warnings.append(fields["text"]),
    )
    progress = SimpleNamespace(progress=SimpleNamespace(step=7))
    own = SimpleNamespace(shard=lambda: parts.get(comm.rank, {}))
    engine = SimpleNamespace(
        comm=comm, state=progress, own=own, tables=None, device=torch.device("cpu")
    )
    return write_shards(engine, member), warnings


@pytest.mark.parametrize("apart", [(), (3,), (2, 3)], ids=str)
def test_what_servers_have_written_is_in_the_checkpoint(tmp_path, apart):
    writer = CheckpointWriter(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / ".saving-6-shard-0-4").write_bytes(b"of a server that was killed")
    every = run_ranks(4, written, tmp_path, PARTS, apart)
    entries = [{name: shard.entry for name, shard in shards.items()} for shards, _ in every]
    assert all(each == entries[0] for each in entries)
    snapshot = a_snapshot()
    writer.save(snapshot, shards=every[0][0])
    writer.finish()
    (saved,) = writer.poll()
    assert isinstance(saved, Saved)
    found = load(saved.path).tensors
    assert set(found) == {"model", "shard-0", "shard-1"}
    assert found["shard-0"]["a/momentum/0:2"].tolist() == [1.0, 2.0]
    assert saved.size_bytes == sum(file.stat().st_size for file in saved.path.iterdir())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [saved.path.name]


@pytest.mark.parametrize("apart", [(), (2, 3)], ids=str)
def test_where_one_cannot_write_there_is_no_checkpoint_and_nothing_is_left(tmp_path, apart):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / ".saving-7-shard-1-5").symlink_to(tmp_path / "nowhere" / "at all")
    for why, warnings in run_ranks(4, written, tmp_path, PARTS, apart):
        assert isinstance(why, CheckpointError)
        assert "no checkpoint of step 7: server 3 could not write its part" in str(why)
        assert isinstance(why.__cause__, FileNotFoundError)
        assert not warnings  # worker 0 says it, once
    assert not list(folder.iterdir())


@pytest.mark.parametrize("apart", [(), (2, 3)], ids=str)
def test_servers_whose_optimizer_keeps_nothing_write_nothing(tmp_path, apart):
    (tmp_path / "checkpoints").mkdir()
    every = run_ranks(4, written, tmp_path, {}, apart)
    assert [shards for shards, _ in every] == [{}] * 4
    assert not list((tmp_path / "checkpoints").iterdir())


def test_without_the_file_of_a_server_there_is_no_checkpoint(tmp_path):
    writer = CheckpointWriter(tmp_path / "checkpoints")
    shards, _ = run_ranks(4, written, tmp_path, PARTS)[0]
    shards["shard-1"].path.unlink()
    writer.save(a_snapshot(), shards=shards)
    writer.finish()
    (outcome,) = writer.poll()
    assert isinstance(outcome, CheckpointError)
    assert not list(published(tmp_path / "checkpoints"))
    assert not list((tmp_path / "checkpoints").glob("*shard*"))
