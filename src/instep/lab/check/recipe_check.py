"""Builds and tries a recipe in this process, and notes what is wrong with it and what it needs.

Way in: `check_recipe`. It imports torch.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from instep.data.cores import cores
from instep.data.shards.urls.remote import use_cache
from instep.engine.trial_result import Trial
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec
from instep.lab.check import figures, measures
from instep.lab.check.findings import Findings
from instep.lab.check.lone_member import LoneMember
from instep.lab.check.rehearsal import Rehearsal
from instep.recipe.build import call
from instep.recipe.quick_start import spare_dynamo
from instep.recipe.recipe import Recipe
from instep.recipe.source_file import load_function
from instep.sync import clashes
from instep.system.kernels import per_machine, set_kernels, share
from instep.worker.training.devices import choose_device
from instep.worker.training.trials import decided_by_job

_PASS = "memory and time of a pass"


def check_recipe(job: JobSpec, findings: Findings) -> None:
    """Try all of a recipe that can be tried in one process.

    Args:
        job: with a recipe's function.
        findings: get refusals, warnings and figures.
    """
    spare_dynamo()
    set_kernels(job.train, share(cores(), 1, 0))
    use_cache(job.data.cache, job.data.cache_gb)
    findings.say("calling the recipe")
    recipe = findings.tried("recipe", lambda: _called(job))
    if recipe is None:
        findings.leave_out("data, model, optimizer and passes: there is no recipe")
        return
    streams = recipe.given["train"].streams
    for error in clashes.refusals(job, recipe):  # also those that need no worker
        findings.refuse(error, "job")
    if job.data.parts and not streams:
        findings.leave_out("data.parts: which host has which part shows when they meet")
    if job.data.once:
        findings.warn(
            "data.once = true: the samples that this check has read from the stream are not "
            "trained on"
        )
    local = per_machine(job.workers, job.launch.count)
    device = findings.tried("job", lambda: choose_device(job, 0, local)) or torch.device("cpu")
    findings.say("building model, data and optimizer")
    rehearsal = Rehearsal(
        LoneMember(_alone(job, streams), _tell(findings)), recipe, device, findings
    )
    if not rehearsal.is_divided:
        findings.leave_out("data.split: it is refused, and all else is checked without it")
        job = _undivided(job)
        rehearsal = Rehearsal(
            LoneMember(_alone(job, streams), _tell(findings)), recipe, device, findings
        )
    try:
        _note_data(job, rehearsal, findings)
        findings.say("trying passes, optimizer and validation")
        trial = rehearsal.try_all()
        draws = job.mesh.ranks > 1 and rehearsal.try_mesh(job)
        if trial is not None:
            findings.parts["same_as_one_machine"] = _verdict(job, rehearsal, trial, draws)
        findings.say("measuring a pass")
        _note_needs(job, rehearsal, device, findings, trial)
    finally:
        rehearsal.end()


def _called(job: JobSpec) -> Recipe:
    return call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)


def _alone(job: JobSpec, streams: bool) -> JobSpec:
    """The job as one replica of one process has it; what a mesh or hosts add is not tried."""
    replace = msgspec.structs.replace
    data = replace(job.data, parts=0) if job.data.parts and not streams else job.data
    return replace(job, mesh=MeshSpec(), workers=job.workers // job.mesh.ranks, data=data)


def _undivided(job: JobSpec) -> JobSpec:
    """The job with all data to train on."""
    given: dict[str, Any] = {
        "split": "",
        "validation": None,
        "folds": None,
        "fold": 0,
        "embargo": None,
    }
    given |= {"labels": "", "groups": "", "times": "", "gap": 0.0}
    data = msgspec.structs.replace(job.data, **given)
    return msgspec.structs.replace(job, data=data)


def _tell(findings: Findings) -> Any:
    def tell(name: str, fields: dict[str, Any]) -> None:
        if name == "warning":
            findings.warn(str(fields["text"]).removeprefix("worker 0: "))
        elif name == "trial_progress":
            findings.say(f"trying passes: {fields['done']} of {fields['of']}")

    return tell


def _note_data(job: JobSpec, rehearsal: Rehearsal, findings: Findings) -> None:
    """Note lengths, how a batch is cut, and what one holds."""
    lengths = rehearsal.lengths()
    if not lengths:
        return
    findings.parts["batches"] = figures.of_batches(
        job, lengths["train"], vars(rehearsal).get("batches")
    )
    read = findings.tried("data", rehearsal.micro_batch)
    batch = figures.of_batch(read.batch) if read is not None else []
    findings.parts["data"] = {
        **lengths,
        "micro_batch": read.size if read is not None else 0,
        "batch": batch,
    }


def _verdict(job: JobSpec, rehearsal: Rehearsal, trial: Trial, draws: bool) -> dict[str, Any]:
    if draws:
        trial = decided_by_job(job, rehearsal.recipe, trial, draws_by_block=True)
    return {"verdict": trial.verdict, "merged": trial.merge, "reason": trial.reason}


def _note_needs(
    job: JobSpec,
    rehearsal: Rehearsal,
    device: torch.device,
    findings: Findings,
    trial: Trial | None,
) -> None:
    """Note parameters, memory, bytes sent and times."""
    model, forward, built = rehearsal.model, rehearsal.forward, rehearsal.built
    if model is None or forward is None:
        return
    told = findings.parts["model"] = measures.of_model(model)
    buckets = price = None
    if built is not None and job.mesh.ranks == 1:
        parameters = [turn.parameters for turn in built.turns] or [built.parameters]
        buckets = findings.measured("buckets", lambda: measures.of_buckets(job, parameters))
        price = findings.measured("bytes sent", lambda: measures.sent(job, parameters))
    one = _of_pass(rehearsal, findings)
    moved = None
    if one is not None and built is not None:
        moved = findings.measured("optimizer", lambda: measures.of_optimizer(built, device))
    if moved is not None:
        findings.parts["optimizer"] = moved._asdict()
    gradients = one.gradient_bytes if one is not None else told["trained_bytes"]
    state = 0 if job.sync.served else moved.state_bytes if moved is not None else None
    findings.parts["memory"] = measures.together(
        {
            "model_bytes": told["parameter_bytes"] + told["buffer_bytes"],
            "gradient_bytes": gradients,
            "optimizer_bytes": state,
            "exchange_bytes": buckets - gradients if buckets is not None else None,
            "activation_bytes": one.activation_bytes if one is not None else None,
        }
    )
    findings.parts["memory"]["resident_bytes"] = measures.resident_bytes()
    if price is not None:
        findings.parts["sent"] = price._asdict()
    if one is not None and moved is not None:
        merged = trial is not None and trial.merge
        findings.parts["times"] = _times(rehearsal, one, moved.seconds, findings, merged=merged)


def _of_pass(rehearsal: Rehearsal, findings: Findings) -> measures.OfPass | None:
    """Measure a pass, where one pass of one micro-batch is what a worker computes."""
    forward, job = rehearsal.forward, rehearsal.job
    if forward is None or rehearsal.recipe.batch_loss is not None:
        findings.leave_out(f"{_PASS}: the loss is of a whole global batch")
        return None
    if job.train.batch_norm == "global":
        findings.leave_out(f"{_PASS}: batch_norm = 'global' needs all workers")
        return None
    read = findings.measured(_PASS, rehearsal.micro_batch)
    if read is None:
        return None
    return findings.measured(_PASS, lambda: measures.of_pass(forward, read))


def _times(
    rehearsal: Rehearsal,
    one: measures.OfPass,
    update_s: float,
    findings: Findings,
    *,
    merged: bool,
) -> dict[str, Any]:
    """Seconds of a pass and an update, and about those of an epoch in this one process.

    Where micro-batches are merged, one machine runs a global batch as one pass; that is timed if
    there is room for it.
    """
    forward, train = rehearsal.forward, rehearsal.job.train
    parts, whole_s = train.micro_batches, None
    if merged and measures.has_room(parts * one.activation_bytes):
        read = findings.measured(_PASS, rehearsal.global_batch)
        if read is not None and forward is not None:
            whole_s = findings.measured(_PASS, lambda: measures.seconds_of_pass(forward, read))
    samples, known = rehearsal.lengths()["train"], vars(rehearsal).get("batches")
    steps = samples / min(samples, train.global_batch)
    if train.tokens_per_batch is not None and known is not None:
        steps = known.per_epoch
    step_s = (parts * one.seconds if whole_s is None else whole_s) + update_s
    return {
        "pass_s": one.seconds,
        "global_batch_s": whole_s,
        "update_s": update_s,
        "epoch_s": steps * step_s,
        "threads": torch.get_num_threads(),
    }
