"""Parts of a checkpoint that travel between machines: as files to be, and piece by piece."""

import pytest
import torch

from instep.comm.memory import run_ranks
from instep.errors import CheckpointError
from instep.state import lent
from instep.state.boxes import elements
from instep.state.broadcast import broadcast_snapshot
from instep.state.files import sending
from instep.state.files.staging import write_tensors
from instep.state.open_pieces import open_pieces
from instep.state.packing import pack_state
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot

CPU = torch.device("cpu")


def tensors():
    torch.manual_seed(1)
    shared = torch.randn(7, 3)
    return {
        "w": torch.randn(40, 11),
        "none": torch.empty(0, 4),
        "half": torch.randn(5).bfloat16(),
        "count": torch.tensor(3),
        "tied": shared,
        "to it": shared,
    }


@pytest.mark.parametrize("chunk_bytes", [1, 100, 10_000])
def test_what_another_rank_writes_is_what_this_one_would(tmp_path, monkeypatch, chunk_bytes):
    monkeypatch.setattr(sending, "CHUNK_BYTES", chunk_bytes)
    entry = write_tensors(tmp_path / "here", tensors(), {"a": "b"})

    def rank(comm):
        if comm.rank == 1:
            return sending.send_file(comm, 0, (tensors(), {"a": "b"}), device=CPU)
        return sending.receive_file(comm, 1, tmp_path / "there", device=CPU)

    assert run_ranks(2, rank)[0] == entry
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()


def test_a_file_that_cannot_be_written_or_sent_leaves_nobody_waiting(tmp_path):
    def rank(comm):
        if comm.rank == 1:
            sending.send_file(comm, 0, (tensors(), {}), device=CPU)
            with pytest.raises(CheckpointError, match="safetensors forbids it"):
                sending.send_file(comm, 0, ({"__metadata__": torch.zeros(1)}, {}), device=CPU)
            return None
        with pytest.raises(CheckpointError, match="was not saved"):
            sending.receive_file(comm, 1, tmp_path / "no" / "there", device=CPU)
        return sending.receive_file(comm, 1, tmp_path / "there", device=CPU)

    assert run_ranks(2, rank) == [None, None]
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def checkpoint(tmp_path):
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    kept, skeleton = pack_state(optimizer.state_dict())
    facts = {"optimizer": skeleton, "parameters": ["weight", "bias"], "epoch": 2}
    groups = {"model": tensors(), "optimizer": kept, "scheduler": {"x": torch.ones(2)}}
    writer = CheckpointWriter(tmp_path / "checkpoints")
    writer.save(Snapshot(step=5, tensors=groups, facts=facts))
    writer.finish()
    return tmp_path / "checkpoints" / "step-00000005"


def test_a_borrowed_checkpoint_has_what_the_folder_has(checkpoint):
    def rank(comm):
        lender = lent.Lender(checkpoint) if comm.rank == 0 else None
        described = lender.description() if lender else None
        description = broadcast_snapshot(described, comm, 0, CPU)
        if lender is not None:
            for other in (1, 2):
                lender.serve(comm, other, CPU)
            return None
        found = lent.borrowed(description, comm, 0, CPU)
        boxes = {name: box_of(found.pieces.shape(name)) for name in found.pieces}
        whole = {name: found.pieces.read(name) for name in found.pieces}
        parts = {name: found.pieces.read(name, box) for name, box in boxes.items()}
        lent.done(comm, 0, CPU)
        return found, whole, parts

    here = open_pieces(checkpoint, {})
    for found, whole, parts in run_ranks(3, rank)[1:]:
        assert (found.step, found.facts) == (here.step, here.facts)
        assert found.pieces.same("model/tied", "model/to it")
        assert not found.pieces.same("model/w", "model/to it")
        assert list(found.pieces) == list(here.pieces)
        assert found.pieces.numbers == here.pieces.numbers
        assert found.pieces.options == here.pieces.options
        assert torch.equal(found.tensors["scheduler"]["x"], here.tensors["scheduler"]["x"])
        for name in here.pieces:
            assert torch.equal(whole[name], here.pieces.read(name)), name
            box = box_of(here.pieces.shape(name))
            assert torch.equal(parts[name], here.pieces.read(name, box)), name
        assert sum(elements(box_of(here.pieces.shape(name))) for name in here.pieces) > 100


def box_of(shape):
    """A part of a tensor."""
    return tuple((size // 3, size) for size in shape)
