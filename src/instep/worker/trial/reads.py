"""Chooses and reads samples for the trial (`sameness.py`), and applies the job to its result."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from torch import nn

from instep.data.loader import Loader, Read, Slice
from instep.data.order import key, position, steps_in_epoch
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.forward import Forward
from instep.spec import JobSpec
from instep.system.kernels import per_machine
from instep.worker.step.passes import OF_PASS, parts_of, share_of
from instep.worker.trial.sameness import (
    LEAST,
    NOTHING_TO_TRY,
    Spot,
    combined,
    mean_of,
    try_out,
)
from instep.worker.trial.two_blocks import on_two_blocks
from instep.worker.trial_result import Trial

_SPOTS = 32
"""Places in an epoch from which spots are taken."""


def try_recipe(forward: Forward, loader: Loader, job: JobSpec, samples: int) -> Trial:
    """Whether cutting a global batch into micro-batches changes the result.

    Args:
        forward: of the worker; its model is left as it is.
        loader: of the training dataset.
        job: decides how batches are cut, and whether passes may be merged.
        samples: length of the dataset.

    Raises:
        RecipeError: as `sameness.try_out`.
    """
    trials = {}
    for number, turn in enumerate(forward.recipe.turns):
        forward.take_turn(number)
        trials[turn.name] = _try_loss(forward, loader, job, samples)
    return combined(trials) if trials else _try_loss(forward, loader, job, samples)


def try_blocks(
    forward: Forward,
    loader: Loader,
    job: JobSpec,
    samples: int,
    fill: Callable[[nn.Module], None],
) -> Trial:
    """The same for a model that one process cannot hold: micro-batches stay apart.

    What the loss of a Hugging Face model is a mean of shows in two of its blocks.

    Args:
        forward, loader, job, samples: as for `try_recipe`.
        fill: as for `two_blocks.on_two_blocks`.
    """
    found = ""
    if forward.recipe.compute_loss is not None and forward.recipe.weight is None:
        processes = per_machine(job.workers, job.launch.count)
        blocks = TwoBlocks(forward.model)
        with suppress(Exception), on_two_blocks(forward, blocks, fill, processes):
            places = _Places(job, samples)
            found = _mean_of(forward, loader, places, key(job.seed, OF_PASS, 0))
    why = "the model is too large for one process to try the whole of it"
    return Trial(False, why, f"not shown: {why}", found)


def _try_loss(forward: Forward, loader: Loader, job: JobSpec, samples: int) -> Trial:
    train, seed = job.train, key(job.seed, OF_PASS, 0)
    places = _Places(job, samples)
    slices = places.spots()
    if not slices:
        return NOTHING_TO_TRY._replace(derived=_mean_of(forward, loader, places, seed))
    reads = loader.read(part for spot in slices for part in spot)
    spots = (spot for parts in slices if (spot := _spot(reads, len(parts) - 1)))
    with closing(reads):
        cuts = train.batch_norm == "global"
        trial = try_out(forward, spots, whole=train.global_batch, seed=seed, cuts=cuts)
    if train.merge == "always":
        return trial.merged_always()
    if train.merge == "never":
        return trial._replace(merge=False, reason="train.merge = 'never'")
    if train.determinism == "bits":
        reason = "determinism = 'bits' computes each micro-batch apart"
        return trial._replace(merge=False, reason=reason)
    return trial


def _mean_of(forward: Forward, loader: Loader, places: _Places, seed: int) -> str:
    """What the loss is a mean of, for a job whose steps have one micro-batch each."""
    if forward.recipe.compute_loss is None or forward.recipe.weight is not None:
        return ""
    steps = min(LEAST, places.steps)
    reads = loader.read(part for n in range(steps) for part in places.micro_batches(1 + n))
    with closing(reads):
        return mean_of(forward, (each.batch for each in reads if each.size), seed=seed)


def _spot(reads: Iterator[Read], parts: int) -> Spot | None:
    """The next spot; None if all samples of one of its parts cannot be read."""
    *apart, whole = itertools.islice(reads, parts + 1)
    if not all(read.size for read in (*apart, whole)):
        return None
    return Spot(tuple(r.batch for r in apart), whole.batch, tuple(r.size for r in apart))


class _Places:
    def __init__(self, job: JobSpec, samples: int) -> None:
        self._train, self._samples = job.train, samples
        self.steps = steps_in_epoch(samples, job.train.global_batch)

    def spots(self) -> list[tuple[Slice, ...]]:
        """Neighbouring micro-batches, and their union, from all over an epoch.

        They are pairs, and every other pair is uneven: a weight that ignores the number of
        samples, such as the `len` of a tuple, is right for micro-batches of equal size. Small
        models are also tried with all micro-batches of a step: a loss that compares samples may
        do so only if there are many.
        """
        spots: dict[Slice, tuple[Slice, ...]] = {}
        for number in range(_SPOTS):
            parts = self.micro_batches(1 + number * self.steps // _SPOTS)
            if len(parts) > 1:  # another pair in each step
                place = 2 * number % (len(parts) - 1)
                first, second, *more = parts[place : place + 3]
                if number % 2 and second.stop - second.first > 2:  # layers may refuse one sample
                    second = second._replace(stop=second.stop - 1)
                elif number % 2 and more:
                    second = second._replace(stop=more[0].stop)
                spots[first] = first, second, first._replace(stop=second.stop)
        few = list(spots.values())
        if len(few) > LEAST:
            every = self.micro_batches(1)
            few.insert(LEAST, (*every, every[0]._replace(stop=every[-1].stop)))
        return few

    def micro_batches(self, step: int) -> list[Slice]:
        """The micro-batches of a step, in order."""
        where = position(step, self._samples, self._train.global_batch)
        every = share_of(where, parts_of(where, self._train), 1, 0, merge=False)
        return [part.samples for part in every.passes]
