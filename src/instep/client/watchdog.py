"""Keeps a run's master and hosts alive until the run is over: the client's watchdog.

If a master or a host is killed, it is started again, and training continues meanwhile. A
master that gives no sign of life for too long (`system/lease.py`) is killed first, so that
there are never two. A master that ends by itself has said why, and that ends the run. The
client is the one process that must live: if it dies, all others end. Under `instep.join`
the watchdog is a thread of process 0, and there are no hosts.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from instep.client.host_watch import HostWatch, last_line
from instep.comm.protocol.connection import MasterConnection
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.messages import (
    Emit,
    Hello,
    HostUnneeded,
    HostWanted,
    Interrupt,
    Over,
    Refused,
)
from instep.control.decisions.endings import signal_name
from instep.errors import RunError
from instep.launch.base import Launcher
from instep.launch.warm import ForkedProgram, is_warm
from instep.store.own_files import gone
from instep.system.causes import as_error
from instep.system.environment import SCHEDULERS
from instep.system.lease import Lease
from instep.system.processes import on_signals, start_with_retries

LINGER_S = 2.0
"""How long a master may take to end once the run is over."""

LOOK_S = 0.05
"""Seconds between two looks at the processes."""

STUCK_S = 10.0
"""How long a master may take to end a run after a second interrupt."""

SHORT_S, MOST_SHORT = 2.0, 10
"""After so many masters in a row that lived no longer, none is started."""

LONGEST_PAUSE_S = 1.0
"""Before the next one there is a pause, which grows up to this."""

MOST_HANGS, WELL_S = 7, 10.0
"""A master that hung so often, without working for so long in between, is not replaced: whatever it
waits for, the next one waits for as well."""


class MasterWatchdog:
    """Watches a run until its end.

    Args:
        run: its folder.
        switchboard: on which its masters listen.
        launcher: has started the hosts; None if there are none.
        hosts: how many.
        events: gives what the run's log is to have, at every look.
        note: for each master, in addition to what the folder says.
        watch: called with the folder at every look.
    """

    def __init__(
        self,
        run: Path,
        switchboard: Switchboard,
        launcher: Launcher | None,
        note: Mapping[str, Any],
        watch: Callable[[Path], None] | None = None,
        *,
        hosts: int = 1,
        events: Callable[[], Iterable[Emit]] = list,
    ) -> None:
        self._watch, self._events = watch, events
        self._run, self._board, self._note = run, switchboard, note
        self._hosts = None
        if launcher is not None:
            self._hosts = HostWatch(launcher, range(hosts), switchboard.for_host, run / "logs")
        self._started = 0.0  # when the present one was
        self._asked: list[str] = []
        self._told = 0
        self._last_asked = math.inf
        self._signs = -1  # what the master writes while it lives
        self._hung = ""  # how the present one hangs, once it has been killed for that
        self._hangs = 0
        self._short_lives = 0  # of masters in a row that ended soon after their start
        self._due: float | None = None  # when to start the next one, while there is none
        self._over = False
        self._longest_s = 0.0  # the longest silence of a master that continued

    def _start(self, why: str = "") -> subprocess.Popen[bytes] | ForkedProgram:
        """Start a master; `why` says how the one before was lost."""
        now = self._started = time.monotonic()
        listener = self._board.listener.fileno()
        self._close_signs()
        self._signs, signs = os.pipe()
        os.set_blocking(self._signs, False)
        forked = _forked([listener, signs]) if not why and is_warm() else None
        master: subprocess.Popen[bytes] | ForkedProgram = forked or start_with_retries(
            [sys.executable, "-P", "-m", "instep.control.master_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[listener, signs],
            start_new_session=True,  # Ctrl-C reaches only us
        )
        os.close(signs)
        self._hung = ""
        self._lease = Lease(master.pid, now, longest_s=self._longest_s, times=self._hangs)
        note = {
            **self._note,
            "run": str(self._run),
            "listener": listener,
            "signs": signs,
            "token": self._board.endpoint.token,
            "authority": self._board.authority and self._board.authority.pem,
            "hosted": self._hosts is not None,
            "gives_back": self._hosts is not None and self._hosts.gives_back,
            "places": self._hosts.places if self._hosts is not None else None,
            "why": why,
        }
        assert master.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            master.stdin.write(json.dumps(note, default=str).encode() + b"\n")
            master.stdin.close()
        return master

    def serve(self) -> Over:
        """Start a master, and wait for the run's end; no master is left then.

        Raises:
            InstepError: the master cannot continue; the text says why.
        """
        self._master = self._start()
        endpoint = self._board.endpoint
        hello = Hello(token=endpoint.token, role="client", number=0, pid=0)
        connection = MasterConnection(endpoint.address, hello, endpoint.context)
        connection.lasting = True
        try:
            # the first asks the workers to stop at the next commit
            with on_signals(self._ask, *SCHEDULERS):
                while True:
                    message = connection.inbox.look(LOOK_S)
                    if isinstance(message, Over):
                        self._over = True
                        return message
                    if isinstance(message, Refused):
                        raise as_error(message)
                    if isinstance(message, HostWanted) and self._hosts is not None:
                        self._hosts.start(message.numbers)
                    if isinstance(message, HostUnneeded) and self._hosts is not None:
                        self._hosts.give_back(message.number)
                    self._pass_on(connection)
                    for event in self._events():
                        connection.send(event)
                    self._look_after(connection)
                    if self._watch is not None:
                        self._watch(self._run)
        finally:
            connection.close()
            self._close()

    def _ask(self, number: int, _: object) -> None:
        self._asked.append(signal.Signals(number).name)

    def _pass_on(self, connection: MasterConnection) -> None:
        while self._told < len(self._asked):
            self._told += 1
            connection.send(Interrupt(by=self._asked[self._told - 1], times=self._told))
            self._last_asked = time.monotonic()
        if self._told > 1 and time.monotonic() - self._last_asked > STUCK_S:
            self._last_asked = math.inf
            self._master.kill()  # it does not end the run; the next one will

    def _look_after(self, connection: MasterConnection) -> None:
        for event in self._hosts.events() if self._hosts is not None else ():
            connection.send(event)
        self._watch_signs()
        code = self._master.poll()
        if code is None:
            return
        message = connection.inbox.look(LOOK_S)  # its last message may have arrived
        if message is not None:
            connection.inbox.put_back(message)
        elif code >= 0:
            log = self._run / "logs" / "master.log"
            if text := gone(self._run):
                raise RunError(text)
            if not (said := last_line(log)):
                raise RunError(f"the run's master ended with code {code}, and said nothing.")
            raise RunError(f"the run's master failed: {said} Full log: {log}")
        else:
            why = self._hung or f"it was killed by {signal_name(code)}"
            now = time.monotonic()
            if self._due is None:  # it has just ended
                short = now - self._started < SHORT_S
                self._short_lives = self._short_lives + 1 if short else 0
                self._check_restarts(why)
                pause_s = 0.05 * 2**self._short_lives if self._short_lives > 2 else 0.0
                self._due = now + min(pause_s, LONGEST_PAUSE_S)
            if now >= self._due:
                self._due = None
                self._master = self._start(why)

    def _watch_signs(self) -> None:
        """Kill a master that gives no sign of life for too long; it is replaced then."""
        now = time.monotonic()
        with contextlib.suppress(BlockingIOError):
            while os.read(self._signs, 1 << 16):
                self._lease.renew(now)
        if self._hangs and self._lease.signs and now - self._started > WELL_S:
            self._hangs = 0
        self._longest_s = max(self._longest_s, self._lease.longest_s)
        if not self._hung and (how := self._lease.turn(now)):
            self._hung, self._hangs = how, self._hangs + 1
            self._master.kill()

    def _check_restarts(self, why: str) -> None:
        """Refuse to start masters again and again.

        Raises:
            RunError: another one would not help.
        """
        if self._hangs >= MOST_HANGS:
            raise RunError(
                f"the run's master gave no sign of life {self._hangs} times in a row, and each "
                f"was replaced ({why}, the last). Look at the disk that holds {self._run}, and "
                "whether something stops this machine's processes."
            )
        if self._short_lives >= MOST_SHORT:
            raise RunError(
                f"the run's master ended within {SHORT_S:g} s of its start {self._short_lives} "
                f"times in a row ({why}, the last time). What it said is in "
                f"{self._run / 'logs' / 'master.log'}."
            )

    def _close(self) -> None:
        if self._over:  # it is about to print its last lines
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._master.wait(LINGER_S)
        if self._master.poll() is None:
            self._master.kill()
        self._master.wait()
        self._close_signs()

    def _close_signs(self) -> None:
        if self._signs >= 0:
            os.close(self._signs)
            self._signs = -1


def _forked(keep: Sequence[int]) -> ForkedProgram | None:
    """A master that is a fork of this process, which has imported all that it needs; None if the
    system has no room for one."""
    from instep.control.master_process import main

    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        return ForkedProgram(main, name="instep-master", output=nothing, errors=2, keep=keep)
    except OSError:
        return None
    finally:
        os.close(nothing)
