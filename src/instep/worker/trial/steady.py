"""Finds the blocks of a model that every sample goes through, however it is routed.

Ranks that share parameters gather them block by block, together. A block that only some samples
use, such as an expert or the head of one task, would be gathered on one rank and not on another.
So blocks are watched while samples pass one at a time, each with draws of its own.

How blocks are found, and what is done with them, is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

from instep.data.loader import Loader, Slice
from instep.data.order import key
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward
from instep.worker.trial.model import trial_model

_TRIED = 32
"""Samples that pass alone."""


def single_samples(loader: Loader, samples: int) -> Iterator[Any]:
    """Batches of one sample each, the first of the first epoch; those that cannot be read are not
    among them.

    Args:
        loader: of the training dataset.
        samples: length of the dataset.
    """
    slices = (Slice(0, at, at + 1) for at in range(min(_TRIED, samples)))
    with closing(loader.read(slices)) as reads:
        yield from (read.batch for read in reads if read.size)


def steady_blocks(
    forward: Forward, batches: Iterable[Any], names: Sequence[str], *, seed: int
) -> list[str]:
    """Those of `names` that run equally often, and in one order, whatever the samples are.

    Args:
        forward: of the worker; its model is left as it is.
        batches: of one sample each; of more, a block that only some of them use may stay unseen.
        names: of modules of the model.
        seed: of the random draws.

    Returns:
        In the order of `names`; all of them if the model cannot be copied, or runs no such batch.
    """
    runs: list[list[str]] = []
    with ExitStack() as stack:
        try:
            copy = stack.enter_context(trial_model(forward, seed)).model
        except Exception:  # a user's module may raise anything
            return list(names)
        ran: list[str] = []
        for name in names:
            hook = copy.get_submodule(name).register_forward_pre_hook(
                lambda module, given, name=name: ran.append(name)
            )
            stack.callback(hook.remove)
        for number, batch in enumerate(batches):
            ran.clear()
            set_generators(key(seed, number))
            try:
                forward.loss(batch, 1)
            except Exception:  # a layer may refuse one sample, as batch normalisation does
                continue
            runs.append(list(ran))
    left_out = _unsteady(runs)
    return [name for name in names if name not in left_out]


def _unsteady(runs: Sequence[Sequence[str]]) -> set[str]:
    """Blocks to leave out, so that all runs use the others alike."""
    left_out: set[str] = set()
    for run in runs:
        left_out |= {name for name in {*run, *runs[0]} if run.count(name) != runs[0].count(name)}
    orders = {tuple(name for name in run if name not in left_out) for run in runs}
    if len(orders) > 1:
        for places in zip(*orders, strict=True):
            left_out |= set(places) if len(set(places)) > 1 else set()
    return left_out
