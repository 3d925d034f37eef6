"""Kinds of devices that the members of a generation compute on, where hosts may differ.

Every member tells its own before their group forms. Ways in: `kind_of`, `check_alike`.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence

import torch

from instep.engine.member import Member
from instep.errors import SpecError
from instep.job.spec import JobSpec


def check_alike(member: Member, device: torch.device) -> None:
    """Refuse devices of several kinds where the job cannot be trained on these.

    Args:
        member: of the generation that is about to connect; on one machine all are of one kind.
        device: of this one.

    Raises:
        SpecError: names two of them.
        PeerError: a member was lost meanwhile.
    """
    own, form = kind_of(device), member.form
    if member.job.launch.count < 2 or form is None:
        return
    keys = [f"kinds-{form.generation}/{rank}" for rank in range(len(form.members))]
    member.run_store.set(keys[form.rank], own.encode())
    check_kinds(member.job, [member.run_store.get(key).decode() for key in keys])


def kind_of(device: torch.device) -> str:
    """Name what decides how a device rounds: which GPU; of a CPU, which instructions torch uses."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def check_kinds(job: JobSpec, kinds: Sequence[str]) -> None:
    """Refuse kinds that a job cannot be trained on together.

    Args:
        job: of the run.
        kinds: of the members, by rank.

    Raises:
        SpecError: names two of them.
    """
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if not other:
        return
    who = f"rank 0 computes on {kinds[0]!r} and rank {other} on {kinds[other]!r}"
    if job.train.determinism == "bits":
        raise SpecError(
            f"train.determinism = 'bits': {who}, and what they compute differs in the last bits. "
            "Use hosts of one kind, or train.determinism = 'order'."
        )
    if len({kind.partition(":")[0] for kind in kinds}) > 1:
        raise SpecError(
            f"train.device = {job.train.device!r}: {who}, and gradients of CPUs and GPUs do not "
            "meet in one group. Set train.device = 'cpu', or use hosts that all have GPUs."
        )
