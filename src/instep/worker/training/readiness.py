"""Announcements of a worker that is about to take its first step."""

from __future__ import annotations

import torch

from instep.engine.engine import Engine
from instep.engine.trial_result import Trial
from instep.recipe.build import Built
from instep.sync.clashes import on_the_cpu
from instep.words import listed
from instep.worker.loop.announcer import Announcer
from instep.worker.training.inputs import Inputs


def tell_ready(
    announcer: Announcer, inputs: Inputs, engine: Engine, built: Built, trial: Trial
) -> None:
    """Tell what there is, what is not used of it, and the verdict; all workers call it.

    Args:
        announcer: of the worker.
        inputs: its datasets.
        engine: that it trains with.
        built: its optimizer, and what its model was made from.
        trial: that all have agreed on.
    """
    member = inputs.member
    _warn_of_unused(announcer, inputs, engine.device)
    if pids := inputs.pids:
        member.emit("loaders_started", worker=member.number, pids=pids)
    if engine.comm.rank == 0:
        _tell_begun(announcer, inputs, built)
    member.emit("passes_chosen", worker=member.number, merged=trial.merge, reason=trial.reason)
    if engine.comm.rank == 0 and not member.others_have_state:
        member.emit("same_as_one_machine", verdict=trial.verdict)


def _warn_of_unused(announcer: Announcer, inputs: Inputs, device: torch.device) -> None:
    """Warn of GPUs, and of options of the user's loaders, that training does not use."""
    job, gpus = inputs.job, torch.cuda.device_count()
    auto = job.train.device == "auto" and not on_the_cpu(job)
    if gpus and device.type == "cpu" and auto:
        announcer.warn(
            f"{job.workers} workers compute on the CPU, since this machine has "
            f"{gpus} GPUs; --workers {gpus} would use them"
        )
    for name, given in inputs.recipe.given.items():
        trained = name == "train"
        for lost in given.unused(
            f"Recipe.{name}",
            shuffled=job.data.shuffled if trained else None,
            batch=job.train.global_batch,
            planned=trained,
            tokens=job.train.tokens_per_batch if trained else None,
        ):
            announcer.warn(lost.text)


def _tell_begun(announcer: Announcer, inputs: Inputs, built: Built) -> None:
    """Tell what the model was loaded from, and which adapters it has."""
    member = inputs.member
    if built.loaded is not None:
        member.emit("model_loaded", **built.loaded.fields())
    if built.adapted is None or member.checkpoint is not None:
        return
    member.emit("lora_added", **built.adapted.fields())
    if unused := built.adapted.unused:
        announcer.warn(
            f"the trial did not call {listed(unused, 4)}: an adapter there has no "
            "effect if the model uses the weight and not the layer"
        )
