"""Whether a recipe gives the same bits at any number of workers: tried, not believed.

A few steps are trained at two sizes, each in a folder that is thrown away, and
everything that they have saved is compared byte by byte. Where something
differs, a third run on the first size tells whether two runs of one size agree.
Imports no torch.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from instep.errors import SpecError
from instep.report.run_folder import RunFolder
from instep.run.client import run_job
from instep.spec import JobSpec
from instep.state.manifest import SUFFIX, folder_name, read_manifest

STEPS = 3
"""Steps of each run: the first two find what one pass does, the third what a step carries on."""


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


class Verdict(NamedTuple):
    """What came of the trial."""

    sizes: tuple[int, int]
    steps: int
    tensors: int
    """Compared after each step."""
    difference: Difference | None
    repeatable: bool
    """Whether two runs on the first size agree; tried only where the sizes differ."""


def check_determinism(job: JobSpec, say: Callable[[str], None]) -> Verdict:
    """Train a few steps of a job at two sizes to the bit, and compare.

    Args:
        job: trained with `determinism = "bits"`, whatever it says itself.
        say: told what is being done.

    Raises:
        SpecError: the job cannot run on two workers.
        InstepError: a run failed; the text says why.
    """
    sizes = (1, job.workers if job.workers > 1 else 2)
    if sizes[1] > job.train.micro_batches:
        raise SpecError(
            f"train.micro_batches = {job.train.micro_batches}: to compare two sizes there must "
            "be work for two workers. Set train.micro_batches to 2 or more."
        )
    with tempfile.TemporaryDirectory(prefix="instep-check-") as text:
        runs = Path(text)
        first, second = (_trained(job, size, runs / f"{n}", say) for n, size in enumerate(sizes))
        steps = min(RunFolder(first).last_step, RunFolder(second).last_step)
        difference = _first_difference(first, second, steps)
        repeatable = True
        if difference is not None:
            again = _trained(job, sizes[0], runs / "again", say)
            repeatable = _first_difference(first, again, steps) is None
        tensors = sum(len(names) for _, names in _saved(first, steps))
        return Verdict(sizes, steps, tensors, difference, repeatable)


def _trained(job: JobSpec, workers: int, runs: Path, say: Callable[[str], None]) -> Path:
    say(f"training {STEPS} steps on {workers} worker{'s' if workers > 1 else ''}")
    small = msgspec.structs.replace(
        job,
        workers=workers,
        train=msgspec.structs.replace(job.train, determinism="bits", stop_after_steps=STEPS),
        checkpoint=msgspec.structs.replace(job.checkpoint, every_steps=1, keep_last=STEPS),
    )
    return run_job(small, runs, named=False, views=[]).path


def _first_difference(one: Path, other: Path, steps: int) -> Difference | None:
    losses = [_losses(run) for run in (one, other)]
    for step in range(1, steps + 1):
        mine, theirs = (each[step] for each in losses)
        if mine != theirs and not (np.isnan(mine) and np.isnan(theirs)):
            return Difference(step, "loss", "loss", f"{mine!r} and {theirs!r}", 1)
        found = list(_differences(one, other, step))
        if found:
            group, tensor, how = found[0]
            return Difference(step, group, tensor, how, len(found))
    return None


def _losses(run: Path) -> dict[int, float]:
    steps = RunFolder(run).steps
    return dict(zip(steps["step"].tolist(), steps["loss"].tolist(), strict=True))


def _differences(one: Path, other: Path, step: int) -> Iterator[tuple[str, str, str]]:
    """Group, tensor and how, of everything that differs between two checkpoints of a step."""
    for (group, mine), (_, theirs) in zip(_saved(one, step), _saved(other, step), strict=True):
        for name in sorted({*mine, *theirs}):
            if name not in mine or name not in theirs:
                yield group, name, "only one of the runs has it"
            elif mine[name] != theirs[name]:
                yield group, name, _how(mine[name], theirs[name])


Kept = dict[str, tuple[str, bytes]]
"""Tensor to its type's name in the file, and its bytes."""


def _saved(run: Path, step: int) -> Iterator[tuple[str, Kept]]:
    """Each group of tensors of a checkpoint, the model first."""
    checkpoint = run / "checkpoints" / folder_name(step)
    for name in sorted(read_manifest(checkpoint).files):  # model, optimizer, scheduler, strategy
        yield name.removesuffix(SUFFIX), _read(checkpoint / name)


def _read(file: Path) -> Kept:
    """A safetensors file as bytes; one of our own, so its header is believed."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header: dict[str, Any] = json.loads(data[8:start])
    header.pop("__metadata__", None)
    spans = {name: (entry["dtype"], *entry["data_offsets"]) for name, entry in header.items()}
    return {name: (kind, data[start + a : start + b]) for name, (kind, a, b) in spans.items()}


_FLOATS = {"F32": "<f4", "F64": "<f8"}


def _how(mine: tuple[str, bytes], theirs: tuple[str, bytes]) -> str:
    (kind, one), (other_kind, other) = mine, theirs
    if kind != other_kind or len(one) != len(other) or kind not in _FLOATS:
        return "other bytes"
    a, b = (np.frombuffer(data, _FLOATS[kind]) for data in (one, other))
    changed = a.view(np.uint8).reshape(len(a), -1) != b.view(np.uint8).reshape(len(b), -1)
    with np.errstate(all="ignore"):
        most = np.nanmax(np.abs(a.astype(np.float64) - b)) if len(a) else 0.0
    return f"{int(changed.any(1).sum())} of {len(a)} numbers, by up to {most:.2g}"


def words(verdict: Verdict) -> list[str]:
    """The verdict in a few lines."""
    sizes = f"{verdict.sizes[0]} and {verdict.sizes[1]} workers"
    found = verdict.difference
    if found is None:
        return [
            f"the same bits on {sizes}: losses and {verdict.tensors} tensors, "
            f"after each of {verdict.steps} steps"
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
    if verdict.repeatable:
        return [
            *lines,
            f"two runs on {verdict.sizes[0]} worker agree: {where} depends on what the process "
            "computed before.",
            "Look for a generator, a counter or a cache that is carried from batch to batch.",
        ]
    return [
        *lines,
        f"two runs on {verdict.sizes[0]} worker differ too: {where} draws from something that "
        "the job's seed does not set.",
        "Look for a generator of its own without a seed, the time, the order of a set, or a "
        "kernel that adds in any order.",
    ]
