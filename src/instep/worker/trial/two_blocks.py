"""A copy of a model with two blocks of each list, where the whole is too large to be copied."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from instep.parallel.meta_start import give_memory
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.forward import Forward
from instep.recipe.large import size_of
from instep.system.memory import room
from instep.units import readable_bytes
from instep.worker.trial.model import Copied

COPIES = 6
"""How often its parameters' bytes a copy takes while its gradients are computed and kept."""


@contextmanager
def on_two_blocks(
    forward: Forward, blocks: TwoBlocks, fill: Callable[[nn.Module], None], processes: int = 1
) -> Iterator[None]:
    """In this context compute with such a copy, whose parameters have their values.

    Args:
        forward: its model may be on the meta device, and is left as it is.
        blocks: of the model.
        fill: gives a model that is on the meta device the values of the job's file; where a
            checkpoint is to have them, nothing, and they are 0.
        processes: how many do the same on this machine.

    Raises:
        Exception: of whatever kind, the model cannot be copied.
    """
    with blocks.alone():
        needs, left = COPIES * size_of(forward.model), room(processes)
        if needs > left:
            raise MemoryError(
                f"two blocks and what is outside of them need {readable_bytes(needs)} to be tried, "
                f"and this process may take {readable_bytes(left)}"
            )
        copied = Copied(forward.model, forward.losses).again(by_batch=True)
    if any(parameter.is_meta for parameter in copied.model.parameters()):
        give_memory(copied.model, forward.device)
        fill(copied.model)
    with forward.on(copied.model, forward.precision, copied.losses):
        yield
