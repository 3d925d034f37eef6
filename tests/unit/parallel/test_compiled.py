"""Compiled blocks train as plain code does in one process on the whole batch."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.multiprocessing import start_processes

from instep.errors import RecipeError
from instep.job.mesh import MeshSpec
from instep.parallel.compiled import compile_blocks, compiling
from instep.parallel.recompute import checkpoint_blocks
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard

CPU = torch.device("cpu")
STEPS, BLOCKS = 6, 10
CALLS: list[int] = []


def counted(graph: Any, inputs: Any) -> Any:
    """A backend that makes no machine code, and counts how often a graph runs."""
    assert compiling()
    run = torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def count(*given: Any) -> Any:
        CALLS.append(1)
        return run(*given)

    return count


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.norm, self.drop, self.number = nn.LayerNorm(16), nn.Dropout(0.2), number
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, past_key_values: Any = None) -> Tensor:
        if past_key_values is not None:
            past_key_values.append(self.number)
        x = x * (1 + self.number)  # each block is another program
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self, blocks: int = BLOCKS) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(4, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(Block(number) for number in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            if len(x) > 3 or block is not self.blocks[1]:  # some batches leave it out
                x = block(x)
        return self.head(x).square().mean()


def equals_plain(group: ReplicaGroup, zero: Any, *, checkpointing: bool, every: bool) -> None:
    """Six steps of AdamW in float32; losses to 1e-5."""
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    CALLS.clear()
    torch.manual_seed(0)
    model: Any = Net(2 if every else BLOCKS)
    plain = copy.deepcopy(model)
    if not every:
        for block in model.blocks:
            block.compile(backend=counted)
    compile_blocks(model, CPU, every=every)
    if checkpointing:
        checkpoint_blocks(model)
    sharded = shard(model, group.device_mesh, zero=zero)
    optimizers = [
        torch.optim.AdamW(each, lr=1e-2)
        for each in (sharded.slots.of(model.parameters()), plain.parameters())
    ]
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        sizes = [8, 8] if step < 2 else [8 - step, 3]
        batches = [torch.randn(size, 4, generator=generator) for size in sizes]
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.manual_seed(step * ranks + rank)
        loss = sharded.run(model, batches[rank])
        loss.backward()
        sharded.finish_pass()
        for place, batch in enumerate(batches):
            torch.manual_seed(step * ranks + place)
            other = plain(batch)
            other.backward()
            if place == rank:
                torch.testing.assert_close(loss, other, rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            sharded.run(model, batches[0])
    counters = torch._dynamo.utils.counters
    assert counters["frames"]["ok"] == counters["frames"]["total"] > 0
    assert not counters["graph_break"]
    assert not compiling()
    assert every or len(CALLS) >= STEPS * (BLOCKS - 1), "blocks were not compiled"


def on_ranks(rank: int, folder: Path, every: bool) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), 2)
    group = ReplicaGroup(store, rank, MeshSpec(shard=2), timeout_s=600)
    for zero, checkpointing in ((3, True),) if every else ((3, True), (2, False)):
        equals_plain(group, zero, checkpointing=checkpointing, every=every)
    group.close()


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("every", [False, True])
def test_compiled_blocks_train_as_plain_pytorch(tmp_path: Path, every: bool) -> None:
    """Those that the recipe compiled keep their backend, which here makes no machine code."""
    start_processes(on_ranks, (tmp_path, every), nprocs=2, start_method="forkserver")


def test_blocks_are_left_alone_where_nobody_asks() -> None:
    model = Net(2)
    compile_blocks(model, CPU, every=False)
    assert all("forward" not in block.__dict__ for block in model.blocks)


def test_compiled_code_fills_no_cache_of_keys_while_it_trains() -> None:
    model: Any = Net(2)
    for block in model.blocks:
        block.compile(backend="eager")
    compile_blocks(model, CPU, every=False)
    seen: list[int] = []
    model.blocks[1](torch.ones(1, 16), past_key_values=seen)
    assert seen == []
    with torch.no_grad():
        model.blocks[1](torch.ones(1, 16), past_key_values=seen)
    assert seen == [1]


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_model_that_is_compiled_as_a_whole_is_refused(wrapped: bool) -> None:
    model: Any = Net(2)
    if wrapped:
        model = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with pytest.raises(RecipeError, match="the model is compiled as a whole, but with"):
        compile_blocks(model, CPU, every=False)
    inner = nn.Sequential(Net(2))
    inner[0].compile(backend="eager")
    with pytest.raises(RecipeError, match="the module '0' is compiled as a whole"):
        compile_blocks(inner, CPU, every=True)


def test_a_model_without_blocks_cannot_compile_them() -> None:
    with pytest.raises(RecipeError, match="no list of repeated blocks"):
        compile_blocks(nn.Linear(2, 2), CPU, every=True)


PROGRAM = """
import torch
from torch import nn
from instep.errors import SpecError
from instep.parallel.compiled import compile_blocks

try:
    compile_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.device("cpu"), every=True)
except SpecError as error:
    print(error)
"""


@pytest.mark.tail
def test_a_machine_without_a_compiler_is_refused_in_a_sentence(tmp_path: Path) -> None:
    there = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, **there},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.startswith("torch.compile does not work on this machine (")
    assert "it needs a C++ compiler such as g++" in said
    assert said.count("\n") == 1
