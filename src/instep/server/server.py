"""What all servers do alike: have a part of the parameters, and continue through generations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from instep.engine.member import Member
from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.state.host_copy import HostCopy
from instep.errors import SpecError
from instep.recipe.recipe import Recipe
from instep.server.micro_batches import Portions
from instep.server.shard import Holding
from instep.sync.servers.server_async import ServerAsync
from instep.worker.training.training import Training


def place_of(member: Member) -> int:
    """Which of the servers a process is: they have the numbers after the first workers'."""
    return member.number - member.job.workers


class TrainingServer(Training):
    """A server of a run.

    Args:
        member: this server's membership in the run.
        recipe: what is trained.
        device: the CPU.

    Raises:
        InstepError: job or recipe cannot be trained.
    """

    def __init__(self, member: Member, recipe: Recipe, device: torch.device) -> None:
        if not member.sees_run:
            raise SpecError(
                f"the server does not see the folder of the run, {member.run}, where it writes "
                "checkpoints and the ledger. Name a host that does in cluster.servers, or use a "
                "shared folder."
            )
        super().__init__(member, recipe, device)
        self._servers, self._place = member.job.sync.servers, place_of(member)
        self._portions = Portions(self.samples, self.job.per_commit)
        self._copy = HostCopy()
        self._broken = -1  # the generation that was reported to be left
        self.engine.records.mends = False  # micro-batches of steps that are not complete count too

    def _made_holding(self, buffers: Sequence[Tensor] = ()) -> Holding:
        """What this server has, once model and optimizer have what a checkpoint holds."""
        return Holding(
            self.engine.parameters,
            cast(LeasedUpdate, self._update),
            cast(ServerAsync, self.engine.turn.strategy),
            servers=self._servers,
            place=self._place,
            buffers=buffers,
        )

    @property
    def _names(self) -> list[str]:
        """Of the parameters that are trained."""
        names = {id(each): name for name, each in self.engine.model.named_parameters()}
        return [names[id(parameter)] for parameter in self.engine.parameters]

    def _keep_up(self) -> None:
        """Be in the generation that the master has begun; nothing else of it matters here.

        Raises:
            PeerError: this process may have been replaced.
        """
        member = self.member
        member.lease.check()
        if member.superseded:
            form = member.wait_for_group()
            self.engine.state.inside(form.generation)
            self.sized(len(form.members))
            member.formed()
        elif member.regroups and self._broken != self.engine.state.generation:
            self._broken = self.engine.state.generation
            member.broken(holds=True)
