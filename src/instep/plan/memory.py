"""Memory of a way beside what the crew shows that stands for it. Way in: `worker_bytes`."""

from __future__ import annotations

from instep.plan.measured import CrewFigures

SLOTS = 2
"""Copies of the residuals: as committed, and as the step under way leaves them."""

_CARRY_NOTHING = ("none", "nonzero")
"""Codecs that drop nothing."""


def worker_bytes(codec: str, shown: CrewFigures, trained_bytes: int) -> int:
    """Resident memory of a worker; 0 where it is not known.

    Args:
        codec: of the way.
        shown: the crew that took steps of it, or of one without a codec.
        trained_bytes: of the parameters; a codec carries over as many.
    """
    if not shown.worker_bytes or codec in (*_CARRY_NOTHING, shown.codec):
        return shown.worker_bytes
    return shown.worker_bytes + SLOTS * trained_bytes
