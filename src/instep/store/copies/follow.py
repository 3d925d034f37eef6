"""A process beside a run that copies its checkpoints, as they come, to `checkpoint.copy_to`.

It reads only what lies in the run's folder, so no step waits for it. While one checkpoint is being
copied the newest waits, and those between the two are left out, unless they are kept for good.
What fails is tried again, with pauses that grow. The client starts it (`client/copying.py`), reads
its notes (lines of JSON: `name`, `fields`), and ends its standard input when the run is over: then
the newest checkpoint is copied to its end, for as long as something moves.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any

from instep.errors import CheckpointError, one_line
from instep.job import file as spec_file
from instep.store.copies.layout import base_of
from instep.store.copies.upload import Copies
from instep.words import shown_url

LOOK_S = 0.5
"""Seconds between two looks at the checkpoints."""

LONGEST_PAUSE_S = 60.0
"""Before an attempt; the first pause is `LOOK_S`, and each is twice the one before."""

END_S = 60.0
"""After the run, copying ends when nothing was copied for so long."""

Tell = Callable[..., None]
"""Takes the name of an event, and its fields; `failed` and `finished` are no events."""


class CopyFollower:
    """Copies what is new, and says when that fails and works again.

    Args:
        copies: of the run.
        url: for messages.
        tell: gets the notes.
        now: a clock that never goes back, in seconds.
    """

    def __init__(
        self, copies: Copies, url: str, tell: Tell, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._copies, self._url, self._tell, self._now = copies, shown_url(url), tell, now
        self._failing: float | None = None  # since when
        self._why = ""
        self.pause_s = LOOK_S
        """Seconds until the next look."""

    @property
    def failing(self) -> bool:
        """Whether the last attempt has failed."""
        return self._failing is not None

    def look(self) -> None:
        """Copy what is new; never raises what the file system does."""
        try:
            self._copies.look()
            while (checkpoint := self._copies.missing()) is not None:
                began = self._now()
                copied = self._copies.copy(checkpoint)
                self._works()
                if copied is None:
                    break  # there is another one at the next look
                step, size = copied
                fields = {"step": step, "url": self._url, "size_bytes": size}
                self._tell("checkpoint_copied", **fields, seconds=self._now() - began)
                self._copies.remove_old()
            self._copies.remove_old()
            self._works()
        except CheckpointError as error:
            self._tell("warning", text=str(error))
        except Exception as error:  # of whatever kind the file system has
            self._fails(error)

    def _works(self) -> None:
        if self._failing is not None:
            self._tell("copies_resumed", url=self._url, seconds=self._now() - self._failing)
        self._failing, self.pause_s = None, LOOK_S

    def _fails(self, error: Exception) -> None:
        self._why = one_line(error.__cause__ or error) or type(error).__name__
        if self._failing is None:
            traceback.print_exception(error)
            self._failing = self._now()
            self._tell(
                "warning",
                text=f"checkpoints cannot be copied to {self._url}: {self._why}. Training goes "
                "on, and it is tried again.",
            )
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def gives_up(self) -> bool:
        """Whether nothing was copied for too long, now that the run is over; says so."""
        if not self.failing:
            return True
        if self._now() - self._copies.moved_at < END_S:
            self.pause_s = min(self.pause_s, END_S / 10)
            return False
        self._tell("failed", text=f"the newest checkpoint is not at {self._url}: {self._why}")
        return True


def follow(run: Path, tell: Tell, closed: Callable[[float], bool]) -> None:
    """Copy the checkpoints of a run until it is over.

    Args:
        run: its folder.
        tell: gets the notes.
        closed: waits for so many seconds, or until the run is over; whether it is.
    """
    job = spec_file.load(run / "job.toml")
    url = base_of(job, run)
    follower = CopyFollower(Copies(run, url, job.checkpoint), url, tell)
    over = False
    while True:
        over = over or closed(0.0)
        follower.look()
        if over and follower.gives_up():
            break
        if over:
            time.sleep(follower.pause_s)
        else:
            over = closed(follower.pause_s)
    if not follower.failing:
        tell("finished", url=shown_url(url))


def _closed(seconds: float) -> bool:
    return bool(select([sys.stdin], [], [], seconds)[0])


def _print(name: str, **fields: Any) -> None:
    with suppress(OSError):  # the client is gone; what is copied is copied
        os.write(sys.stdout.fileno(), json.dumps({"name": name, "fields": fields}).encode() + b"\n")


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the client gets them, and ends the run
    with suppress(OSError):
        os.nice(10)
    with suppress(OSError):  # one at a time: another, whose client was killed, is at its end
        fcntl.flock(sys.stderr, fcntl.LOCK_EX)
    follow(Path(sys.argv[1]), _print, _closed)
    sys.stderr.flush()
    os._exit(0)  # nothing is left to run down
