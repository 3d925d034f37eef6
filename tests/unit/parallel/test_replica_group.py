"""The default group of a replica: on one address only, alone, and left quickly."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.multiprocessing import start_processes

from instep.errors import RecipeError
from instep.job.mesh import MeshSpec
from instep.parallel.replica_group import ReplicaGroup

pytestmark = pytest.mark.process


def listening() -> set[str]:
    """The addresses, as hexadecimal digits, on which this process listens."""
    inodes = set()
    for each in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(each)
        except OSError:
            continue
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                found.add(fields[1].partition(":")[0])
    return found


def mesh_of_four(rank: int, folder: Path) -> None:
    mesh: Any = MeshSpec(shard=2, tensor=2)
    store = distributed.FileStore(str(folder / "meeting"), 4)
    before = listening()
    group = ReplicaGroup(store, rank, mesh, address="127.0.0.2", timeout_s=600)
    assert group.device_mesh.mesh_dim_names == ("shard", "tensor")
    place = mesh.coordinate(rank)
    assert group.axis("shard").get_local_rank() == place.shard
    assert group.axis("tensor").get_local_rank() == place.tensor
    total = torch.tensor([float(rank)])
    distributed.all_reduce(total, group=group.axis("tensor").get_group())
    assert total.item() == {0: 1, 1: 5}[place.shard]
    assert listening() - before == {"0200007F"}, "127.0.0.2, and no other address"
    with pytest.raises(RecipeError, match="init_process_group"):
        ReplicaGroup(store, rank, mesh)
    distributed.barrier()
    if rank == 3:
        os._exit(0)  # leaves without a word
    begun = time.monotonic()
    group.close()
    assert time.monotonic() - begun < 300, "it waited for whoever has left"
    assert not distributed.is_initialized()


def test_a_replica_listens_on_its_address_only_and_leaves_without_the_dead(tmp_path: Path) -> None:
    start_processes(mesh_of_four, (tmp_path,), nprocs=4, start_method="forkserver")
