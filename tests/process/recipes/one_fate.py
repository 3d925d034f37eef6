"""As on GPUs, where no worker comes back from an exchange that another one has left."""

from typing import Any

from slow_tiny import recipe as slow_tiny

import instep
from instep.engine.member import Member

wait_for_group = Member.wait_for_group


def as_on_gpus(self: Member) -> Any:
    self.together = True
    return wait_for_group(self)


def recipe(pause_s: float = 0.0) -> instep.Recipe:
    Member.wait_for_group = as_on_gpus  # type: ignore[method-assign]
    return slow_tiny(pause_s)
