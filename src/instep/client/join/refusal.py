"""How a process of `instep.join` that cannot begin tells the other processes of its start.

There is no master yet, or none that knows of the failure. Process 0 listens in the master's
place and gives one answer to every process that connects (`answer_all`): the run cannot
begin or is complete. Another process connects to say why it ends. A process that may not be
reached in time finds a note where all meet (`meeting.py`), which it removes. Where notes outlive
their start, only those written after a process began count for it.
"""

from __future__ import annotations

import contextlib
import hmac
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import msgspec

from instep.client.join import meeting as meetings
from instep.client.join.meeting import Meeting
from instep.client.join.placement import Placement, is_loopback
from instep.comm.encryption.certificates import Authority
from instep.comm.protocol.channel import MOST_UNTRUSTED
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import VERSION, Hello, Refused, Welcome
from instep.engine.member import Member
from instep.errors import InstepError
from instep.system import causes
from instep.system.processes import started_at

TIMEOUT_S = 60.0
"""How long the processes of one start may take to connect, once process 0 has an answer."""

BRIEFLY_S = 3.0
"""How long a process that fails before that tries to reach the others."""

TAKEN_S = 1.0
"""How long they may take to read the answer."""

DOOR_S = 5.0
"""How long process 0 lets others read its notes that can be read only while it is there."""


class _Note(msgspec.Struct):
    time: float
    """Unix seconds."""
    refused: Refused


def answer_all(
    switchboard: Switchboard,
    count: int,
    answer: Refused | Welcome,
    meeting: Meeting,
    *,
    timeout_s: float = TIMEOUT_S,
) -> set[int]:
    """Wait for `count` processes and send all of them the same answer.

    The note that brought them is removed first: the first process to get the answer may end all
    others, and a note that outlived them would mislead the next start.

    Args:
        switchboard: to which they connect; closed afterwards.
        count: how many processes will connect.
        answer: for each of them.
        meeting: where they look for it.
        timeout_s: after so many seconds those that have connected get the answer.

    Returns:
        The numbers of those that got it.
    """
    connected: dict[int, Peer] = {}
    token = switchboard.endpoint.token.encode()
    deadline = time.monotonic() + timeout_s
    hub = switchboard.hub
    hub.untrusted.most = max(MOST_UNTRUSTED, 2 * count)  # all may come at once
    try:
        while len(connected) < count and (left_s := deadline - time.monotonic()) > 0:
            for peer, message in hub.receive(left_s):
                match message:
                    case Hello(version=version) if version == VERSION and hmac.compare_digest(
                        message.token.encode(), token
                    ):
                        hub.trust(peer)
                        connected[message.number] = peer
                    case None:
                        pass
                    case _ if peer not in connected.values():  # they may have more to tell
                        hub.drop(peer)
    finally:
        meeting.remove(meetings.ENDPOINT)
    for peer in connected.values():
        if peer.socket.fileno() >= 0:
            hub.send(peer, answer)
    deadline = time.monotonic() + TAKEN_S
    while {*connected.values()} & {*hub.peers()} and time.monotonic() < deadline:
        for _ in hub.receive(0.05):
            pass  # else what one still sends would reset its connection, and the answer be lost
    switchboard.close()
    return {*connected}


@contextmanager
def announced(place: Placement, meeting: Meeting) -> Iterator[None]:
    """Tell the other processes of this start about an error in the context, and raise it."""
    try:
        yield
    except Exception as error:
        with contextlib.suppress(OSError, InstepError):  # the error itself matters more
            if place.size > 1 and place.rank == 0:
                _refuse_all(place, meeting, error)
            elif place.size > 1:
                _tell_process_0(place, meeting, error)
        meeting.close()
        raise


def _refuse_all(place: Placement, meeting: Meeting, error: Exception) -> None:
    """Process 0: make the processes that connect raise the same; leave notes for the others.

    Between several hosts that meet at a file it does not listen: they may not reach its address.
    """
    failed = notes(meeting, 0)
    others = [n for n in range(1, place.size) if n not in failed]
    if (place.one_host or meeting.host) and others:
        address = meeting.host or "127.0.0.1"
        switchboard = Switchboard(address, authority=None if is_loopback(address) else Authority())
        meetings.write(meeting, switchboard.endpoint, switchboard.authority)
        answer = causes.refused(error)
        told = answer_all(switchboard, len(others), answer, meeting, timeout_s=BRIEFLY_S)
        others = [n for n in others if n not in told]
    leave_notes(meeting, others, error)


def leave_notes(meeting: Meeting, others: Collection[int], error: Exception) -> None:
    """Process 0: leave a note about its error for each process that comes later.

    Where notes end with process 0, wait a while for those processes: who reads a note removes it.
    """
    left = {_name(0, number) for number in others}
    with contextlib.suppress(OSError):
        for number in others:
            _leave(meeting, 0, number, error)
    deadline = time.monotonic() + DOOR_S
    while not meeting.lasts and left & {*meeting.names()} and time.monotonic() < deadline:
        time.sleep(0.05)


def _tell_process_0(place: Placement, meeting: Meeting, error: Exception) -> None:
    """Another process: tell the master of process 0, or leave a note if there is none yet."""
    deadline = time.monotonic() + BRIEFLY_S
    # first: process 0 says where it listens, then looks
    while not _leave(meeting, place.rank, 0, error) and time.monotonic() < deadline:
        time.sleep(meeting.pause_s)
    mine, stale = _name(place.rank, 0), set[str]()
    while meeting.get(mine) is not None and time.monotonic() < deadline:
        endpoint = meetings.read(meeting, place.rank)
        if endpoint is None or endpoint.token in stale:
            time.sleep(meeting.pause_s)
            continue
        stale.add(endpoint.token)
        with contextlib.suppress(InstepError):  # it is gone, or refuses as well
            member = Member(endpoint, place.rank)
            meeting.remove(mine)
            try:
                member.failed(causes.failed(error, 0, ""))
            finally:
                member.close()


def _name(sender: int, to: int) -> str:
    return f"{sender}-to-{to}"


def _leave(meeting: Meeting, sender: int, to: int, error: Exception) -> bool:
    note = _Note(time.time(), causes.refused(error))
    return meeting.put(_name(sender, to), msgspec.json.encode(note))


def notes(meeting: Meeting, to: int) -> dict[int, InstepError]:
    """The errors in the notes for a process of this start, by sender; removes the notes.

    Process 0 reads those of all processes, the others read that of process 0.
    """
    found: dict[int, InstepError] = {}
    every = [n for n in meeting.names() if n.endswith("-to-0")] if to == 0 else [_name(0, to)]
    for name in every:
        note = None
        try:
            if (written := meeting.get(name)) is None:
                continue
            note = msgspec.json.decode(written, type=_Note)
            sender = int(name.split("-")[0])
        except (OSError, ValueError, RecursionError):
            pass  # damaged
        with contextlib.suppress(OSError):
            meeting.remove(name)
        if note is not None and (note.time > started_at() or not meeting.lasts):
            found[sender] = causes.as_error(note.refused)
    return found
