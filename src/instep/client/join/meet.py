"""How a process of a start finds the run's master, and becomes a member."""

from __future__ import annotations

import errno
import time

from instep.client.join import meeting as meetings
from instep.client.join import refusal
from instep.client.join.meeting import Meeting
from instep.client.join.placement import is_loopback
from instep.comm.protocol.channel import why_failed
from instep.comm.protocol.endpoint import Endpoint
from instep.engine.member import Member
from instep.errors import InstepError, PeerError, RunError
from instep.system import causes

AGAIN_S = 10.0
"""How long to retry a master that was lost before it answered."""

LATE_S = 2.0
"""How long a process that the run refused, or that found nobody, waits for another start."""

FORMER_S = 60.0
"""The same, where what it found may be left of a former start, whose process 0 was killed. Process
0 removes that when it begins."""

_CLOSED = (errno.EHOSTUNREACH, errno.ENETUNREACH)
"""Nothing answers, since the network is closed there."""


def meet(meeting: Meeting, rank: int) -> Member:
    """Join the master that process 0 runs; one of a former start is ignored.

    Raises:
        InstepError: process 0 refused to begin, is missing, or began without this process.
    """

    def look() -> None:
        for error in refusal.notes(meeting, rank).values():
            raise error

    stale = set(_MET)
    late: InstepError | None = None
    timeout_s, former = meetings.TIMEOUT_S, False
    while True:
        try:
            endpoint = meetings.find(meeting, stale, rank=rank, timeout_s=timeout_s, look=look)
        except RunError:
            if late is None:
                raise
            if not former or meetings.is_of_this_start(meeting) is not None:
                raise late from None
            late, timeout_s = None, meetings.TIMEOUT_S  # process 0 has come, and removed it
            continue
        stale.add(endpoint.token)
        try:
            member = call(endpoint, rank)
        except causes.Unwanted as error:
            late, timeout_s, former = error, LATE_S, False
        except PeerError as error:
            late = _unreachable(meeting, endpoint, error)
            cause = error.__context__
            if isinstance(cause, TimeoutError) or getattr(cause, "errno", None) in _CLOSED:
                raise late from None
            former = not meetings.is_of_this_start(meeting)
            timeout_s = FORMER_S if former else LATE_S
        else:
            _MET.add(endpoint.token)
            return member


def _unreachable(meeting: Meeting, endpoint: Endpoint, error: PeerError) -> RunError:
    host, port = endpoint.address
    why = getattr(error.__context__, "strerror", None) or error.__context__ or why_failed(error)
    if meeting.lasts and is_loopback(host):
        hint = (
            "; if it is on another machine, set LOCAL_WORLD_SIZE to the number of processes on "
            "each, as torchrun does"
        )
    else:
        hint = ", and open all ports between the machines: the run's master and gloo choose theirs"
    return RunError(
        f"process 0 says that its run is at {host}:{port}, and nothing can be reached there "
        f"({why}). Look whether process 0 has ended{hint}."
    )


_MET: set[str] = set()
"""Tokens of the masters that this process has joined already, in former sessions."""


def call(endpoint: Endpoint, number: int) -> Member:
    """Become a member; retries if the master is lost before it answers, as it is replaced.

    Raises:
        PeerError: there is no master and no replacement.
        InstepError: process 0 refused to begin.
    """
    deadline = time.monotonic() + AGAIN_S
    while True:
        try:
            return Member(endpoint, number)
        except causes.Unwanted:
            raise
        except PeerError as error:
            refused = isinstance(error.__context__, ConnectionRefusedError)
            if refused or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
