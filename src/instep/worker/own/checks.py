"""What an own loop cannot give, and what its run says of being the same as on one machine.

From the job and the model alone: nothing is tried, for the user runs the passes.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from instep.data.torch_loader import Unused
from instep.errors import SpecError
from instep.spec import JobSpec, StartSpec, TrainSpec


def verdict_of(model: nn.Module, train: TrainSpec, lost: Sequence[Unused]) -> str:
    """Whether a run of an own loop is shown to give the result of one machine.

    Args:
        model: to be trained.
        train: the job's.
        lost: what of the user's `DataLoader` is not kept.
    """
    if decisive := "; ".join(f"{text}. {remedy}" for text, remedy in lost if remedy):
        return f"no: {decisive}"
    layers = [
        f"{type(layer).__name__} {name!r}"
        for name, layer in model.named_modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm)
    ]
    more = f" (and {len(layers) - 1} more)" if len(layers) > 1 else ""
    if layers and train.merge == "always":
        return (
            "no: train.merge = 'always' joins the micro-batches of a process, and "
            f"{layers[0]}{more} sees all of them; so the result depends on the number of "
            "processes. Leave train.merge out"
        )
    if layers and train.micro_batches > 1:
        size = -(-train.global_batch // train.micro_batches)
        return (
            f"no: {layers[0]}{more} sees the {size} samples of a micro-batch, and in a loop over "
            f"whole batches it would see {train.global_batch}. Any number of processes gives the "
            "same; for the result of a loop over whole batches set train.micro_batches = 1, which "
            "leaves work for one process"
        )
    return "not shown: your own loop runs its passes by itself, so nothing could be tried"


def refuse(job: JobSpec) -> None:
    """What an own loop cannot give.

    Raises:
        SpecError: the job asks for it.
    """
    if job.train.batch_norm == "global":
        raise SpecError(
            "train.batch_norm = 'global' needs a recipe: in your own loop nobody knows which "
            "pass a layer is in. Leave it out."
        )
    if job.train.precision != "float32":
        raise SpecError(
            f"train.precision = {job.train.precision!r}: your own loop casts by itself. "
            "Leave the key out, and use torch.autocast around your forward pass."
        )
    if job.start != StartSpec():
        raise SpecError(
            "[start] is set, but your own loop makes model and optimizer. Leave it out; load "
            "with instep.load_model(path, model), and freeze with requires_grad_(False)."
        )
    if job.sync.participants:
        raise SpecError(
            f"sync.name = {job.sync.name!r}: your own loop takes its steps by itself, so it "
            "cannot compute the steps of several participants. Train a recipe."
        )
    if job.check.corruption:
        raise SpecError(
            "check.corruption = true: your own loop runs its passes by itself, so none can be "
            "computed twice. Leave it out."
        )
    if job.check.strict:
        raise SpecError(
            "check.strict = true: your own loop runs its passes by itself, so nothing can be "
            "tried, and it is not shown that the run gives the result of one machine. Leave it "
            "out, or train a recipe."
        )
