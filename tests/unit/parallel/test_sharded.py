"""A model shared out over ranks trains as plain PyTorch in one process on the whole batch."""

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing import start_processes

from instep.comm.dtensors import split_like
from instep.errors import RecipeError
from instep.job.mesh import MeshSpec
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import Sharded, shard
from instep.state.boxes import MeshRank, primary

pytestmark = pytest.mark.process


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.tensor(0.5))  # no dimension
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.up.weight, self.up.bias)  # read, not called
        return (self.scale(x) + self.gain * self.down(torch.tanh(hidden))).view_as(x)

    def scale(self, x: Tensor) -> Tensor:
        return x * self.up.bias.mean()


class Net(nn.Module):
    """Everything at once: tied, frozen, sparse, empty, unused, and rarely used parameters."""

    def __init__(self, width: int = 6, blocks: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(11, width)
        self.places = nn.Embedding(11, width, sparse=True)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))
        self.layers[1].down.weight = self.layers[0].down.weight
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.one, self.empty = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0, 4))
        self.sometimes = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("seen", torch.zeros(3))

    def encode(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(tokens)
        for layer in self.layers:
            x = layer(x)
            x += 1  # in place, on what a block returned
        x = self.layers[2](x) + self.layers[0].scale(x)  # used again; a method that is not forward
        return self.frozen(x) * self.one


def compute_loss(model: Any, tokens: Tensor, weight: float) -> Tensor:
    """Never the model's `forward`; parameters are read too."""
    scores = model.head(model.encode(tokens))
    loss = nn.functional.cross_entropy(scores, tokens.flip(0)) + (model.words.weight**2).sum()
    if tokens[0] % 2 == 0:  # on some ranks, or on none
        loss = loss + (model.sometimes**2).sum()
    return loss * weight


def replica(rank: int, ranks: int, folder: Path) -> ReplicaGroup:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), ranks)
    return ReplicaGroup(store, rank, MeshSpec(shard=ranks), timeout_s=600)


def gradients(sharded: Sharded, locals_: list[nn.Parameter]) -> dict[int, Tensor]:
    """Adds up what the hooks give, and takes it away, as the engine does."""
    taken: dict[int, Tensor] = {}

    def listen(slot: int) -> Any:
        def take(parameter: Tensor) -> None:
            assert parameter.grad is not None
            taken[slot] = taken[slot] + parameter.grad if slot in taken else parameter.grad
            parameter.grad = None

        return take

    for slot, local in enumerate(locals_):
        if local.requires_grad:
            local.register_post_accumulate_grad_hook(listen(slot))
    return taken


def equals_plain(
    group: ReplicaGroup, zero: Any, steps: int, *, turns: int = 1, adam: bool = False
) -> list[Tensor]:
    """Trains both on uneven weights, clipped, and compares; returns what this rank holds.

    By SGD in float64 the weights are compared, by AdamW in float32 the losses: where a gradient is
    almost zero, AdamW turns rounding into whole steps.
    """
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32 if adam else torch.float64)
    model: Any = Net()
    near, clip = (1e-5 if adam else 1e-10), 1.0
    plain = copy.deepcopy(model)
    sharded = shard(model, group.device_mesh, zero=zero)
    theirs = list(model.parameters())
    own_rank = MeshRank(MeshSpec(shard=distributed.get_world_size()), distributed.get_rank())
    names = [name for name, _ in model.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    mine = sharded.slots.of(model.parameters())
    taken = gradients(sharded, mine)
    optimizer, reference = (
        torch.optim.AdamW(each, lr=1e-3) if adam else torch.optim.SGD(each, lr=0.02)
        for each in (mine, plain.parameters())
    )
    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        batches = torch.randint(0, 11, (turns * ranks, 4), generator=generator)
        if step % 3:
            batches[:, 0] = 1  # nobody uses `sometimes`
        weights = torch.rand(turns * ranks, generator=generator).tolist()
        weights[step % ranks] = 0.0
        taken.clear()
        total = torch.zeros(1)
        for turn in range(turns):
            own = turns * rank + turn
            loss = sharded.run(compute_loss, model, batches[own], weights[own])
            loss.backward()
            sharded.finish_pass()
            total += loss.detach()
        squares = sum(
            (
                taken[slot].to_dense().square().sum()
                for slot in taken
                if primary(theirs[slot], own_rank)
            ),
            torch.zeros(()),
        )
        distributed.all_reduce(squares)
        scale = min(1.0, clip / (squares.sqrt().item() + 1e-6))  # as torch
        for slot, each in enumerate(mine):
            each.grad = (taken[slot] * scale).to_dense() if slot in taken else None
        optimizer.step()
        optimizer.zero_grad()
        reference.zero_grad()
        whole = sum(
            compute_loss(plain, batch, weight)
            for batch, weight in zip(batches, weights, strict=True)
        )
        whole.backward()
        assert set(taken) == {n for n, p in enumerate(plain.parameters()) if p.grad is not None}
        for parameter in plain.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), clip)
        torch.testing.assert_close(squares.sqrt(), norm, rtol=near, atol=0)
        reference.step()
        distributed.all_reduce(total)
        torch.testing.assert_close(total[0], whole.detach(), rtol=near, atol=0)
        if step == 2:  # without gradients, nothing stays gathered that could be stale
            with torch.no_grad():
                sharded.run(compute_loss, model, batches[0], 1.0)
    for (name, parameter), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not adam:
            torch.testing.assert_close(
                whole, other, rtol=0, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
            )
    return mine


def quickly(rank: int, ranks: int, folder: Path) -> None:
    group = replica(rank, ranks, folder)
    first = equals_plain(group, 3, 12)
    assert all(map(torch.equal, first, equals_plain(group, 2, 12)))
    group.close()


@pytest.mark.slow
def test_sharded_training_equals_plain_pytorch(tmp_path: Path) -> None:
    """On three ranks, so that no parameter divides; the same bits with ZeRO 2 and 3."""
    start_processes(quickly, (3, tmp_path), nprocs=3, start_method="forkserver")


def thoroughly(rank: int, ranks: int, folder: Path) -> None:
    group = replica(rank, ranks, folder)
    for zero in (2, 3):
        first = equals_plain(group, zero, 50, turns=2)
        assert all(map(torch.equal, first, equals_plain(group, zero, 50, turns=2)))
        equals_plain(group, zero, 50, adam=True)
    group.close()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fifty_steps_equal_plain_pytorch_with_the_same_bits_twice(
    tmp_path: Path, ranks: int
) -> None:
    start_processes(thoroughly, (ranks, tmp_path), nprocs=ranks, start_method="forkserver")


class Chooser(nn.Module):
    """Each batch takes its own way through blocks of one shape, registered in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    def forward(self, x: Tensor, way: list[int]) -> Tensor:
        for expert in way:
            if expert >= 0:
                x = torch.tanh(self.experts[expert](x))
            else:  # makes no use of what it returns
                self.experts[~expert](x)
        return x.square().sum()


WAYS = {
    "alike": ([3, 1, 0, 2, 4],) * 3,
    "left out": ([1, 0], [0, 4], [3, 1, 0, 2, 4]),
    "no block at all": ([], [], [2]),
    "one each, as experts": ([3], [4], [0]),
    "one never": ([2], [2], [2]),
    "more often": ([0, 1], [0, 1, 0, 1, 0, 1], [0, 0]),
    "in another order": ([4, 3], [3, 4], [3, 0, 4]),
    "without use": ([~0, 3, 1, ~4], [0, ~1], [0, ~1, 1]),
    "all of it": ([2, 2, 0, 3], [3, 0, 2], [1, 3, 1]),
}


def other_ways(rank: int, ranks: int, folder: Path) -> None:
    for zero in (3, 2):  # what a refusal leaves on its way is for nobody of the next group
        (folder / str(zero)).mkdir(exist_ok=True)
        group = replica(rank, ranks, folder / str(zero))
        one_zero(group, rank, ranks, zero)
        group.close()


def one_zero(group: ReplicaGroup, rank: int, ranks: int, zero: Any) -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model = Chooser()
    plain = copy.deepcopy(model)
    sharded = shard(model, group.device_mesh, zero=zero)
    mine = sharded.slots.of(model.parameters())
    x = torch.randn(ranks, 2, 4)
    for ways, grad in itertools.product(WAYS.values(), (True, False)):  # data have no gradients
        if not grad and [] in ways:
            continue  # nothing has
        x.requires_grad_(grad)
        with torch.no_grad():
            sharded.run(model, x[rank], ways[-rank])
        sharded.run(model, x[rank], ways[rank]).backward()
        sharded.finish_pass()
        for own, way in zip(x, ways, strict=False):
            plain(own, way).backward()
        for (name, parameter), other in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            local = mine.pop(0)
            mine.append(local)
            assert (local.grad is None) == (other.grad is None), (name, ways)
            if other.grad is not None:
                whole = split_like(parameter, local.grad).full_tensor()
                torch.testing.assert_close(whole, other.grad, rtol=1e-10, atol=1e-12)
            local.grad = other.grad = None
    x.requires_grad_()
    (loss,) = sharded.run(lambda: iter([model(x[rank], [0, 1] if rank else [0])]))
    with pytest.raises(RecipeError, match="must run the same blocks in the same order"):
        loss.backward()


def test_ranks_whose_samples_take_other_ways_sum_right_or_are_refused(tmp_path: Path) -> None:
    start_processes(other_ways, (3, tmp_path), nprocs=3, start_method="forkserver")


def more_often(rank: int, ranks: int, folder: Path) -> None:
    group = replica(rank, ranks, folder)
    model, x = Chooser(), torch.randn(2, 4)
    sharded = shard(model, group.device_mesh)

    def times(count: int) -> Tensor:
        return torch.stack([model(x, [0, 1, 2, 3, 4]) for _ in range(count)])

    with torch.no_grad():
        assert sharded.run(times, 2).shape == (2,)
        assert sharded.run(times, 1 + rank).shape == (1 + rank,)
    group.close()


def test_a_rank_that_is_done_with_a_pass_does_not_let_the_others_wait(tmp_path: Path) -> None:
    start_processes(more_often, (2, tmp_path), nprocs=2, start_method="forkserver")
