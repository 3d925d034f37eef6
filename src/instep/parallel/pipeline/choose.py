"""Chooses where a chain of blocks is cut into stages: as the user says, or by measuring.

The best cuts come first; those that a trial refuses are left out, and the next best are tried.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from instep.errors import RecipeError, SpecError
from instep.parallel.pipeline.blocks import Call
from instep.parallel.pipeline.crossing import Boundary
from instep.parallel.pipeline.cuts import best_cuts
from instep.parallel.pipeline.measure import measure
from instep.parallel.pipeline.stages import Runner
from instep.parallel.pipeline.trial import StageTrial
from instep.words import plural

CHUNKS = 2
"""Stages of each rank in the interleaved schedule, unless cuts say otherwise."""


class Cuts(NamedTuple):
    """Where a chain is cut."""

    first: list[int]
    """Of each stage, the number of its first block."""
    boundaries: list[Boundary]
    """What crosses each cut."""


def stages_of(schedule: str, ranks: int, cuts: Sequence[str]) -> int:
    """How many stages a pipeline has.

    Raises:
        SpecError: the numbers of cuts and ranks do not fit.
    """
    if not cuts:
        return ranks * (CHUNKS if schedule == "interleaved" else 1)
    chunks, rest = divmod(len(cuts) + 1, ranks)
    if rest or (chunks > 1 and schedule != "interleaved"):
        wanted = f"{ranks - 1}" if schedule != "interleaved" else f"{ranks} x n - 1"
        raise SpecError(
            f"mesh.cuts has {plural(len(cuts), 'name')}, but mesh.stages = {ranks} with schedule = "
            f"{schedule!r} wants {wanted}: the modules that begin a stage, without the first stage."
        )
    return chunks * ranks


def choose(
    model: nn.Module,
    runner: Runner,
    call: Call,
    batch: Any,
    samples: int,
    *,
    ranks: int,
    stages: int,
    cuts: Sequence[str] = (),
    timed: bool = True,
    others: Iterable[tuple[Any, int]] = (),
) -> Cuts:
    """The cuts of a model into stages.

    Args:
        model: whole.
        runner: of it.
        call: the pass of the whole model.
        batch: a part, as large as those that the pipeline will run.
        samples: in it.
        ranks: processes that share the stages, for messages.
        stages: how many there are.
        cuts: names of the modules that begin a stage, in order; empty: measured.
        timed: False: cut into equal numbers of blocks.
        others: more parts with their samples, on which the cuts have to be possible too: a model
            may take other ways for other samples.

    Raises:
        RecipeError: the model cannot be cut so.
        SpecError: the cuts are in another order than the blocks, or not each after the first.
    """
    names = list(runner.chain.blocks)
    if stages == 1:
        return Cuts([0], [])
    parts = [(batch, samples), *others]
    trial, *trials = [StageTrial(model, runner, partial(call, *part)) for part in parts]
    if cuts:
        places = _places(names, cuts)
        if (idle := _idle(model, runner, [0, *places], ranks)) is not None:
            raise _nothing_to_train(idle, ranks, cuts)
        return Cuts([0, *places], _tried(trial, trials, places))
    even = [1.0] * len(names)
    times = measure(model, runner.chain, call, batch, samples) if timed else even
    banned: set[int] = set()
    refusal: RecipeError | None = None
    while (chosen := best_cuts(times, stages, banned)) is not None:
        if (idle := _idle(model, runner, [0, *chosen], ranks)) is not None:
            banned.add(chosen[max(idle - 1, 0)])
            refusal = refusal or _nothing_to_train(idle, ranks, [names[cut] for cut in chosen])
            continue
        try:
            return Cuts([0, *chosen], _tried(trial, trials, chosen))
        except RecipeError as error:
            banned.add(_culprit(trial, chosen))
            refusal = refusal or error
    raise refusal or RecipeError(
        f"mesh.stages = {ranks} needs {stages} stages, and the model has "
        f"{plural(len(names), 'block')}: {', '.join(names[:6])}{', ...' if len(names) > 6 else ''}."
    )


def _places(names: list[str], cuts: Sequence[str]) -> list[int]:
    """The numbers of the blocks that begin a stage, without the first."""
    if len(set(cuts)) < len(cuts):
        raise SpecError(f"mesh.cuts = {list(cuts)}: each module may be named once.")
    places = [names.index(name) for name in cuts]
    if 0 in places:
        raise SpecError(
            f"mesh.cuts = {list(cuts)}: {names[0]!r} is the first block, and belongs to the "
            "first stage with what comes before it. Name only modules that are called later."
        )
    if places != sorted(places):
        raise SpecError(f"mesh.cuts = {list(cuts)}: the blocks are called in another order.")
    return places


def _idle(model: nn.Module, runner: Runner, first: Sequence[int], ranks: int) -> int | None:
    """A rank whose stages have only frozen parameters, if there is one."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    stages = [runner.names(*ends) for ends in pairwise([*first, len(runner.chain.blocks)])]
    for rank in range(ranks):
        if trained.isdisjoint(set().union(*stages[rank::ranks])):
            return rank
    return None


def _nothing_to_train(rank: int, ranks: int, cuts: Iterable[str]) -> RecipeError:
    return RecipeError(
        f"mesh.stages: stage {rank} of {ranks} has nothing to train, as all its parameters are "
        f"frozen. Cut elsewhere than in front of {', '.join(map(repr, cuts))} (mesh.cuts), or "
        "leave mesh.stages out."
    )


def _tried(trial: StageTrial, others: Iterable[StageTrial], cuts: Sequence[int]) -> list[Boundary]:
    """What crosses the cuts; RecipeError if they are impossible on one of the parts."""
    boundaries = trial.run(cuts)
    for other in others:
        if other.run(cuts) != boundaries:
            raise RecipeError(
                "mesh.stages cannot cut this model: what one block is called with is not the same "
                "for all samples, and stages exchange the same tensors each time. Cut it elsewhere "
                "(mesh.cuts), or leave mesh.stages out."
            )
    return boundaries


def _culprit(trial: StageTrial, cuts: Sequence[int]) -> int:
    """The first of these cuts that is impossible by itself, or simply the first."""
    for place in cuts:
        try:
            trial.run([place])
        except RecipeError:
            return place
    return cuts[0]
