"""A replica that is a mesh of processes: what a job may have with one, and how this process enters.

The group of a replica is formed once, when its processes build their models, and lives as long as
they do: one that loses a process is started again whole. How the model is split is known to
`parallel/`; steps are not known here.
"""

from __future__ import annotations

import torch
from torch import nn

from instep.errors import SpecError
from instep.recipe.recipe import Recipe
from instep.spec import JobSpec
from instep.system.addresses import address_towards
from instep.worker.member import Member


class Replica:
    """This process's end of its replica.

    Args:
        member: this worker's membership in the run.
        device: where it computes.

    Raises:
        RecipeError: the program has made torch's default group itself.
        PeerError: another process of the replica was lost meanwhile.
    """

    def __init__(self, member: Member, device: torch.device) -> None:
        from instep.parallel.replica_group import ReplicaGroup  # half as long as importing torch

        self._mesh = member.job.mesh
        self._group = ReplicaGroup(
            member.replica_store(),
            member.number % self._mesh.ranks,
            self._mesh,
            device=device,
            address=address_towards(member.master_host),
        )

    def split(self, model: nn.Module) -> None:
        """Have each process keep its part of a model.

        Raises:
            RecipeError: something in it cannot be split.
        """
        from instep.parallel.sharded import shard

        shard(model, self._group.axis("shard"), zero=self._mesh.zero)

    def close(self) -> None:
        """Leave the group; a second call does nothing."""
        self._group.close()


def check_mesh(job: JobSpec, recipe: Recipe) -> None:
    """Refuse what a recipe has that a replica of several processes cannot do.

    Raises:
        SpecError: naming it.
    """
    if job.mesh.ranks == 1:
        return
    for given, name, why in (
        (recipe.turns, "Recipe.turns", "takes several updates in a step"),
        (recipe.batch_loss, "Recipe.batch_loss", "computes each batch twice"),
    ):
        if given:
            raise SpecError(
                f"[mesh] asks for replicas of {job.mesh.ranks} processes, which cannot be used "
                f"with {name}: it {why}. Leave one of the two out."
            )
