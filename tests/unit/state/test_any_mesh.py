"""Saved on any mesh, loaded on any other: to the bit, and it goes on as plain PyTorch does."""

from types import SimpleNamespace

import meshes
import pytest
import torch
import torch.distributed as dist
from meshes import PLAIN, Layout, device_mesh_of, drawn_tensors, held, on_ranks, seeded, split

from instep.comm.torch_comm import TorchComm
from instep.job.checkpoint import CheckpointSpec
from instep.state.files.staging import save_model
from instep.state.save import CheckpointWriter
from instep.state.snapshot import COPIES, PART, parameters_sha256
from instep.worker.loop.saving import Saver, lend_model
from instep.worker.loop.shard_files import write_shards


def save(comm, folder, own, mesh, step=3, run=None, left=None):
    """As training saves: all write their parts, rank 0 publishes; the folder of the checkpoint."""
    run = folder / f"run-{run or step}"
    if comm.rank == 0:
        run.mkdir(exist_ok=True)
        writer = CheckpointWriter(run / "checkpoints")
    comm.all_reduce(torch.zeros(1)).wait()
    snapshot = own.capture(step) if own is not None else None
    state = SimpleNamespace(progress=SimpleNamespace(step=step), capture=lambda moved: snapshot)
    engine = SimpleNamespace(
        comm=comm,
        state=state,
        buffers=SimpleNamespace(moved=None),
        own=SimpleNamespace(shard=dict),
        tables=None,
        model=getattr(own, "model", None),
        device=torch.device("cpu"),
    )
    form = SimpleNamespace(members=list(range(comm.size)), servers=(), generation=1)
    job = SimpleNamespace(mesh=mesh)
    member = SimpleNamespace(
        run=run, form=form, job=job, emit=print, number=comm.rank, sees_run=True
    )
    shards = write_shards(engine, member, left or {})
    if comm.rank == 0:
        if mesh.ranks > 1:
            for group in ("strategy", PART, COPIES):
                snapshot.tensors.pop(group, None)
        writer.save(snapshot, shards=shards)
        writer.finish()
        (outcome,) = writer.poll()
        assert outcome.path == run / "checkpoints" / f"step-{step:08d}", outcome
    comm.all_reduce(torch.zeros(1)).wait()
    return run / "checkpoints" / f"step-{step:08d}"


def pairs(rank, folder, first, stop):
    store = dist.distributed_c10d._get_default_store()
    comm = TorchComm(dist.PrefixStore("everyone", store), rank, 4)
    for seed in range(first, stop):
        pair(rank, comm, folder, seed)
    comm.close()


def pair(rank, comm, folder, seed):
    rng = seeded(seed)
    whole = drawn_tensors(rng, seed)
    gradients = [drawn_tensors(seeded(seed), 1000 + seed + turn) for turn in range(2)]
    shapes = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    one, other = (Layout(rng.choice(meshes.MESHES)).drawn(shapes, rng) for _ in range(2))
    tied = {"p9": "p0"} if rng.random() < 0.5 else {}

    plain = held(Layout(PLAIN), whole, 0, None, tied)
    plain.step(gradients[0])
    middle = {name: value.detach().clone() for name, value in plain.model.state_dict().items()}
    plain.step(gradients[1])

    devices = device_mesh_of(one.mesh, rank)
    mine = None
    if rank < one.mesh.ranks:
        mine = held(one, whole, rank, devices, tied)
        mine.step(gradients[0])
    path = save(comm, folder, mine, one.mesh, 3 + seed)

    devices = device_mesh_of(other.mesh, rank)
    if rank < other.mesh.ranks:
        empty = {name: torch.full_like(value, 7.0) for name, value in whole.items()}
        loaded = held(other, empty, rank, devices, tied)
        memory = {name: memory_of(p) for name, p in loaded.model.named_parameters()}
        assert loaded.load(path).step == 3 + seed
        assert_equal(loaded, middle, f"{seed}: {one.mesh} to {other.mesh}")
        for name, parameter in loaded.model.named_parameters():
            assert memory[name] == memory_of(parameter)
        loaded.step(gradients[1])
        assert_equal(loaded, plain.model.state_dict(), f"{seed}: after a step on {other.mesh}")


def memory_of(parameter):
    return meshes.local_of(parameter.detach()).data_ptr()


def assert_equal(own, whole, what):
    place = own.layout.mesh.coordinate(own.rank.worker if own.rank else 0)
    for name, value in own.model.state_dict().items():
        if name.startswith("b"):
            expected, found = whole[name], value
        else:
            axes_of = "p0" if name == "p9" else name
            expected = split(whole[name], own.layout, axes_of, place, own.device_mesh)
            expected, found = meshes.local_of(expected), meshes.local_of(value)
        assert torch.equal(expected, found), (what, name, own.layout.axes.get(name))


@pytest.mark.slow
@pytest.mark.process
def test_eight_random_pairs_of_meshes_continue_to_the_bit(tmp_path):
    on_ranks(4, pairs, tmp_path, 0, 8)


@pytest.mark.slow
@pytest.mark.process
def test_sixty_more_random_pairs_of_meshes_continue_to_the_bit(tmp_path):
    on_ranks(4, pairs, tmp_path, 8, 68)


def ends(rank, folder):
    store = dist.distributed_c10d._get_default_store()
    comm = TorchComm(dist.PrefixStore("everyone", store), rank, 4)
    for seed, mesh in enumerate(meshes.MESHES[2::2]):
        rng, tied = seeded(seed), {"p9": "p0", "p8": "p3"} if mesh.stages == 1 else {}
        whole = drawn_tensors(rng, seed)
        layout = Layout(mesh).drawn({name: tuple(t.shape) for name, t in whole.items()}, rng)
        devices = device_mesh_of(mesh, rank)
        told, run = [], folder / f"end-{seed}"
        run.mkdir(exist_ok=True)
        job = SimpleNamespace(mesh=mesh, name="net", checkpoint=CheckpointSpec())
        member = SimpleNamespace(
            run=run, job=job, number=rank, emit=lambda kind, told=told, **facts: told.append(facts)
        )
        if rank < mesh.ranks:
            model = held(layout, whole, rank, devices, tied).model
            if rank == 0:
                saver = Saver.__new__(Saver)
                saver._member, saver._model = member, model
                saver._save_model(7, comm)
            else:
                lend_model(comm, member, model)
        if rank == 0:
            plain = held(Layout(PLAIN), whole, 0, None, tied).model
            digest = parameters_sha256(plain)
            assert told[0]["parameters_sha256"] == digest
            facts = {"step": "7", "job": "net", "parameters_sha256": digest}
            size = save_model(run / "plain.safetensors", plain, facts)
            written = (run / "model.safetensors").read_bytes()
            assert written == (run / "plain.safetensors").read_bytes(), mesh
            assert told[0]["size_bytes"] == size
            assert not list(run.glob(".saving-*"))
    comm.close()


@pytest.mark.process
def test_the_file_of_a_run_on_a_mesh_is_the_one_that_a_plain_run_writes(tmp_path):
    on_ranks(4, ends, tmp_path)
