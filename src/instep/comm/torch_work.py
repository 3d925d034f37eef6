"""Operations of torch that are under way."""

from __future__ import annotations

import errno
import os
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Work
from instep.errors import PeerError

LOOK = timedelta(seconds=0.1)
"""How often a waiting thread checks whether the group was interrupted."""

INTERRUPTED = "the exchange was interrupted: the members change."
"""Why a wait has ended before its time."""

_MINE = (
    *(os.strerror(number) for number in (errno.ENOMEM, errno.EMFILE, errno.ENFILE)),
    "can't start new thread",
    "can't allocate memory",
    "bad_alloc",
)
"""Messages of the system when a process gets no more memory, threads or files."""


class TorchWork:
    """A collective that runs in gloo's or NCCL's own threads.

    Args:
        work: torch's.
        is_interrupted: whether the group was interrupted; None if `wait` does not ask.
        timeout: how long `wait` waits where it does not ask. Without one, gloo would wait for a
            message as long as ranks may take to connect.
    """

    def __init__(
        self,
        work: Any,
        is_interrupted: Callable[[], bool] | None,
        timeout: timedelta | None = None,
    ) -> None:
        self._work, self._is_interrupted = work, is_interrupted
        self._timeout = (timeout,) if timeout is not None else ()

    def wait(self) -> None:
        """Return when the result is here (on CUDA: ordered before what this stream does next)."""
        try:
            if self._is_interrupted is None:
                self._work.wait(*self._timeout)
                return
            while not self._ends_soon():
                if self._is_interrupted():
                    raise PeerError(INTERRUPTED)
        except RuntimeError as error:
            raise broken(error) from error

    def _ends_soon(self) -> bool:
        try:
            self._work.wait(LOOK)
        except RuntimeError:
            if not self._work.is_completed():
                return False
            self._work.wait()  # it has ended; this raises its error, if any
        return True


class MessageWork:
    """A message between two ranks, which runs in gloo's own threads.

    A separate thread waits for it as long as it takes: after a timeout gloo would abandon the whole
    group (torch 2.13, `unbound_buffer.cc`).

    Args:
        whole: waits for it as long as it takes.
        waiter: has that thread.
        is_interrupted: whether the group was interrupted.
    """

    def __init__(
        self, whole: TorchWork, waiter: Waiter, is_interrupted: Callable[[], bool]
    ) -> None:
        self._whole, self._waiter, self._is_interrupted = whole, waiter, is_interrupted
        self._ended: threading.Event | None = None
        self._error: PeerError | None = None

    def _wait(self) -> None:
        try:
            self._whole.wait()
        except PeerError as error:
            self._error = error

    def wait(self) -> None:
        """Return when the message is here, or has left."""
        if self._ended is None:
            self._ended = self._waiter.begin(self._wait)
        while not self._ended.wait(LOOK.total_seconds()):
            if self._is_interrupted():
                raise PeerError(INTERRUPTED)
        if self._error is not None:
            raise self._error


class Waiter:
    """A thread that waits for one message after the other: to start one for each takes five times
    the processor time. If it is busy when another thread wants to wait too, that gets its own."""

    def __init__(self) -> None:
        self._jobs = queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None]()
        self._free = threading.Lock()
        self._started = False

    def begin(self, wait: Callable[[], None]) -> threading.Event:
        """Call it in a thread; the event is set once it has returned."""
        ended = threading.Event()

        def alone() -> None:
            wait()
            ended.set()

        if not self._free.acquire(blocking=False):
            self._start(alone)
            return ended
        if not self._started:
            self._started = True
            self._start(self._run)
        self._jobs.put((wait, ended))
        return ended

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            wait, ended = job
            wait()
            self._free.release()  # before who waits can want it for the next
            ended.set()
            del job, wait, ended  # a message that is held keeps gloo's connections open

    @staticmethod
    def _start(run: Callable[[], object]) -> None:
        threading.Thread(target=run, name="instep waits for a message", daemon=True).start()

    def close(self) -> None:
        """The thread ends, once it waits for nothing."""
        self._jobs.put(None)


class SumWork:
    """Parts that this rank receives, and sums in `wait`.

    Args:
        work: receives the parts.
        out: [n], gets the sum.
        parts: [size, n], in rank order.
    """

    def __init__(self, work: Work, out: Tensor, parts: Tensor) -> None:
        self._work, self._out = work, out
        self._parts: Tensor | None = parts

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the sum is here."""
        self._work.wait()
        if self._parts is not None:
            in_rank_order(self._parts, self._out)
            self._parts = None


def in_rank_order(parts: Sequence[Tensor] | Tensor, out: Tensor | None = None) -> Tensor:
    """The sum [n] of [ranks, n], each rank's part added to those before it: the same bits."""
    total = parts[0].clone() if out is None else out.copy_(parts[0])
    for part in parts[1:]:
        total += part
    return total


def broken(error: RuntimeError) -> PeerError:
    """What a collective's error means: another process ended, or this one lacks resources."""
    if is_mine(error):
        return PeerError(f"a collective failed in this process ({error}).", mine=True)
    return PeerError(f"another worker went away in the middle of a collective ({error}).")


def is_mine(error: RuntimeError) -> bool:
    """Whether the cause is a lack of resources in this process, and not a connection."""
    # from a thread; gloo's own messages contain a file and line
    bare = str(error) == os.strerror(errno.EAGAIN)
    return bare or any(part in str(error) for part in _MINE)
