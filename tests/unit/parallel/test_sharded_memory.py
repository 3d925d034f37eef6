"""Peak tensor bytes of a sharded model, by torch's tracker, against the promise."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.multiprocessing import start_processes

from instep.errors import RecipeError
from instep.job.mesh import MeshSpec
from instep.parallel.pipeline import Pipeline
from instep.parallel.recompute import checkpoint_blocks
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard
from lazily import Lazy

mem_tracker = Lazy("torch.distributed._tools.mem_tracker")

WIDTH = 128


def make(blocks: int) -> nn.Module:
    return nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(blocks)
        )
    )


def peak_bytes(group: ReplicaGroup, model: nn.Module, samples: int, zero: Any = 3) -> int:
    """Of the second step with AdamW, when its state is there."""
    sharded = shard(model, group.device_mesh, zero=zero)
    mine = sharded.slots.of(model.parameters())
    optimizer: Any = torch.optim.AdamW(mine)
    x = torch.randn(samples, WIDTH)
    tracker = mem_tracker.MemTracker()
    tracker.track_external(model, optimizer, *mine)
    for _ in range(2):
        tracker.reset_mod_stats()
        with tracker:
            sharded.run(lambda: model(x).square().mean()).backward()
            sharded.finish_pass()
            optimizer.step()
            optimizer.zero_grad()
    peak: Any = tracker.get_tracker_snapshot("peak")
    return int(peak[torch.device("cpu")]["Total"])


def measure(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), ranks)
    group = ReplicaGroup(store, rank, MeshSpec(shard=ranks), timeout_s=600)
    block = 4 * (8 * WIDTH * WIDTH + 5 * WIDTH)
    for blocks in (3, 8, 16):
        # as the last but one goes back: its gradient is whole, that of the last is to come, and
        # parameters of both are whole
        split = 3 * blocks + blocks - 2
        promise = split * block / ranks + 3 * block
        reached = peak_bytes(group, make(blocks), 1) / promise
        assert 0.99 <= reached <= 1.01, reached
        whole = blocks + 2  # all parameters; a gradient as it is sent, and what is received
        promise = 3 * blocks * block / ranks + whole * block
        reached = peak_bytes(group, make(blocks), 1, zero=2) / promise
        assert 0.99 <= reached <= 1.01, reached
    samples, blocks = 2048, 16
    kept = blocks * samples * 4 * WIDTH * 4  # what tanh keeps for backward, alone
    model = make(blocks)
    checkpoint_blocks(model)
    with_all, with_few = (peak_bytes(group, each, samples) for each in (make(blocks), model))
    assert with_few < with_all - 0.8 * kept
    group.close()


@pytest.mark.slow
@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_memory_is_as_promised_and_checkpointing_saves_activations(
    tmp_path: Path, ranks: int
) -> None:
    """Parameters, gradients, optimizer state over n, two gathered blocks, one whole gradient; with
    ZeRO 2 all parameters are whole when the backward pass begins, and no gradient is there yet."""
    start_processes(measure, (ranks, tmp_path), nprocs=ranks, start_method="forkserver")


def track_everything() -> Any:
    """Not by module, since a tracker follows a module through one call only."""

    class Everything(mem_tracker.MemTracker):  # type: ignore[misc, name-defined]
        def _pre_fw_hook(self, *_: Any) -> None: ...

        _post_fw_hook = _pre_bw_hook = _post_bw_hook = _pre_fw_hook

    return Everything()


PARTS = 4


def activations(rank: int, blocks: int, samples: int, again: bool) -> float:
    """The most that a stage holds beyond what it has of parameters, gradients and optimizer, in
    inputs of a block for one part; of two stages."""
    model, x = make(blocks), torch.randn(samples, WIDTH)
    pipeline = Pipeline(
        model,
        lambda batch, size: (model(batch).square().mean(), float(size)),
        x,
        samples,
        group=distributed.group.WORLD,
        parts=PARTS,
        cuts=[str(blocks // 2)],
    )
    if again:
        checkpoint_blocks(model)
    optimizer: Any = torch.optim.AdamW(model.parameters())
    tracker = track_everything()
    tracker.track_external(model, optimizer)
    for step in range(2):
        tracker.reset_mod_stats()
        with tracker:
            pipeline.run(x, samples, step)
            pipeline.sum_shared()
            optimizer.step()
            optimizer.zero_grad()
    peak: Any = tracker.get_tracker_snapshot("peak")
    own = 4 * 4 * (8 * WIDTH * WIDTH + 5 * WIDTH) * blocks // 2
    return (int(peak[torch.device("cpu")]["Total"]) - own) / (samples // PARTS * WIDTH * 4)


def measure_stages(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), 2)
    group = ReplicaGroup(store, rank, MeshSpec(stages=2), timeout_s=600)
    under_way = 2 - rank  # parts, by 1f1b
    for again, of_block in ((True, 1), (False, 5)):  # its input; or also what tanh keeps
        few, many = (activations(rank, blocks, 512, again) for blocks in (8, 16))
        of_each = (many - few) / 4  # blocks of a stage
        assert of_each == pytest.approx(under_way * of_block, rel=0.02), (again, of_each)
        rest = few - 4 * of_each  # a block that runs, forward and back
        assert 0 <= rest <= 25, (again, rest)
    group.close()


@pytest.mark.slow
@pytest.mark.process
def test_a_stage_that_checkpoints_keeps_inputs_of_its_blocks_for_the_parts_under_way(
    tmp_path: Path,
) -> None:
    start_processes(measure_stages, (tmp_path,), nprocs=2, start_method="forkserver")


def test_a_model_without_blocks_cannot_checkpoint_them() -> None:
    with pytest.raises(RecipeError, match="no list of repeated blocks"):
        checkpoint_blocks(nn.Linear(2, 2))


@pytest.mark.parametrize("training", [True, False])
def test_checkpointed_blocks_give_the_same_gradients(training: bool) -> None:
    """Dropout draws again what it drew."""
    gradients = []
    for recompute in (False, True):
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout()) for _ in range(3)))
        model.train(training)
        if recompute:
            checkpoint_blocks(model)
            model = copy.deepcopy(model)  # computes with parameters of its own
        torch.manual_seed(5)
        model(torch.randn(6, 4)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
