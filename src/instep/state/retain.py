"""Which checkpoints to delete: a pure choice over step numbers.

It knows no files. `save.py` asks it each time a checkpoint has been published.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable


def to_delete(
    steps: Iterable[int],
    *,
    current: int,
    keep_last: int,
    keep_every: int = 0,
    keep_best: Collection[int] = (),
) -> list[int]:
    """The steps whose checkpoints may go, now that the one of `current` is whole.

    A step beyond `current` belongs to a course that the run has left: it went
    back to an earlier checkpoint. It goes, or it would pass for the newest.

    Args:
        steps: what is on disk, in any order.
        current: the step just published; never deleted.
        keep_last: how many of the newest to keep, `current` among them; at least 1.
        keep_every: above 0, multiples of it are kept for good.
        keep_best: steps that are kept for good, such as those with the best metric.

    Returns:
        Ascending steps.
    """
    assert keep_last >= 1
    known = set(steps)
    kept = set(sorted(step for step in known | {current} if step <= current)[-keep_last:])
    kept.update(step for step in keep_best if step <= current)
    if keep_every:
        kept.update(step for step in known if step <= current and step % keep_every == 0)
    return sorted(known - kept)
