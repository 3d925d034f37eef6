"""Values that the first pass sets in Python, and later passes leave as they are.

A scale from the first loss, the mean of the first inputs: a worker's first batch is a micro-batch,
another one than one machine's, and a resumed run has another first batch. Or the parameters as they
were at the start, of which a penalty takes the distance: a resumed run begins with other ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from instep.usercode.counts import Counts
from instep.usercode.numbers import alike

REMEDY = (
    "If it only counts for a person to see, leave it out; else keep it in a buffer of the model"
)


BY_PARAMETERS = (
    "which is kept in Python: no checkpoint has it, so a resumed run, and a worker that takes "
    "another's place or joins, would set it by later ones. Keep it in a buffer of the model, or "
    "set it in the recipe's function"
)


def another_result(
    *,
    later: bool,
    who: str = "the model or its loss",
    kept: str = "it counts calls in Python, "
    "has a list or a value that each call changes, or draws from a generator of its own",
) -> str:
    """Say that a pass depends on earlier ones.

    Args:
        later: whether on those with other batches; else on one with the same.
        who: gives another result.
        kept: from call to call, where the batch was the same.
    """
    when = "when the same batch is run again"
    if later:
        when = "for a batch after another one than at first"
        kept = "what the first batch sets, the largest value so far"
    return f"{who} gives another result {when}, as it keeps something from call to call ({kept})"


def in_words(counted: str, first: str) -> str:
    """Say what passes change, or what the first one has set by its batch; empty if nothing."""
    if counted:
        return f"each pass changes {counted!r}, which is kept in Python"
    return first and f"the first pass sets {first!r} by its batch, which is kept in Python"


def in_state_dict(model: nn.Module) -> set[str]:
    """Names of parameters and buffers, which checkpoints have."""
    return {name for each in (model.named_parameters(), model.named_buffers()) for name, _ in each}


def by_parameters(name: str) -> str:
    """Say that the first pass sets something by the parameters that it finds."""
    return f"the first pass sets {name!r} by the parameters as they are then, {BY_PARAMETERS}"


def set_by_first(
    found: Mapping[str, Any],
    anew: Counts,
    other_batch: Callable[[], object],
    same_batch: Callable[[], object],
) -> str:
    """Find what only the first pass sets, if it depends on the batch: its name, or empty.

    Args:
        found: what the first pass has set, as `Counts.first_set`.
        anew: of what another copy of model and loss keeps, which has run no pass.
        other_batch: runs a pass of that copy with another batch; or with other parameters.
        same_batch: runs one as the first pass was.
    """
    try:
        other_batch()
        from_other = anew.first_set()
        same_batch()
    except Exception:  # of the user's code, which the trial calls too
        return ""
    left = anew.first_set()
    for name in found:
        if name not in from_other or name not in left:
            continue
        one, other = found[name], from_other[name]
        sized = getattr(one, "shape", ()) != getattr(other, "shape", ())  # a table that grows
        if not sized and alike(left[name], other) and not alike(one, other):
            return name
    return ""
