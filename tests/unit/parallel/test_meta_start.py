"""A model is built, loaded and trained where the whole of it does not fit."""

import ctypes
import gc
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, distributed, nn
from torch.multiprocessing import start_processes

from instep.job.mesh import MeshSpec
from instep.parallel.meta_start import without_memory
from instep.parallel.recompute import checkpoint_blocks
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard
from instep.state.load import load_model

M_MMAP_THRESHOLD = -3


class Rotated(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        angles = torch.arange(width) / width
        self.register_buffer("angles", angles, persistent=False)
        self.register_buffer("counted", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(self.linear(x) + self.angles)


class Net(nn.Module):
    """Tied, with a table that is in no file; `width`^2 * 4 bytes in each of its blocks."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(7, width)
        self.layers = nn.ModuleList(Rotated(width) for _ in range(blocks))
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.words.weight
        self.gain = nn.Parameter(torch.tensor(2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.gain


def test_a_model_is_built_without_its_parameters_memory() -> None:
    model: Any = without_memory(Net)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.words.weight
    torch.testing.assert_close(model.layers[0].angles, torch.arange(6) / 6)
    assert not any(parameter.is_meta for parameter in Net().parameters())


def data_bytes() -> int:
    """Private memory of this process that can be written (`VmData`)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def fits(width: int, blocks: int) -> bool:
    """Whether the whole model could be built here: tried by a child, which has the same limit."""
    child = os.fork()
    if not child:
        try:
            Net(width, blocks)
        except RuntimeError as error:
            os._exit(7 if "allocate memory" in str(error) else 1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 7)
    return code == 0


def start_and_train(rank: int, ranks: int, folder: Path, width: int, blocks: int) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), ranks)
    group = ReplicaGroup(store, rank, MeshSpec(shard=ranks), timeout_s=600)
    warm = shard(without_memory(lambda: Net(4, 2)), group.device_mesh)  # imports and threads
    warm.run(lambda: warm.model(torch.tensor([0])).sum()).backward()
    warm.finish_pass()
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)  # else malloc keeps what is freed
    whole = blocks * (width * width + width) * 4
    gc.collect()
    if whole > 100e6:
        resource.setrlimit(resource.RLIMIT_DATA, (data_bytes() + int(0.9 * whole),) * 2)
        assert not fits(width, blocks)
    model: Any = without_memory(lambda: Net(width, blocks))
    checkpoint_blocks(model)
    sharded = shard(model, group.device_mesh)
    assert model.head.weight is model.words.weight
    load_model(folder / "model.safetensors", model)
    mine = sharded.slots.of(model.parameters())
    optimizer = torch.optim.SGD(mine, lr=1e-4)
    losses = []
    for _ in range(3):
        loss = sharded.run(lambda: model(torch.tensor([rank])).square().mean())
        loss.backward()
        sharded.finish_pass()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        distributed.all_reduce(total)
        losses.append(total.item())
    torch.save((losses, model.gain), folder / f"out{rank}")
    group.close()


def by_itself(model: Net, ranks: int) -> tuple[list[float], Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    losses = []
    for _ in range(3):
        loss = sum(model(torch.tensor([rank])).square().mean() for rank in range(ranks))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.gain.detach()


@pytest.mark.process
@pytest.mark.slow
def test_ranks_train_a_model_that_none_of_them_has_memory_for(tmp_path: Path) -> None:
    """101 MB of parameters; each rank may have 91 MB more than it began with."""
    start_from_a_file(tmp_path, 1024, 24, 4)


@pytest.mark.process
def test_ranks_start_from_their_rows_of_a_file(tmp_path: Path) -> None:
    start_from_a_file(tmp_path, 7, 2, 3)


def start_from_a_file(tmp_path: Path, width: int, blocks: int, ranks: int) -> None:
    torch.manual_seed(0)
    model = Net(width, blocks)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.1)
    weights = {name: each for name, each in model.state_dict().items() if name != "words.weight"}
    save_file(weights, tmp_path / "model.safetensors")
    losses, gain = by_itself(model, ranks)
    arguments = (ranks, tmp_path, width, blocks)
    start_processes(start_and_train, arguments, nprocs=ranks, start_method="forkserver")
    for rank in range(ranks):
        sharded, own_gain = torch.load(tmp_path / f"out{rank}")
        torch.testing.assert_close(sharded, losses, rtol=1e-5, atol=0)
        torch.testing.assert_close(own_gain, gain, rtol=1e-5, atol=0)
