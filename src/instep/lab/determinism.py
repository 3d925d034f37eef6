"""Does a recipe give the same bits on any number of workers? `instep run --check-determinism`.

A few steps are trained on two numbers of workers, in a temporary folder, and everything
that they saved is compared byte by byte. If something differs, a third run on the first
number shows whether two runs on the same number agree. Imports no torch. Way in:
`check_determinism`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from instep.errors import RunError, SpecError, raise_first
from instep.job.spec import JobSpec
from instep.job.train import StopSpec
from instep.lab.temporary_runs import folder_for_runs, run_quietly
from instep.privacy.refusals import repeated
from instep.state.compare import checkpoint_of, differences, saved
from instep.store.run_folder import RunFolder
from instep.words import plural

STEPS = 3
"""Steps of each run: the first two show what one pass does, the third what a step carries over."""


class Difference(NamedTuple):
    """The first thing that is not the same."""

    step: int
    group: str
    """`loss`, or a file of the checkpoint: `model`, `optimizer`, ..."""
    tensor: str
    how: str
    """By how much, as the end of a sentence."""
    tensors: int
    """How many differ after that step."""


class Comparison(NamedTuple):
    """The result of the check."""

    sizes: tuple[int, int]
    steps: int
    tensors: int
    """Tensors compared after each step."""
    difference: Difference | None
    repeatable: bool
    """Whether two runs on the first size agree; tested only if the sizes differ."""


def check_determinism(job: JobSpec, say: Callable[[str], None]) -> Comparison:
    """Train a few steps of a job on two numbers of workers, and compare to the bit.

    They are those of one replica and of several.

    Args:
        job: trained with `determinism = "bits"`, whatever it says.
        say: prints a line of progress.

    Raises:
        SpecError: the job has no work for two replicas.
        InstepError: a run failed; the text says why, with the end of the worker's output.
        KeyboardInterrupt: Ctrl-C or SIGTERM came; nothing is left behind.
    """
    raise_first(repeated(job, "instep run --check-determinism"))
    one = job.mesh.ranks
    sizes = (one, max(job.workers, 2 * one))
    if sizes[1] > job.most_workers:
        what = ("worker", "two") if one == 1 else ("replica", f"two ([mesh] {job.mesh.axes})")
        raise SpecError(
            f"{job.portions} = {job.per_commit.micro_batches}: to compare one {what[0]} with "
            f"{what[1]}, there must be work for two. Set {job.portions} to {2 * job.unit} or more."
        )
    with folder_for_runs("instep-check-") as runs:
        first, second = (_trained(job, size, runs / f"{n}", say) for n, size in enumerate(sizes))
        steps = RunFolder(first).last_step
        difference = _first_difference(first, second, steps)
        repeatable = True
        if difference is not None:
            again = _trained(job, sizes[0], runs / "again", say)
            repeatable = _first_difference(first, again, steps) is None
        tensors = sum(len(names) for _, names in saved(checkpoint_of(first, steps)))
        return Comparison(sizes, steps, tensors, difference, repeatable)


def _trained(job: JobSpec, workers: int, runs: Path, say: Callable[[str], None]) -> Path:
    say(f"training {STEPS} steps on {plural(workers, 'worker')}")
    small = msgspec.structs.replace(
        job,
        workers=workers,
        train=msgspec.structs.replace(
            job.train, determinism="bits", merge="auto", stop_after_steps=STEPS
        ),
        stop=StopSpec(non_finite=False),
        checkpoint=msgspec.structs.replace(job.checkpoint, every=1, keep_last=STEPS),
    )
    run = run_quietly(small, runs)
    check_length(run)
    return run.path


def check_length(run: RunFolder) -> None:
    """Refuse to judge a run that ended before the compared steps, or before its own length.

    Raises:
        RunError: says how far it came.
    """
    due = min(STEPS, int(run.last("worker_ready")["last_step"]))
    if run.last_step < due:
        raise RunError(
            f"a run on {run.spec.workers} workers ended after {run.last_step} of {due} steps "
            f"({run.outcome}), so nothing can be compared. Check again."
        )


def _first_difference(one: Path, other: Path, steps: int) -> Difference | None:
    losses = [_losses(run) for run in (one, other)]
    for step in range(1, steps + 1):
        mine, theirs = (each[step] for each in losses)
        if mine != theirs and not (np.isnan(mine) and np.isnan(theirs)):
            return Difference(step, "loss", "loss", f"{mine!r} and {theirs!r}", 1)
        found = list(differences(*(checkpoint_of(run, step) for run in (one, other))))
        if found:
            group, tensor, how = found[0]
            return Difference(step, group, tensor, how, len(found))
    return None


def _losses(run: Path) -> dict[int, float]:
    steps = RunFolder(run).steps
    return dict(zip(steps["step"].tolist(), steps["loss"].tolist(), strict=True))


def lines(comparison: Comparison) -> list[str]:
    """The result for a person, in a few lines."""
    sizes = f"{comparison.sizes[0]} and {comparison.sizes[1]} workers"
    first = plural(comparison.sizes[0], "worker")
    found = comparison.difference
    if found is None:
        return [
            f"the same bits on {sizes}: losses and {comparison.tensors} tensors, "
            f"after each of {comparison.steps} steps"
        ]
    if found.group == "loss":
        lines = [f"not the same on {sizes}: the loss of step {found.step} is {found.how}"]
        where = "the forward pass, or the samples it is given,"
    else:
        more = f" (and {found.tensors - 1} more)" if found.tensors > 1 else ""
        lines = [
            f"not the same on {sizes}: after step {found.step}, {found.tensor!r} of the "
            f"{found.group} differs{more}: {found.how}"
        ]
        where = "the backward pass or the optimizer"
    if comparison.repeatable:
        return [
            *lines,
            f"two runs on {first} agree: {where} depends on what the process computed before.",
            "Look for a generator, a counter or a cache that is carried from batch to batch.",
        ]
    return [
        *lines,
        f"two runs on {first} differ too: {where} depends on something that the job's seed does "
        "not set.",
        "Look for a generator without a seed, the time, the order of a set, or a kernel that adds "
        "in any order.",
    ]
