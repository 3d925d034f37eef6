"""A copy of a model with two blocks of each list, where the whole is too large to be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from instep.parallel.meta_start import give_memory
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.forward import Forward
from instep.worker.trial.model import Copied


@contextmanager
def on_two_blocks(
    forward: Forward, blocks: TwoBlocks, fill: Callable[[nn.Module], None]
) -> Iterator[None]:
    """In this context compute with such a copy, whose parameters have their values.

    Args:
        forward: its model may be on the meta device, and is left as it is.
        blocks: of the model.
        fill: gives a model that is on the meta device the values of the job's file; where a
            checkpoint is to have them, nothing, and they are 0.

    Raises:
        Exception: of whatever kind, the model cannot be copied.
    """
    with blocks.alone():
        copied = Copied(forward.model, forward.losses).again(by_batch=True)
    if any(parameter.is_meta for parameter in copied.model.parameters()):
        give_memory(copied.model, forward.device)
        fill(copied.model)
    with forward.on(copied.model, forward.precision, copied.losses):
        yield
