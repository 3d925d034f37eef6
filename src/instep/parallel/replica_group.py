"""The processes of one replica, as torch's default process group and a DeviceMesh over it.

FSDP2, DTensor and pipelines talk over torch's default group. It is made once per process and lives
as long as the replica: a replica that loses a rank is started again whole. Models, steps and other
replicas are not known here.

Gloo listens on one given address. Left alone, `init_process_group` would choose an interface by
the host's name, which may be public, so this registers a backend of its own that makes gloo's
group as the groups between replicas are made (`comm/torch_comm.py`).
"""

from __future__ import annotations

import sys
import threading
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import DeviceMesh

from instep.comm.torch_comm import LAST_S, NO_TIMEOUT, gloo_group
from instep.errors import PeerError, RecipeError
from instep.job.mesh import MeshSpec

BACKEND = "instep_gloo"
"""Name of gloo in torch's list of backends, listening on an address of our choice."""


class ReplicaGroup:
    """One process's end of its replica; torch's default group until it is closed.

    Args:
        store: where the ranks leave their addresses; a prefix of its own for each start of the
            replica. It is used only here, and kept as long as the group.
        rank: this process's number within the replica, from 0, in the order of `MeshSpec`.
        mesh: the axes; those of size 1 are not in `device_mesh`.
        device: where the tensors live; CUDA adds NCCL for them.
        address: the local address that gloo listens on.
        timeout_s: how long the ranks may take to find each other.

    Raises:
        RecipeError: the program has made torch's default group itself.
        PeerError: the group could not be formed.
    """

    device_mesh: DeviceMesh
    """Axes `stage`, `shard` and `tensor`, in this order, as far as they are above 1."""

    def __init__(
        self,
        store: Store,
        rank: int,
        mesh: MeshSpec,
        *,
        device: torch.device | None = None,
        address: str = "127.0.0.1",
        timeout_s: float = NO_TIMEOUT.total_seconds(),
    ) -> None:
        if distributed.is_initialized():
            raise RecipeError(
                "the program called torch.distributed.init_process_group, but a replica of "
                f"{mesh.ranks} processes needs torch's default group for itself. Remove the call: "
                "instep makes the group."
            )
        self._store = store  # torch keeps only what lies below Python
        cuda = device is not None and device.type == "cuda"
        _register(address, timedelta(seconds=timeout_s))
        if cuda:
            torch.cuda.set_device(device)
        hook = sys.excepthook
        try:
            distributed.init_process_group(
                f"cpu:{BACKEND},cuda:nccl" if cuda else BACKEND,
                store=store,
                rank=rank,
                world_size=mesh.ranks,
                timeout=NO_TIMEOUT,
            )
            self.device_mesh = _device_mesh(mesh, "cuda" if cuda else "cpu")
        except RuntimeError as error:
            self.close()
            text = f"the replica of {mesh.ranks} processes did not form: {error}"
            raise PeerError(text) from error
        except BaseException:
            self.close()
            raise
        finally:
            sys.excepthook = hook  # torch's would put the rank before each line

    def axis(self, name: str) -> DeviceMesh:
        """The part of the mesh along one axis above 1, through this process."""
        return self.device_mesh[name]

    def close(self) -> None:
        """Leave the group, without waiting for ranks that have ended."""
        if distributed.is_initialized():
            ends = threading.Thread(
                target=distributed.destroy_process_group,
                name="instep leaves its replica",
                daemon=True,
            )
            ends.start()
            ends.join(LAST_S)


def _device_mesh(mesh: MeshSpec, kind: str) -> DeviceMesh:
    axes = {"stage": mesh.stages, "shard": mesh.shard, "tensor": mesh.tensor}
    axes = {name: size for name, size in axes.items() if size > 1} or {"shard": 1}
    ranks = torch.arange(mesh.ranks).view(*axes.values())
    return DeviceMesh(kind, ranks, mesh_dim_names=tuple(axes))


def _register(address: str, timeout: timedelta) -> None:
    """Have torch make gloo's groups, the default one and those of axes, on one address."""

    def make(store: Store, rank: int, size: int, _timeout: timedelta) -> Any:
        return gloo_group(store, rank, size, address, timeout)

    distributed.Backend.register_backend(BACKEND, make, devices=["cpu"])
