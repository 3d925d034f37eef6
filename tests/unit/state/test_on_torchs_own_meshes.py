"""FSDP2 and tensor parallelism as torch makes them: saved, loaded, and copied between replicas."""

import functools
import multiprocessing
import os
import signal
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from meshes import Held, Layout, body, on_ranks, turn_of
from test_any_mesh import memory_of, save
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from instep.comm.torch_comm import TorchComm
from instep.engine.state.capture import CommitProgress, capture
from instep.errors import CheckpointError, PeerError
from instep.job.mesh import MeshSpec
from instep.state.boxes import BoxCut, MeshRank, cut_of, local, primary
from instep.state.broadcast import broadcast_snapshot
from instep.state.files.staging import save_model
from instep.state.intact import newest_intact
from instep.state.load import load_model
from instep.state.save import CheckpointWriter
from instep.state.snapshot import COPIES, PART
from instep.worker.loop import shard_files


class Net(nn.Module):
    """Uneven rows, a tied weight, a buffer, and layers that are split in each way."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.tensor(float(seed)))

    def forward(self, tokens):
        return self.head(self.norm(self.down(self.up(self.embedding(tokens)).relu())))


def step(model, turn):
    tokens = torch.arange(12).view(3, 4) % 7
    model(tokens).float().square().mean().backward()
    turn.update.optimizer.step()
    turn.update.optimizer.zero_grad()
    turn.update.scheduler.step()


@functools.cache
def torchs_own(shard, tensor):
    """A mesh of torch: its groups connect once, and not for each model."""
    axes = ("replica", "shard", "tensor")
    return init_device_mesh("cpu", (4 // (shard * tensor), shard, tensor), mesh_dim_names=axes)


def sharded(mesh, rank, seed=0):
    """A model on the ranks of a replica, with its optimizer."""
    model = Net(seed)
    every = torchs_own(mesh.shard, mesh.tensor)
    if mesh.tensor > 1:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, every["tensor"], plan)
    fully_shard(model.up, mesh=every["shard"])
    fully_shard(model.down, mesh=every["shard"])
    fully_shard(model, mesh=every["shard"])
    return Held(model, turn_of(model), MeshRank(mesh, rank), Layout(mesh), every)


def plain(seed=0, steps=0):
    model = Net(seed)
    own = Held(model, turn_of(model), None, Layout(MeshSpec()), None)
    for _ in range(steps):
        step(model, own.turn)
    return own


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_same(one, other, what):
    """Two models and their optimizers have the same whole tensors; collective."""
    theirs = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        assert torch.equal(full(value), full(theirs[name])), (what, name)
    pairs = zip(one.model.named_parameters(), other.model.parameters(), strict=True)
    for (name, mine), its in pairs:
        a, b = one.optimizer.state[mine], other.optimizer.state[its]
        assert a.keys() == b.keys() != set()
        for kept in a:
            assert torch.equal(full(a[kept]), full(b[kept])), (what, name, kept)


def work(rank, folder):
    store = dist.distributed_c10d._get_default_store()
    comm = TorchComm(dist.PrefixStore("everyone", store), rank, 4)
    column = TorchComm(dist.PrefixStore(f"column-{rank % 2}", store), rank // 2, 2)
    four, two = MeshSpec(shard=2, tensor=2), MeshSpec(shard=2)

    # four ranks of FSDP over tensor parallelism, uneven rows: to a plain model, and back
    whole = sharded(four, rank)
    step(whole.model, whole.turn)
    whole.turn.strategy.remembered = {"levels": torch.tensor([rank])}
    rows = {name: p.detach() * 2 for name, p in whole.model.named_parameters()}
    left = {f"dropped/{name}": local(row) for name, row in rows.items()}
    path = save(comm, folder, whole, four, 1, left=left)
    taken = whole.capture()
    assert set(taken.tensors) == {PART, COPIES, "optimizer", "scheduler", "strategy"}
    every = taken.tensors[PART] | taken.tensors[COPIES]
    assert not any(isinstance(value, DTensor) for value in every.values())
    assert {"model/head.weight", "model/seen", "optimizer/up.weight/exp_avg"} <= every.keys()
    alone = plain(1)
    alone.load(path)
    assert alone.model.head.weight is alone.model.embedding.weight
    assert_same(alone, whole, "gathered on one")
    assert alone.turn.strategy.remembered == {}  # it is of parts that are not those of this mesh
    assert alone.own.keys() == left.keys()
    for name, row in rows.items():
        assert torch.equal(alone.own[f"dropped/{name}"], full(row))
    same = sharded(four, rank, seed=4)
    same.load(path)
    assert same.turn.strategy.remembered == {"levels": torch.tensor([rank])}
    assert all(torch.equal(same.own[name], part) for name, part in left.items())
    assert alone.turn.update.scheduler.state_dict() == whole.turn.update.scheduler.state_dict()
    again = sharded(four, rank, seed=2)
    where = {name: memory_of(p) for name, p in again.model.named_parameters()}
    if rank == 0:
        (folder / "plain").mkdir()
        writer = CheckpointWriter(folder / "plain" / "checkpoints")
        snapshot = alone.capture(2)
        del snapshot.facts["parameters"]  # as checkpoints had none
        writer.save(snapshot)
        writer.finish()
    comm.all_reduce(torch.zeros(1)).wait()
    again.load(folder / "plain" / "checkpoints" / "step-00000002")
    assert_same(again, whole, "from an older plain checkpoint")
    assert {name: memory_of(p) for name, p in again.model.named_parameters()} == where
    step(again.model, again.turn)
    step(whole.model, whole.turn)
    assert_same(again, whole, "a step later")

    # every element of the model is written by one rank
    counts = torch.tensor(
        [sum(t.numel() for n, t in taken.tensors[PART].items() if n.startswith("model/"))]
    )
    comm.all_reduce(counts).wait()
    assert int(counts) == sum(t.numel() for t in alone.model.state_dict().values())

    # two replicas of two ranks: the first is given to the second along the columns
    own = sharded(two, rank, seed=rank // 2)
    if rank < 2:
        step(own.model, own.turn)
    device = torch.device("cpu")
    snapshot = own.capture(9) if rank < 2 else None
    given = broadcast_snapshot(snapshot, column, 0, device)
    assert given.cuts == own.capture().cuts | {n: c for n, c in given.cuts.items() if "mizer" in n}
    assert own.restore(given).step == 9
    theirs = [torch.empty_like(local(p)) for p in own.model.parameters()]
    for parameter, other in zip(own.model.parameters(), theirs, strict=True):
        other.copy_(local(parameter))
        column.broadcast(other, 0)
        assert torch.equal(local(parameter), other)
        for value in own.optimizer.state[parameter].values():
            mine = local(value).clone()
            column.broadcast(mine, 0)
            assert torch.equal(mine, local(value))
    step(own.model, own.turn)

    # an ordinary file, of which each rank reads its part
    if rank == 0:
        save_model(folder / "start.safetensors", alone.model, {})
    comm.all_reduce(torch.zeros(1)).wait()
    fresh = sharded(four, rank, seed=5)
    assert not load_model(folder / "start.safetensors", fresh.model).wrong
    for name, value in fresh.model.state_dict().items():
        assert torch.equal(full(value), alone.model.state_dict()[name])

    # what is no box is refused
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], _init_backend=False)  # nothing is sent
    rows = torch.zeros(4, 3)
    stripes = DTensor.from_local(rows, mesh, [_StridedShard(0, split_factor=3), Shard(1)])
    with pytest.raises(CheckpointError, match=r"w has the placements .* several stripes of it"):
        cut_of(stripes, "w")
    total = DTensor.from_local(rows, mesh, [Partial(), Shard(0)])
    with pytest.raises(CheckpointError, match=r"w has the placements .* still to be taken"):
        cut_of(total, "w")
    assert [primary(rows, MeshRank(four, number)) for number in range(4)] == [True] + [False] * 3
    column.close()
    comm.close()


@pytest.mark.process
def test_torchs_own_meshes_are_saved_loaded_and_copied(tmp_path):
    on_ranks(4, work, tmp_path)


def dies(rank, folder):
    """The second save is cut short: rank 1 is killed in it."""
    store = dist.distributed_c10d._get_default_store()
    comm = TorchComm(dist.PrefixStore("everyone", store), rank, 3)
    own = SimpleNamespace(capture=lambda step: part(rank, step), model=nn.Module())
    save(comm, folder, own, MeshSpec(shard=3), 1)
    if rank == 1:
        shard_files.write_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    try:
        save(comm, folder, own, MeshSpec(shard=3), 2, run=1)
    except PeerError:
        (folder / f"told-{rank}").touch()
    comm.close()


def part(rank, step):
    model = nn.Linear(2, 2)
    snapshot = capture(CommitProgress(step=step), model, [turn_of(model)])
    del snapshot.tensors["model"]
    snapshot.tensors.update({PART: {"model/w": torch.full((1, 2), float(rank))}, COPIES: {}})
    snapshot.cuts["model/w"] = BoxCut((3, 2), ((rank, rank + 1), (0, 2)))
    return snapshot


@pytest.mark.process
def test_a_rank_that_is_killed_while_it_writes_leaves_the_last_checkpoint(tmp_path):
    context = multiprocessing.get_context("forkserver")
    ranks = [context.Process(target=body, args=(rank, dies, 3, tmp_path, ())) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(600)
    assert [rank.exitcode for rank in ranks][1] == -signal.SIGKILL
    assert {file.name for file in tmp_path.glob("told-*")} == {"told-0", "told-2"}
    folder = tmp_path / "run-1" / "checkpoints"
    chosen, refused = newest_intact(folder)
    assert chosen is not None
    assert chosen.name == "step-00000001"
    assert not refused
    assert [*folder.glob(".saving-2-part-*")]
    CheckpointWriter(folder)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
