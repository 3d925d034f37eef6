"""Tests before the first step whether cutting the global batch changes the result of training.

One machine would run a global batch as one forward pass; a run cuts it into micro-batches. The
result is the same, to rounding, if the loss is a mean of something known and no part of the model
looks at more than one sample. No list of layers can say what a user's own layer does, so it is
tried on a copy of the model: micro-batches run separately and as one batch must give the same
gradients, and must change buffers alike. The parameters of the copy are moved first, because a
layer that starts at zero hides the layers behind it. The result is a verdict on the run
(`same_as_one_machine`), and whether micro-batches may be merged into larger passes.

Workers and steps are not known here; `reads.py` chooses the batches, `compared/` has what is
compared, and names the layer that is the cause.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

from instep.engine.trial_result import Trial
from instep.recipe.forward import Forward
from instep.recipe.weights import Weighing, is_sum, sum_refused
from instep.usercode.counts import Counts
from instep.worker.trial.compared.findings import REMEDY
from instep.worker.trial.compared.spots import OtherSize, Spot
from instep.worker.trial.comparison import SpotComparison, first_line
from instep.worker.trial.constant_draws import ConstantDraws
from instep.worker.trial.hooked import hooked_parameter, refuse_stepping_hooks
from instep.worker.trial.model import DERIVES, trial_model


def combined(trials: Mapping[str, Trial]) -> Trial:
    """The result of the trials of several turns, by their names: what holds for all of them."""
    merge = all(trial.merge for trial in trials.values())
    name, worst = min(
        trials.items(), key=lambda each: (each[1].same, each[1].verdict.startswith("not shown"))
    )
    reason = next(each.reason for each in trials.values() if each.merge == merge)
    kind, _, why = worst.verdict.partition(": ")
    left = {*itertools.chain.from_iterable(trial.left for trial in trials.values())}
    verdict = f"{kind}: in the turn {name!r}, {why}" if why else kind
    return Trial(merge, reason, verdict, left=[*left])


def try_out(
    forward: Forward,
    spots: Iterable[Spot],
    *,
    whole: int,
    seed: int,
    cuts: bool = False,
    sizes: Iterable[OtherSize] = (),
    say: Callable[[int], None] = lambda done: None,
    hooks: bool = True,
    shares: Callable[[], Spot | None] = lambda: None,
    trained: bool = False,
) -> Trial:
    """Test whether micro-batches give the same result separately as in one batch.

    Args:
        forward: of the worker; its model is left as it is.
        spots: to try, read when they are asked for; none if none can be read.
        whole: samples of a global batch, for messages.
        seed: of the random draws of the passes, and of the new values of parameters.
        cuts: whether a pass over several micro-batches draws for each of them separately.
        sizes: of micro-batches, each of which must be accepted.
        say: called at the start, and after each comparison, with how many are done.
        hooks: whether those on the model's gradients are the user's.
        shares: reads a step as several workers have it; asked with `cuts`.
        trained: whether the parameters stay as they are, and a difference must show in float64.

    Raises:
        RecipeError: the loss is a sum, or cannot be computed of a micro-batch of one of `sizes`; or
            what `Forward.loss` raises.
    """
    weighed = _weighing(forward)
    if hooks and (trial := _of_hooks(forward)):
        return trial
    spots = iter(spots)
    spot = next(spots, None)
    if spot is None:
        return Trial.not_shown("the samples to try it with cannot be read")
    each = forward.numbers_of_one(spot.whole, sum(spot.sizes))
    forward.derive("", each)
    with ExitStack() as stack:
        try:
            model = stack.enter_context(trial_model(forward, seed))
        except Exception as error:  # a user's module may raise anything
            return _not_copied(error)._replace(each=each)
        tried = SpotComparison(
            model, forward, weighed, whole, seed=seed, cuts=cuts, sizes=sizes, trained=trained
        )
        counts = Counts((forward.model, *forward.tried, forward.recipe.weight))
        try:
            trial = tried.verdict(itertools.chain([spot], spots), say, shares)._replace(each=each)
        finally:
            reached = model.reached()
            counts.put_back()
    if not reached:
        tried.refuse_idle()
    if reached and trial.same:
        return not_an_argument(weighed.name)._replace(derived=trial.derived, each=each)
    return trial


def _weighing(forward: Forward) -> Weighing:
    """How batches are weighed; a loss that is a sum is refused."""
    weighed = forward.weighing
    if forward.recipe.embed is not None:  # what is tried is a mean over embeddings
        weighed = Weighing(None, True, "Recipe.embed")
    if is_sum(forward.recipe.loss):
        raise sum_refused(f"{weighed.name} has reduction = 'sum'")
    return weighed


def _not_copied(error: Exception) -> Trial:
    return Trial.not_shown(f"the model cannot be copied to try it ({first_line(error)})")


def _of_hooks(forward: Forward) -> Trial | None:
    """The result for a model with hooks on its gradients, which need no trial."""
    if not (hooked := hooked_parameter(forward.model)):
        return None
    refuse_stepping_hooks(forward.model)
    why = (
        f"a hook on the gradient of {hooked!r} is called once for each micro-batch; one "
        "machine would call it once in a step"
    )
    return Trial(False, why, f"no: {why}. {REMEDY}")


def not_an_argument(name: str) -> Trial:
    """Return the result for a loss that has reached the model itself in the passes of a copy."""
    return Trial.not_shown(
        f"{name} uses a model that it was not given as an argument (a closure does), and only its "
        "arguments can be tried. Use compute_loss(model, batch), and only that model in it"
    )


def mean_of(forward: Forward, batches: Iterable[Any], *, seed: int) -> str:
    """What the loss of a Hugging Face model is a mean of, if there is nothing to compare.

    Args:
        forward: of the worker; its model is left as it is.
        batches: read when they are asked for.
        seed: of the random draws of the passes.

    Returns:
        A name of `weights.DERIVED`; empty if it is not found.
    """
    with ExitStack() as stack:
        try:
            model = stack.enter_context(trial_model(forward, seed))
        except Exception:  # a user's module may raise anything
            return ""
        model.draws = ConstantDraws
        return model.mean_of(itertools.islice(batches, DERIVES))
