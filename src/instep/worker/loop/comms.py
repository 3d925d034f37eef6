"""Groups of a generation."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from instep.comm.alone import AloneComm
from instep.comm.base import Comm
from instep.comm.over_hosts import over_hosts
from instep.comm.staged import StagedComm
from instep.comm.torch_comm import TorchComm
from instep.engine.member import Member
from instep.errors import PeerError
from instep.system.processes import machine
from instep.worker.loop.kinds import backend_for


def make_comms(
    member: Member, device: torch.device, address: str = "127.0.0.1"
) -> tuple[Comm, Comm]:
    """The groups of this generation, listening on a local address: all members, and those that
    have this one's place in their replicas; the same group, where a replica is one rank.

    Raises:
        PeerError: a member was lost meanwhile.
        SpecError: the job cannot be trained on devices of several kinds, and these are.
    """
    form, mesh = member.form, member.job.mesh
    assert form is not None
    backend = backend_for(member, device)
    device = device if backend == "nccl" else torch.device("cpu")

    def among(members: Sequence[int], prefix: str) -> Comm:
        if len(members) == 1:  # it moves nothing
            return AloneComm()
        return TorchComm(
            member.store(prefix),
            members.index(form.members[form.rank]),
            len(members),
            device=device,
            address=address,
            timeout_s=form.timeout_s,
        )

    everyone = among(form.members, "")
    if mesh.ranks == 1:
        if device.type == "cpu" and len(form.members) > 3 and not form.servers:

            def of_ranks(ranks: Sequence[int], name: str) -> Comm:
                return among([form.members[rank] for rank in ranks], name)

            everyone = over_hosts(everyone, machine(), of_ranks)
        if backend == "staged":
            everyone = StagedComm(everyone)
        return everyone, everyone
    worker = form.members[form.rank]
    try:
        column = among(mesh.column(form.members, worker), f"column {worker % mesh.ranks} ")
    except PeerError:
        everyone.close()
        raise
    return everyone, column
