"""Keeps a run's master and its hosts alive until the run is over. The client's part of it.

Either may be killed: it is brought up again, and the rest goes on meanwhile.
One that ends by itself has said why, and that ends the run. The client is
the one process of a run that must live; where it dies, all others end.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from instep.comm.messages import Hello, HostEnded, HostWanted, Interrupt, Over, Refused
from instep.comm.tie import Tie
from instep.errors import RunError
from instep.run.blame import as_error
from instep.run.launch.base import Launcher, Switchboard, host_log
from instep.run.processes import on_signals

LOOK_S = 0.05
"""How often it is looked whether they live."""

STUCK_S = 10.0
"""How long a master may take to end a run that is to end now."""

MOST_RESTARTS, WITHIN_S = 10, 10.0
"""A master that is killed more often within so long is given up."""


class Guard:
    """Sees a run to its end.

    Args:
        run: its folder.
        switchboard: on which its masters listen.
        launcher: has started the hosts.
        hosts: how many.
        note: for each master, beside what the folder says.
        watch: called with the folder at every look.
    """

    def __init__(
        self,
        run: Path,
        switchboard: Switchboard,
        launcher: Launcher,
        note: Mapping[str, Any],
        watch: Callable[[Path], None] | None = None,
        *,
        hosts: int = 1,
    ) -> None:
        self._watch = watch
        self._run, self._board, self._launcher, self._note = run, switchboard, launcher, note
        self._hosts = range(hosts)
        self._starts: list[float] = []
        self._asked: list[str] = []
        self._told = 0
        self._last_asked = math.inf
        self._ended: set[int] = set()  # hosts that have ended by themselves
        self._master = self._start(again=False)

    def _start(self, *, again: bool) -> subprocess.Popen[bytes]:
        self._starts.append(time.monotonic())
        listener = self._board.listener.fileno()
        master = subprocess.Popen(
            [sys.executable, "-P", "-m", "instep.run.master_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener],
            start_new_session=True,  # Ctrl-C reaches only us
        )
        note = {
            **self._note,
            "run": str(self._run),
            "listener": listener,
            "token": self._board.seat.token,
            "again": again,
        }
        assert master.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            master.stdin.write(json.dumps(note, default=str).encode() + b"\n")
            master.stdin.close()
        return master

    def serve(self) -> Over:
        """Wait for the run's end.

        Raises:
            InstepError: the master cannot go on; the text says why.
        """
        seat = self._board.seat
        tie = Tie(seat.address, Hello(token=seat.token, role="client", number=0, pid=0))
        tie.lasting = True
        try:
            # the first asks the workers to stop at the next commit
            with on_signals(lambda number, _: self._asked.append(signal.Signals(number).name)):
                while True:
                    message = tie.look(LOOK_S)
                    if isinstance(message, Over):
                        return message
                    if isinstance(message, Refused):
                        raise as_error(message)
                    if isinstance(message, HostWanted):
                        self._bring_hosts(message.numbers)
                    self._pass_on(tie)
                    self._look_after(tie)
                    if self._watch is not None:
                        self._watch(self._run)
        finally:
            tie.close()

    def _pass_on(self, tie: Tie) -> None:
        while self._told < len(self._asked):
            self._told += 1
            tie.send(Interrupt(by=self._asked[self._told - 1], times=self._told))
            self._last_asked = time.monotonic()
        if self._told > 1 and time.monotonic() - self._last_asked > STUCK_S:
            self._last_asked = math.inf
            self._master.kill()  # it does not do what it was told to; the next one will

    def _look_after(self, tie: Tie) -> None:
        for number in self._hosts:
            code = self._launcher.ended(number)
            if code is not None and code >= 0 and number not in self._ended:
                self._ended.add(number)
                detail = _last_line(host_log(self._run / "logs", number))
                tie.send(HostEnded(code=code, detail=detail, number=number))
        code = self._master.poll()
        if code is None:
            return
        message = tie.look(LOOK_S)  # its last word may have arrived
        if message is not None:
            tie.put_back(message)
        elif code >= 0:
            log = self._run / "logs" / "master.log"
            raise RunError(f"the run's master failed: {_last_line(log)} Everything else: {log}")
        elif len(self._starts) > MOST_RESTARTS and self._starts[-MOST_RESTARTS] > (
            time.monotonic() - WITHIN_S
        ):
            raise RunError(
                f"the run's master was killed {MOST_RESTARTS} times within {WITHIN_S:g} s "
                f"({signal.Signals(-code).name} each time, or last)."
            )
        else:
            self._master = self._start(again=True)

    def _bring_hosts(self, numbers: Iterable[int]) -> None:
        """The master has none of these hosts any more, nor has one that took its place called."""
        for number in numbers:
            if number in self._hosts and self._launcher.ended(number) is not None:
                self._ended.discard(number)
                seat = replace(self._board.seat, host=number)
                self._launcher.start(seat, self._run / "logs")

    def close(self) -> None:
        """End the master, if it still runs; a second call does nothing."""
        if self._master.poll() is None:
            self._master.kill()
        self._master.wait()


def _last_line(log: Path) -> str:
    """What a process said last before it ended."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
