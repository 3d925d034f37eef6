"""One answer for every process that comes, where there is no run for them to work in.

Process 0 of `instep.join` finds out alone that a run cannot go on, or that it
is complete, while the others look for its master. So it stands in for the
master until all have come, and tells all of them the same. The meeting file
is gone before anyone hears it: whoever hears it first may end them all, and a
file that outlived them would mislead the next start. What the answer means,
this file does not know.
"""

from __future__ import annotations

import hmac
import time
from pathlib import Path

from instep.comm.channel import Peer
from instep.comm.endpoint import Switchboard
from instep.comm.messages import VERSION, Hello, Refused, Welcome

TIMEOUT_S = 60.0
"""How long processes of one start may take to come, after the first one knows the answer."""


def answer_all(
    switchboard: Switchboard,
    count: int,
    answer: Refused | Welcome,
    meeting: Path,
    *,
    timeout_s: float = TIMEOUT_S,
) -> int:
    """Wait for `count` processes and tell them one thing.

    Args:
        switchboard: that they were invited to; closed afterwards.
        count: how many will come.
        answer: for each of them.
        meeting: the file that invited them; removed before they are told.
        timeout_s: seconds after which those that have come are told, and no more is waited.

    Returns:
        How many were told.
    """
    come: dict[int, Peer] = {}
    deadline = time.monotonic() + timeout_s
    try:
        while len(come) < count and (left_s := deadline - time.monotonic()) > 0:
            for peer, message in switchboard.hub.receive(left_s):
                if isinstance(message, Hello) and _is_ours(message, switchboard.endpoint.token):
                    come[message.number] = peer
                elif message is not None:
                    switchboard.hub.drop(peer)
    finally:
        meeting.unlink(missing_ok=True)
    for peer in come.values():
        if peer.socket.fileno() >= 0:
            switchboard.hub.send(peer, answer)
    switchboard.close()
    return len(come)


def _is_ours(hello: Hello, token: str) -> bool:
    return hello.version == VERSION and hmac.compare_digest(hello.token.encode(), token.encode())
