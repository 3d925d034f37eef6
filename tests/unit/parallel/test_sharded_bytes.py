"""What the collectives of a sharded pass send, beside what DDP does."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensor_by_hand import Sent
from torch import Tensor, distributed, nn
from torch.multiprocessing import start_processes
from torch.nn.parallel import DistributedDataParallel

from instep.job.mesh import MeshSpec
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.sharded import shard

WORDS, WIDTH, RANKS = 64, 64, 4
MOST = {2: 1.05, 3: 1.55}
"""Of DDP's bytes."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(4)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def one_rank(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), RANKS)
    group = ReplicaGroup(store, rank, MeshSpec(shard=RANKS), timeout_s=600)
    tokens = torch.randint(WORDS, (2, 8))
    model = Net()
    size = sum(each.nbytes for each in model.parameters())
    ddp = DistributedDataParallel(model)
    for _ in range(2):  # it lays out its buckets anew at the beginning of the second pass
        ddp(tokens).backward()
    with Sent(RANKS) as by_ddp:
        ddp(tokens).backward()
    assert by_ddp.bytes == pytest.approx(2 * size * (RANKS - 1) / RANKS, rel=1e-3)
    for zero, most in MOST.items():
        found: Any = Net()
        sharded = shard(found, group.device_mesh, zero=zero)  # type: ignore[arg-type]
        for _ in range(2):
            with Sent(RANKS) as count:
                sharded.run(found, tokens).backward()
                sharded.finish_pass()
        blocks = sum(each.nbytes for each in found.layers.parameters()) / size
        least = 1 + (zero == 3) * blocks / 2  # blocks are gathered again for the backward pass
        assert 0.999 * least <= count.bytes / by_ddp.bytes <= most, (zero, count.bytes)
        assert count.calls["all_reduce"] == 0
    group.close()


@pytest.mark.slow
@pytest.mark.process
def test_a_sharded_pass_sends_little_more_than_ddp_does(tmp_path: Path) -> None:
    start_processes(one_rank, (tmp_path,), nprocs=RANKS, start_method="forkserver")
