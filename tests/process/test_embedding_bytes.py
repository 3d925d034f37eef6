"""What embeddings on servers send, as the kernel counts it: little but the rows of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import FileStore
from torch.multiprocessing import start_processes

import instep
from instep.comm.metered import tcp_traffic
from instep.comm.torch_comm import TorchComm
from instep.engine.served.tables import ServedTables
from instep.job.spec import JobSpec
from instep.recipe.build import build_optimizer
from instep.system.host_memory import HostMemory

pytestmark = pytest.mark.process

ROWS, DIM, STEPS, BATCH, SERVERS = 100_000, 16, 5, 8192, 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, DIM, sparse=True)
        self.bias = nn.Parameter(torch.zeros(1))


def zipf(step: int) -> torch.Tensor:
    """[BATCH] rows, the n-th of them as often as 1 / n."""
    generator = torch.Generator().manual_seed(step)
    return (ROWS ** torch.rand(BATCH, generator=generator, dtype=torch.float64)).long() - 1


def one_process(rank: int, folder: Path) -> None:
    recipe = instep.Recipe(
        model=Net,
        train=[0],
        compute_loss=lambda model, batch: model.words(batch).sum(),
        optimizer=instep.RowwiseAdagrad,
    )
    model = Net()
    served = ServedTables(model, JobSpec(recipe="net.py:recipe"))
    served.made(build_optimizer(recipe, model, 1))
    store = FileStore(str(folder / "meeting"), 1 + SERVERS)
    comm = TorchComm(store, rank, 1 + SERVERS)
    tables, found = served.tables, dict[str, Any]()
    tables.start(comm, range(1, 1 + SERVERS), HostMemory(), by_unit=False)
    comm.all_reduce(torch.zeros(1)).wait()
    before = tcp_traffic()
    for step in range(STEPS):
        tables.begin_step()
        if rank == 0:
            ids = zipf(step)
            loss = model.words(ids[: BATCH // 2]).square().sum()  # two calls share their rows
            loss = loss + model.words(ids[BATCH // 2 :]).square().sum()
            tables.begin_pass(1.0, 0)
            loss.backward()
        tables.close()
        tables.exchange()
        if tables.kept is not None:
            tables.kept.move(1.0)
            tables.kept.apply()
    comm.all_reduce(torch.zeros(1)).wait()
    if rank == 0:
        now, unique = tcp_traffic(), sum(len(zipf(step).unique()) for step in range(STEPS))
        found = {
            "kernel": sum(now) - sum(before),
            "own": tables.bytes_pulled + tables.bytes_pushed,
            "rows": 2 * unique * (4 * DIM + 4),
            "drawn": STEPS * BATCH / unique,
        }
        (folder / "found.json").write_text(json.dumps(found))
    comm.close()


def test_both_directions_take_at_most_a_tenth_more_than_the_rows(tmp_path: Path) -> None:
    """C14: a row's number and values, once in each direction, of words that follow Zipf's law."""
    start_processes(one_process, (tmp_path,), nprocs=1 + SERVERS, start_method="forkserver")
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["drawn"] > 1.5  # they repeat
    assert found["kernel"] <= 1.10 * found["rows"]
    assert found["own"] == pytest.approx(found["kernel"], rel=0.02)
