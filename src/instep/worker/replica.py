"""A replica that is a mesh of processes, and how this process enters.

The group of a replica is formed once, when its processes build their models, and lives as long as
they do: one that loses a process is started again whole. How the model is split is known to
`parallel/`; steps are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import nn

from instep.comm.torch_comm import TorchComm
from instep.system.addresses import address_towards
from instep.worker.member import Member


class Replica:
    """This process's end of its replica, and its part of the model.

    Args:
        member: this worker's membership in the run.
        model: built, whole; afterwards each process has its part of the parameters.
        device: where it computes.
        steady: names of the blocks that every pass runs; None: all.

    Raises:
        RecipeError: the model cannot be split; or the program has made torch's default group.
        PeerError: another process of the replica was lost meanwhile.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        device: torch.device,
        steady: Container[str] | None = None,
    ) -> None:
        from instep.parallel.recompute import checkpoint_blocks
        from instep.parallel.replica_group import ReplicaGroup  # takes half as long as torch
        from instep.parallel.sharded import shard

        mesh = member.job.mesh
        if mesh.checkpointing == "blocks":
            checkpoint_blocks(model)
        self._model, self._device = model, device
        place, address = member.number % mesh.ranks, address_towards(member.master_host)
        store = member.replica_store()
        self._group = ReplicaGroup(store, place, mesh, device=device, address=address)
        store = member.replica_store("comm ")
        self.comm = TorchComm(store, place, mesh.ranks, device=device, address=address)
        """Its processes; for what they agree on before the first generation."""
        self._sharded = shard(model, self._group.axis("shard"), zero=mesh.zero, steady=steady)

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; all processes of the replica do so together."""
        result = self._sharded.run(function, *arguments)
        if not self._model.training:  # nobody goes back from here
            self._sharded.free()
        return result

    def gather(self, own: int) -> list[int]:
        """A number of each of its processes, in rank order; all call it at the same time.

        Raises:
            PeerError: one of them was lost.
        """
        every = torch.zeros(self.comm.size, dtype=torch.int64, device=self._device)
        every[self.comm.rank] = own
        self.comm.all_reduce(every).wait()
        numbers: list[int] = every.tolist()
        return numbers

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of this process's next passes count."""
        self._sharded.set_counts(counts)

    def finish_pass(self) -> None:
        """A backward pass is over."""
        self._sharded.finish_pass()

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory."""
        return self._sharded.local_parameters(parameters)

    def counts(self, slot: nn.Parameter) -> bool:
        """Whether this rank adds its part to a sum over the replica."""
        return self._sharded.counts(slot)

    def close(self) -> None:
        """Leave the groups; a second call does nothing."""
        self.comm.close()
        self._group.close()
