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

from instep.errors import CheckpointError, InstepError, one_line
from instep.job import file as spec_file
from instep.store.copies.layout import base_of
from instep.store.copies.upload import Copies
from instep.words import shown_error, shown_url

LOOK_S = 0.5
"""Seconds between two looks at the checkpoints."""

LONGEST_PAUSE_S = 60.0
"""Before an attempt; the first pause is `LOOK_S`, and each is twice the one before."""

END_S = 60.0
"""After the run, copying ends when nothing has moved for so long, and no attempt is in flight."""

Tell = Callable[..., None]
"""Takes the name of an event, and its fields; those of `NOTES` are none."""

NOTES = ("copying", "failed", "finished")
"""For the client alone: what is being done, and at the end, how it ended."""


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
        self._over_at: float | None = None  # when the run was found to be over
        self._why = ""
        self._removes = False  # what is done now is to remove old copies: the newest is there
        self._lags = False  # that is all that fails
        self.pause_s = LOOK_S
        """Seconds until the next look."""

    @property
    def failing(self) -> bool:
        """Whether the last attempt has failed."""
        return self._failing is not None

    def look(self) -> None:
        """Copy what is new; never raises what the file system does."""
        self._removes = False
        try:
            self._copies.look()
            while (checkpoint := self._copies.missing()) is not None:
                if not self._copy(checkpoint):
                    break
                self._remove_old()
            self._remove_old()
            self._works()
        except Exception as error:  # of whatever kind the file system has
            self._fails(error)

    def _remove_old(self) -> None:
        self._removes = True
        self._copies.remove_old()
        self._removes = False

    def _copy(self, checkpoint: Path) -> bool:
        """Copy a checkpoint, or say why it is refused; False if it is gone."""
        began = self._now()
        self._tell("copying", text=f"{checkpoint.name} is being copied to {self._url}")
        try:
            copied = self._copies.copy(checkpoint)
        except CheckpointError as error:
            self._tell("warning", text=str(error))
            return True
        if not self._lags:
            self._works()
        if copied is None:
            return False  # there is another one at the next look
        step, size = copied
        fields = {"step": step, "url": self._url, "size_bytes": size}
        self._tell("checkpoint_copied", **fields, seconds=self._now() - began)
        return True

    def _works(self) -> None:
        if self._failing is not None:
            self._tell("copies_resumed", url=self._url, seconds=self._now() - self._failing)
        self._failing, self._lags, self.pause_s = None, False, LOOK_S

    def _fails(self, error: Exception) -> None:
        said = error if isinstance(error, InstepError) else error.__cause__ or error
        self._why = shown_error(one_line(said)) or type(said).__name__
        if self._failing is None or (self._lags and not self._removes):
            sys.stderr.write(shown_error("".join(traceback.format_exception(error))))
            self._failing = self._now()
            self._lags = self._removes
            what = f"checkpoints cannot be copied to {self._url}"
            if self._removes:
                what = f"old copies of checkpoints cannot be removed at {self._url}"
            what = f"{what}: {self._why.rstrip('.')}."
            then = "Training goes on, and it is tried again."
            if self._over_at is not None:
                then = f"It is tried again for {END_S:g} s."
            self._tell("warning", text=f"{what} {then}")
        waits = f"the newest checkpoint is not at {self._url} yet"
        if self._removes:
            waits = f"old copies of checkpoints are at {self._url}"
        self._tell("copying", text=f"{waits}: {self._why.rstrip('.')}")
        self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)

    def run_is_over(self) -> None:
        """From now on an end is wanted, though not before the newest checkpoint is copied."""
        self._over_at = self._now()

    def gives_up(self) -> bool:
        """Whether all is copied, or nothing was for too long since the run was over; says which."""
        if self.failing:
            since = max(self._copies.moved_at, self._over_at or 0.0, self._failing or 0.0)
            if self._now() - since < END_S:
                self.pause_s = min(self.pause_s, END_S / 10)
                return False
        if why := self._why if self.failing and not self._removes else self._copies.lacks:
            self._tell(
                "failed", text=f"the newest checkpoint is not at {self._url}: {why.rstrip('.')}"
            )
        else:
            self._tell("finished", url=self._url)
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
    while not closed(follower.pause_s):
        follower.look()
    follower.run_is_over()
    follower.look()
    while not follower.gives_up():
        time.sleep(follower.pause_s)
        follower.look()


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
