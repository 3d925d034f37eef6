"""Keeps a server: a fork of a process that has imported what it needs, and another if it is killed.

Another interpreter would need a second before it serves, and many on a busy machine; a fork needs
some milliseconds. The socket is the same one, so that connections wait meanwhile, and so are the
newest token and the secret: who was logged in stays so, and a link that was told stays good.

It knows nothing of what is served. Way in: `keep`.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import traceback
from collections.abc import Callable
from typing import BinaryIO, NoReturn

Tell = Callable[[str], object]
Serve = Callable[[str, Tell], object]
"""Serves until it is interrupted: given the token that counts, and whom to tell of each new one."""

_MOST_OF_A_TOKEN = 64
_SOON_S, _LEAST_PAUSE_S, _MOST_PAUSE_S = 0.2, 0.1, 5.0
"""A server that lived for less than the first is followed by another after a pause that grows."""


class SharedToken:
    """The newest token, in memory that forks share.

    Args:
        token: the first one, ASCII.
    """

    def __init__(self, token: str) -> None:
        self._memory = mmap.mmap(-1, _MOST_OF_A_TOKEN)
        self.set(token)

    def set(self, token: str) -> None:
        """Write it."""
        self._memory[:] = token.encode().ljust(_MOST_OF_A_TOKEN, b"\0")

    def get(self) -> str:
        """Read it."""
        return self._memory[:].rstrip(b"\0").decode()


def keep(serve: Serve, token: str, beside: Callable[[], object] = lambda: None) -> int:
    """Serve in a fork of this process, which has one thread, until that ends or Ctrl-C comes.

    Args:
        serve: in the fork.
        token: the first one, of at most 64 ASCII characters.
        beside: called in a thread of each fork.

    Returns:
        Its exit code.
    """
    known, pause_s = SharedToken(token), _LEAST_PAUSE_S
    reading, writing = os.pipe()  # no fork outlives this process: then nobody can write any more
    gc.freeze()
    with open(writing, "wb", buffering=0) as lifeline:
        while True:
            begun = time.monotonic()
            pid = os.fork()
            if not pid:
                lifeline.close()
                _serve_and_end(serve, known, [lambda: _die_with(reading), beside])
            status = _end_of(pid, lifeline)
            if lifeline.closed or not os.WIFSIGNALED(status):
                os.close(reading)
                return max(os.waitstatus_to_exitcode(status), 0)
            if time.monotonic() - begun > _SOON_S:
                pause_s = _LEAST_PAUSE_S
                continue
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)


def _serve_and_end(
    serve: Serve, known: SharedToken, others: list[Callable[[], object]]
) -> NoReturn:
    code = 1
    try:
        for each in others:
            threading.Thread(target=each, daemon=True).start()
        serve(known.get(), known.set)
        code = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)  # nothing is written that could be cut short


def _die_with(descriptor: int) -> None:
    os.read(descriptor, 1)
    os._exit(0)


def _end_of(pid: int, lifeline: BinaryIO) -> int:
    """Wait for a fork; after Ctrl-C it ends at once."""
    while True:
        try:
            return os.waitpid(pid, 0)[1]
        except KeyboardInterrupt:
            lifeline.close()
