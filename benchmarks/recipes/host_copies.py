"""The GPT of `gpt.py` at any size, in a run that copies its commits into host memory or does not.

Every other `block` steps are without copies, up to step `until`; then all are copied. With
`tried=0` the model is not tried and not compared before the first step, as in a replica that
starts again.
"""

from functools import wraps
from typing import Any

from gpt import recipe as gpt

import instep
from instep.engine.state.host_copy import HostCopy
from instep.engine.trial_result import NOTHING_TO_TRY, Trial
from instep.records import Attempt


def recipe(until: int = 0, block: int = 1, tried: int = 1, **size: int) -> instep.Recipe:
    keep = HostCopy.keep
    if not tried:
        Trial.read = classmethod(lambda *_: NOTHING_TO_TRY)  # type: ignore[assignment, method-assign]

    @wraps(keep)
    def keep_some(self: HostCopy, snapshot: Any, at: Attempt) -> None:
        if at.number > until or at.number // block % 2:
            keep(self, snapshot, at)

    HostCopy.keep = keep_some  # type: ignore[method-assign]
    made: instep.Recipe = gpt(**size)
    return made
