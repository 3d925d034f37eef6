"""A fragment that agrees in another thread, while participants take their steps."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import NamedTuple

from torch import Tensor

from instep.sync.rounds.fragment_sum import Agreed


class LateFragment(NamedTuple):
    """A fragment is under way."""

    fragment: int
    shared: Tensor
    """Its shared values."""
    agreed: Future[Agreed]


def in_thread(compute: Callable[[], Agreed]) -> Future[Agreed]:
    """Have another thread compute it."""
    future = Future[Agreed]()

    def run() -> None:
        try:
            future.set_result(compute())
        except BaseException as error:  # of the thread that waits for it
            future.set_exception(error)

    Thread(target=run, name="streaming", daemon=True).start()
    return future
