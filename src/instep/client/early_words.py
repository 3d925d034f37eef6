"""What a process of `instep.join` that fails before it has called in tells the others.

Its run has no master yet, or none that knows of it. Process 0 invites the others, only to
refuse; another one calls in to say why it ends. Where nobody is there to be told, a word is left
beside the meeting file (`placement.py`), for one reader, who takes it away. A word is
believed by processes that began before it was written: a later start has failed at nothing yet.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from instep.client import placement
from instep.client.one_answer import answer_all
from instep.client.placement import Placement
from instep.comm.endpoint import Switchboard
from instep.comm.messages import Refused
from instep.errors import InstepError
from instep.system import causes
from instep.system.processes import started_at
from instep.worker.member import Member

BRIEFLY_S = 3.0
"""How long a process that fails so early looks for somebody to tell."""


@contextmanager
def told(place: Placement, runs: Path) -> Iterator[None]:
    """Errors in the context become known to the other processes of this start, and are raised."""
    try:
        yield
    except Exception as error:
        meeting = placement.meeting_file(runs, place)
        with contextlib.suppress(OSError, InstepError):  # the error itself is what counts
            if place.size > 1 and place.rank == 0:
                refuse_all(place, meeting, error)
            elif place.size > 1:
                _call_in(place, meeting, error)
        raise


def refuse_all(place: Placement, meeting: Path, error: Exception) -> None:
    """Process 0: have those that have come raise the same; leave word for the others.

    Nothing listens where there are several hosts, whose network may be anybody's.
    """
    failed = heard(meeting, 0)
    others = [n for n in range(1, place.size) if n not in failed]
    missing = len(others)
    if place.one_host and others:
        switchboard = Switchboard()
        placement.invite(meeting, switchboard.endpoint)
        answer = causes.refused(error)
        missing -= answer_all(switchboard, missing, answer, meeting, timeout_s=BRIEFLY_S)
    if missing:
        leave_all(meeting, others, error)


def leave_all(meeting: Path, others: Iterable[int], error: Exception) -> None:
    """Process 0: leave word of its error for those that come later."""
    with contextlib.suppress(OSError):
        for number in others:
            _leave(meeting, 0, number, error)


def _call_in(place: Placement, meeting: Path, error: Exception) -> None:
    """Another process: tell process 0's master, or leave word where there is none yet."""
    mine = _leave(meeting, place.rank, 0, error)  # first: process 0 invites, and then looks
    deadline = time.monotonic() + BRIEFLY_S
    stale: set[str] = set()
    while mine.exists() and time.monotonic() < deadline:
        endpoint = placement.read(meeting)
        if endpoint is None or endpoint.token in stale:
            time.sleep(0.02)
            continue
        stale.add(endpoint.token)
        with contextlib.suppress(InstepError):  # it is gone, or refuses as well
            member = Member(endpoint, place.rank)
            mine.unlink(missing_ok=True)
            try:
                member.failed(causes.failed(error, 0, ""))
            finally:
                member.close()


def _file(meeting: Path, of: int, to: int) -> Path:
    return meeting.with_name(f"{meeting.name}.{of}-to-{to}")


def _leave(meeting: Path, of: int, to: int, error: Exception) -> Path:
    file = _file(meeting, of, to)
    refused = causes.refused(error)
    word = {"time": time.time(), "kind": refused.kind, "text": refused.text}
    placement.leave(file, {**word, "exit_code": refused.exit_code})
    return file


def heard(meeting: Path, to: int) -> dict[int, InstepError]:
    """The words that were left for a process of this start, by whose they are; takes them away.

    Process 0 hears all, the others hear process 0.
    """
    found: dict[int, InstepError] = {}
    every = meeting.parent.glob(f"{meeting.name}.*-to-0") if to == 0 else [_file(meeting, 0, to)]
    for file in every:
        try:
            word = json.loads(file.read_text())
            refused = Refused(
                kind=str(word["kind"]), text=str(word["text"]), exit_code=int(word["exit_code"])
            )
            of, fresh = int(file.name.split(".")[-1].split("-")[0]), word["time"] > started_at()
        except FileNotFoundError:
            continue
        except (OSError, ValueError, TypeError, KeyError):
            fresh = False
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
        if fresh:
            found[of] = causes.as_error(refused)
    return found
