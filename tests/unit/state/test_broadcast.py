"""Every rank gets the snapshot of one: values, types, ties, facts, and no shared memory."""

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.state import broadcast
from instep.state.boxes import BoxCut
from instep.state.packing import pack_state
from instep.state.snapshot import COPIES, DTYPES, PART, Snapshot, model_tensors

CPU = torch.device("cpu")


def made(seed):
    """A snapshot of a model with tied weights and of an optimizer that has taken a step."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 5)).sum().backward()
    optimizer.step()
    tensors, skeleton = pack_state(optimizer.state_dict())
    odd = {str(n): torch.ones(n + 1).to(d) for n, d in enumerate(DTYPES)}
    empty = {"none": torch.empty(0, 3), "scalar": torch.tensor(1.5), "falls": torch.eye(3).T[:2]}
    groups = {"model": model_tensors(model), "optimizer": tensors, "odd": odd | empty, "no": {}}
    return Snapshot(step=7 + seed, tensors=groups, facts={"optimizer": skeleton, "n": None})


def received(comm, root):
    mine = made(comm.rank) if comm.rank == root else None
    return broadcast.broadcast_snapshot(mine, comm, root, CPU)


@pytest.mark.parametrize("chunk_bytes", [1, 64, 1 << 25])
@pytest.mark.parametrize(("size", "root"), [(1, 0), (2, 1), (4, 2)])
def test_every_rank_gets_what_the_root_has(monkeypatch, chunk_bytes, size, root):
    monkeypatch.setattr(broadcast, "CHUNK_BYTES", chunk_bytes)
    wanted = made(root)
    for got in run_ranks(size, received, root):
        assert got.step == wanted.step
        assert got.facts == wanted.facts
        assert list(got.tensors) == list(wanted.tensors)
        for group, tensors in wanted.tensors.items():
            assert got.tensors[group].keys() == tensors.keys()
            for name, tensor in tensors.items():
                theirs = got.tensors[group][name]
                assert theirs.dtype == tensor.dtype
                assert torch.equal(theirs, tensor), (group, name)
        assert got.tensors["model"]["0.weight"].data_ptr() == (
            got.tensors["model"]["2.weight"].data_ptr()
        )


def test_a_rank_of_a_mesh_gets_the_parts_of_the_same_rank_elsewhere():
    part = {"model/w": torch.eye(2), "model/v": torch.empty(0, 3)}
    cuts = {
        "model/w": BoxCut((4, 2), ((2, 4), (0, 2))),
        "model/v": BoxCut((1, 3), ((1, 1), (0, 3))),
    }
    wanted = Snapshot(step=3, tensors={PART: part, COPIES: {}}, facts={}, cuts=cuts)

    def body(comm):
        return broadcast.broadcast_snapshot(wanted if comm.rank == 0 else None, comm, 0, CPU)

    for got in run_ranks(2, body):
        assert got.cuts == cuts
        assert torch.equal(got.tensors[PART]["model/w"], torch.eye(2))
        assert got.tensors[PART]["model/v"].shape == (0, 3)


def test_what_was_received_is_the_receivers_own():
    one, other = run_ranks(2, received, 0)
    other.tensors["model"]["0.bias"].zero_()
    assert one.tensors["model"]["0.bias"].abs().sum() > 0
