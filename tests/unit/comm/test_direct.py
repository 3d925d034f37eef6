"""Collectives of messages from rank to rank, on processes, beside closed forms."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.multiprocessing import start_processes

from instep.comm.direct import SumOfParts, all_gather, wait
from instep.errors import PeerError
from instep.job.mesh import MeshSpec
from instep.parallel.replica_group import ReplicaGroup

RANKS = 3


def group_of(rank, folder, ranks=RANKS):
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "meeting"), ranks)
    made = ReplicaGroup(store, rank, MeshSpec(shard=ranks), timeout_s=600)
    return made, made.device_mesh.get_group()


def collects_and_sums(rank, folder):
    made, group = group_of(rank, folder)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for size in (0, 1, 5, 1 << 20):
            begins = torch.arange(size).remainder(100).to(dtype)
            every = torch.full((RANKS * size,), -1, dtype=dtype)
            wait(all_gather(group, every, begins + rank))
            wanted = torch.cat([begins + other for other in range(RANKS)])
            assert torch.equal(every, wanted), (dtype, size)
            own = torch.full((RANKS, size), 0, dtype=dtype)
            own[rank] = begins + rank
            wait(all_gather(group, own.view(-1), own[rank]))  # its part lies where it belongs
            assert torch.equal(own.view(-1), wanted), (dtype, size)
    torch.manual_seed(0)
    parts = torch.randn(RANKS, RANKS, 1001)  # of each rank, for each rank
    wanted = (parts[0, rank] + parts[1, rank]) + parts[2, rank]
    sent = parts[rank].clone()
    total = SumOfParts(group, sent)
    out = torch.empty(1001)
    assert total.end(out) is out
    assert torch.equal(out, wanted), "not the bits of a sum in rank order"
    assert torch.equal(sent, parts[rank]), "what was sent has changed"
    assert torch.equal(SumOfParts(group, sent).end(), wanted)
    made.close()


def collect_for_ever(group):
    while True:
        wait(all_gather(group, torch.empty(RANKS << 20), torch.ones(1 << 20)))


def loses_a_rank(rank, folder):
    _made, group = group_of(rank, folder)
    wait(all_gather(group, torch.empty(RANKS), torch.ones(1)))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with pytest.raises(PeerError):
            collect_for_ever(group)
        with pytest.raises(PeerError):
            SumOfParts(group, torch.ones(RANKS, 1 << 20)).end()
        (folder / f"heard-{rank}").touch()
    finally:
        os._exit(0)  # of its own, as a worker ends whose replica is broken


MEMORY = """
import ctypes, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import torch
from test_direct import group_of
from instep.comm.direct import all_gather, wait

def peak():
    with open("/proc/self/status") as file:
        (line,) = (line for line in file if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])

rank = int(sys.argv[1])
made, group = group_of(rank, Path(sys.argv[2]), 2)
size = 16 << 20
own, every = torch.ones(size), torch.ones(2 * size)
wait(all_gather(group, torch.ones(2), torch.ones(1)))
before = peak()
wait(all_gather(group, every, own))
print((peak() - before) / every.nbytes)
made.close()
"""


@pytest.mark.process
def test_parts_are_collected_and_summed_in_rank_order(tmp_path):
    start_processes(collects_and_sums, (tmp_path,), nprocs=RANKS, start_method="forkserver")


@pytest.mark.slow
@pytest.mark.process
def test_the_others_hear_that_a_rank_was_killed(tmp_path):
    context = start_processes(
        loses_a_rank, (tmp_path,), nprocs=RANKS, start_method="forkserver", join=False
    )
    for process in context.processes:
        process.join(600)
    assert [process.exitcode for process in context.processes] == [0, -signal.SIGKILL, 0]
    assert {each.name for each in tmp_path.glob("heard-*")} == {"heard-0", "heard-2"}


@pytest.mark.tail
@pytest.mark.process
def test_no_memory_is_taken_beside_what_is_given(tmp_path):
    script = MEMORY.format(tests=str(Path(__file__).parent))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        more = [float(rank.communicate(timeout=600)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert max(more) < 0.1, "of the whole; gloo's own all-gather takes it once more"
