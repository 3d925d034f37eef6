"""The device that a worker computes on, and what it cannot do."""

from __future__ import annotations

import torch

from instep.engine.member import Member
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.sync.clashes import on_the_cpu


def choose_device(job: JobSpec, local_rank: int, local_size: int) -> torch.device:
    """A GPU for each worker if there are enough and all that is asked for goes there, else the CPU.

    Args:
        job: says which is wanted.
        local_rank: of this worker among those of its machine, from 0.
        local_size: how many these are.

    Raises:
        SpecError: the job wants CUDA and there is not a GPU for this worker.
    """
    wanted, count = job.train.device, torch.cuda.device_count()
    if wanted == "cuda" and local_rank >= count:
        raise SpecError(
            f"train.device = 'cuda': this machine has {count} GPUs, and {local_size} workers or "
            "more. Use fewer workers, or train.device = 'cpu'."
            if count
            else f"train.device = 'cuda', but torch {torch.__version__} finds no GPU on this "
            "machine. Use train.device = 'cpu'; or install a driver, and a torch that is built for "
            "CUDA."
        )
    enough = count >= max(local_size, local_rank + 1) and not on_the_cpu(job)
    if wanted == "cuda" or (wanted == "auto" and enough):
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def check_encrypted(member: Member, device: torch.device) -> None:
    """Refuse a device whose exchanges cannot be encrypted, where they must be."""
    if member.forwarder is not None and device.type == "cuda":
        raise SpecError(
            "GPUs of several hosts exchange gradients by NCCL, which cannot encrypt. If only "
            'trusted machines reach the network between them, set network = "private"; or train '
            "with train.device = 'cpu'."
        )


def check_device(job: JobSpec, device: torch.device) -> None:
    """Refuse a precision that the device does not have."""
    if job.train.precision == "float16" and device.type != "cuda":
        raise SpecError(
            "train.precision = 'float16' needs CUDA, and this worker computes on the CPU. "
            "Use train.precision = 'bfloat16' here."
        )
