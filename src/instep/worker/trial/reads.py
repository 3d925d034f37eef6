"""Chooses and reads samples for the trial (`sameness.py`), and applies the job to its result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial

from torch import nn

from instep.data.batches import Batches
from instep.data.loader import Loader, Read, Slice
from instep.data.order import Position, key
from instep.data.reading.streams.shares import AnyTurns
from instep.data.reading.told import SET_EPOCH
from instep.engine.passes import OF_PASS, Share
from instep.engine.trial_result import NOTHING_TO_TRY, Trial
from instep.job.spec import JobSpec
from instep.parallel.nested import tensors_in
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.forward import Forward
from instep.system.kernels import per_machine
from instep.usercode.places import places
from instep.worker.trial.again import run_again
from instep.worker.trial.compared.spots import OtherSize, Spot
from instep.worker.trial.model import DERIVES
from instep.worker.trial.places import MOST, Places, SpotPlace
from instep.worker.trial.sameness import (
    combined,
    mean_of,
    try_out,
)
from instep.worker.trial.shapes import Shape, shapes_of
from instep.worker.trial.two_blocks import on_two_blocks

_LOOKED_AT = 512
"""Samples of which the shapes are looked at, where code of the user's makes batches."""

Say = Callable[[int, int], None]
"""Called with how many comparisons are done, and of how many."""

_PARTS = 4
"""Micro-batches of a step that are compared with each other once the model is trained."""


def try_recipe(
    forward: Forward,
    loader: Loader,
    job: JobSpec,
    batches: Batches,
    say: Say = lambda done, of: None,
) -> Trial:
    """Whether cutting a global batch into micro-batches changes the result.

    Args:
        forward: of the worker; its model is left as it is.
        loader: of the training dataset.
        job: decides how batches are cut, and whether passes may be merged.
        batches: what each commit takes.
        say: called with how many comparisons are done, and of how many.

    Raises:
        RecipeError: as `sameness.try_out`.
    """
    trials = {}
    for number, turn in enumerate(forward.recipe.turns):
        forward.take_turn(number)
        trials[turn.name] = _try_loss(forward, loader, job, batches, say)
    trial = combined(trials) if trials else _try_loss(forward, loader, job, batches, say)
    return trial._replace(verdict=_of_reading(loader, forward, job)) if trial.same else trial


def try_step(forward: Forward, loader: Loader, job: JobSpec, where: Position) -> Trial:
    """The same for the micro-batches of one step, near where the model is now.

    Args:
        forward, loader, job: as for `try_recipe`.
        where: the step.
    """
    return _try_place(forward, loader, job, where, Places.step(job.train, where))


def try_trained(
    forward: Forward, loader: Loader, job: JobSpec, where: Position, share: Share
) -> Trial:
    """Try the first micro-batches of a step, with the model as it is now.

    Args:
        forward, loader, job: as for `try_recipe`.
        where: the step.
        share: of the worker, which begins with the step. With `data.parts` two of its micro-batches
            are enough: those of others may lie on another host.
    """
    place = Places.step(job.train, where)
    parts = place.parts[:_PARTS]
    if job.data.parts or forward.recipe.given["train"].streams:
        stop = where.first
        for own in share.passes:
            stop = own.samples.stop if own.samples.first == stop else stop
        parts = (*parts[:2], *(part for part in parts[2:] if part.stop <= stop))
    place = place._replace(parts=parts)
    return _try_place(forward, loader, job, where, place, trained=True)


def _try_place(
    forward: Forward,
    loader: Loader,
    job: JobSpec,
    where: Position,
    place: SpotPlace,
    *,
    trained: bool = False,
) -> Trial:
    if len(place.parts) < 2:
        return NOTHING_TO_TRY
    with closing(loader.read(place.slices)) as reads:
        return try_out(
            forward,
            _spots(reads, [place]),
            whole=where.size,
            seed=key(job.seed, OF_PASS, 0),
            cuts=_cuts(job),
            hooks=False,  # which are those of the engine
            trained=trained,
        )


def shapes_in(loader: Loader, job: JobSpec, where: Position) -> list[tuple[Shape, ...]]:
    """The shapes in each micro-batch of a step."""
    with closing(loader.read(Places.step(job.train, where).parts)) as reads:
        return [shapes_of(read.batch, read.size) for read in reads if read.size]


def try_blocks(
    forward: Forward,
    loader: Loader,
    job: JobSpec,
    batches: Batches,
    fill: Callable[[nn.Module], None],
) -> Trial:
    """The same for a model that one process cannot hold: micro-batches stay apart.

    What the loss of a Hugging Face model is a mean of shows in two of its blocks.

    Args:
        forward, loader, job, batches: as for `try_recipe`.
        fill: as for `two_blocks.on_two_blocks`.
    """
    found = ""
    if forward.recipe.compute_loss is not None and forward.recipe.weight is None:
        processes = per_machine(job.workers, job.launch.count)
        blocks = TwoBlocks(forward.model)
        with suppress(Exception), on_two_blocks(forward, blocks, fill, processes):
            places = Places(job, batches)
            found = _mean_of(forward, loader, places, key(job.seed, OF_PASS, 0))
    why = "the model is too large for one process to try the whole of it"
    return Trial(False, why, f"not shown: {why}", found)


def _try_loss(forward: Forward, loader: Loader, job: JobSpec, batches: Batches, say: Say) -> Trial:
    train, seed = job.train, key(job.seed, OF_PASS, 0)
    places = Places(job, _near(loader, batches))
    compared = places.compared()
    if not compared:
        derived = _mean_of(forward, loader, places, seed)
        with closing(loader.read(places.micro_batches(1)[:1])) as reads:
            batch = next(reads)

        def second() -> Read | None:
            with closing(loader.read(places.micro_batches(2)[:1])) as reads:
                return next(reads)

        trial = run_again(forward, batch, second if places.steps > 1 else lambda: None, seed=seed)
        return trial._replace(derived=derived)
    if forward.recipe.collates:
        compared[1:1] = _with_other_shapes(loader, places)
    with closing(loader.read(compared[0].slices)) as reads:
        first = list(_spots(reads, compared[:1]))
    compared = places.affordable(compared, _effort(forward.model, first))
    with closing(loader.read(part for place in compared[1:] for part in place.slices)) as reads:
        trial = try_out(
            forward,
            itertools.chain(first, _spots(reads, compared[1:])),
            whole=train.global_batch,
            seed=seed,
            cuts=_cuts(job),
            sizes=_sizes(loader, places),
            shares=partial(_shares, loader, places),
            say=lambda done: say(done, len(compared)),
        )
    if train.merge == "always":
        return trial.merged_always()
    if train.merge == "never":
        return trial._replace(merge=False, reason="train.merge = 'never'")
    if train.determinism == "bits":
        reason = "determinism = 'bits' computes each micro-batch apart"
        return trial._replace(merge=False, reason=reason)
    return trial


def _near(loader: Loader, batches: Batches) -> Batches:
    """Leave only the first steps of a stream: what comes later cannot be read before it."""
    if not isinstance(loader.order, AnyTurns):
        return batches
    plan, batch = loader.order.plan, batches.size
    near = max(plan.parts * plan.window // batch, MOST) * batch
    return replace(batches, samples=min(batches.samples, near))


def _of_reading(loader: Loader, forward: Forward, job: JobSpec) -> str:
    """Yes, unless reading depends on what was read before, or on what training does meanwhile."""
    ahead = job.data.loaders != 0 or loader.mode != "inline"  # "auto" chooses by the time it takes
    if ahead and (name := _model_within(forward)):
        return (
            f"not shown: what reads samples uses the model that is trained ({name}), and samples "
            "are read ahead, in loader processes with the model as it was when they began. Let "
            "compute_loss do that, which is given the model and the batch"
        )
    if not (counted := loader.counted()):
        return "yes"
    if counted == SET_EPOCH:
        return (
            "not shown: what set_epoch(epoch) leaves behind depends on the calls before it. A run "
            "that is resumed, and a process that takes another's place, begin with a later epoch, "
            "and a step may be read again. Let all of it follow from the epoch alone"
        )
    return (
        f"not shown: each reading of a sample changes {counted!r}, which is kept in Python: how "
        "often a process reads, and which samples, depends on the number of workers and readers, "
        "and no checkpoint has it. If it only counts for a person to see, leave it out; else let "
        "a sample follow from its index and the epoch (set_epoch)"
    )


def _model_within(forward: Forward) -> str:
    """Name the place of the model, or of a part of it, in dataset, collate or augment."""
    model, given = forward.model, forward.recipe.given["train"]
    parts = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    readers = given.dataset, given.collate, forward.recipe.collate, forward.recipe.augment
    found = places([each for each in readers if each is not None], model.modules())
    return next((place.name for place in found if id(place.get()) in parts), "")


def _effort(model: nn.Module, spots: Iterable[Spot]) -> float:
    """Parameters times numbers in a batch; endless if there is none."""
    numbers = (sum(tensor.numel() for tensor in tensors_in(spot.whole)) for spot in spots)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return max(1, parameters) * next(numbers, math.inf)


def _cuts(job: JobSpec) -> bool:
    return job.train.batch_norm == "global"


def _with_other_shapes(loader: Loader, places: Places) -> list[SpotPlace]:
    """Neighbouring micro-batches whose samples have different shapes, if a look at some of them
    finds any: one of those that are padded."""
    steps = range(1, places.steps + 1, max(1, places.steps // 4))[:4]
    every = [places.micro_batches(step) for step in steps]
    while len(every) > 1 and sum(p.stop - p.first for parts in every for p in parts) > _LOOKED_AT:
        every.pop()
    with closing(loader.read(part for parts in every for part in parts)) as reads:
        for parts in every:
            looked_at = list(itertools.islice(reads, len(parts)))
            shapes = [shapes_of(read.batch, read.size) for read in looked_at]
            for place, (one, other) in enumerate(itertools.pairwise(shapes)):
                if one != other and len(one) == len(other):
                    return [SpotPlace((parts[place], parts[place + 1]))]
    return []


def _shares(loader: Loader, places: Places) -> Spot | None:
    """The first step as three workers have it."""
    if (place := places.shares(1, 3)) is None:
        return None
    with closing(loader.read(place.slices)) as reads:
        return next(_spots(reads, [place]), None)


def _sizes(loader: Loader, places: Places) -> Iterator[OtherSize]:
    """A micro-batch of each size that the job has."""

    def read(part: Slice) -> Read:
        with closing(loader.read([part])) as reads:
            return next(reads)

    for size, part in places.sizes().items():
        yield OtherSize(size, partial(read, part), places.cut_in_words(part))


def _mean_of(forward: Forward, loader: Loader, places: Places, seed: int) -> str:
    """What the loss is a mean of, for a job whose steps have one micro-batch each."""
    if forward.recipe.compute_loss is None or forward.recipe.weight is not None:
        return ""
    steps = min(DERIVES, places.steps)
    reads = loader.read(part for n in range(steps) for part in places.micro_batches(1 + n))
    with closing(reads):
        return mean_of(forward, (each.batch for each in reads if each.size), seed=seed)


def _spots(reads: Iterator[Read], places: Iterable[SpotPlace]) -> Iterator[Spot]:
    """The spots at these places; those are left out of which a part cannot be read."""
    for place in places:
        *apart, whole = itertools.islice(reads, len(place.slices))
        if all(read.size for read in (*apart, whole)):
            sizes = tuple(read.size for read in apart)
            batches = tuple(read.batch for read in apart)
            yield Spot(batches, whole.batch, sizes, place.made_up, place.loss_alone)
