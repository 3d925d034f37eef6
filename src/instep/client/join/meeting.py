"""Where the processes of one start (torchrun, Slurm, MPI) find the run's master.

Process 0 leaves a note that says where the master listens, with the token, and the others wait for
it. Errors travel as notes too (`refusal.py`). `MeetingFile` keeps notes as small files in the
folder of runs: so no port has to be agreed on beforehand, none is open to strangers, and torch's
`TCPStore`, which is open to them, is not used. Hosts that share no folder meet at an address
instead (`rendezvous.py`). A running job has such a file in its folder, for `instep scale`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from instep.client.join.placement import Placement
from instep.comm.encryption.certificates import Authority, Credentials, Identity
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import RunError
from instep.plain_file import PRIVATE, read_believed, replace_plain
from instep.store.folder import ID, is_running
from instep.system.processes import started_at
from instep.units import readable_seconds

SAY_AFTER_S = 10.0
"""A longer wait prints a line."""

TIMEOUT_S = 1800.0
"""How long process 0 may take to say where it listens: before a resumed run it reads a
checkpoint."""

OLD_S = 2 * TIMEOUT_S
"""A note of that age that names no run is waited for by nobody."""

_FILES = ".meeting-"
"""How the names of these files in a folder of runs begin."""

ENDPOINT = ""
"""The name of the note that says where the master listens."""


class Meeting(Protocol):
    """Notes that the processes of one start leave for each other, by name."""

    lasts: bool
    """Whether notes of an earlier start may be here."""
    host: str | None
    """The address that the master is to listen on; None where it follows from the start."""
    pause_s: float
    """Between two looks at the notes."""

    @property
    def missing(self) -> tuple[str, str]:
        """What process 0 has not done while there is no endpoint, and what to look at."""

    def enter(self) -> None:
        """Wait until notes can be read.

        Raises:
            InstepError: they cannot.
        """

    def put(self, name: str, note: bytes) -> bool:
        """Leave a note, in place of the one of this name; whether that could be done."""

    def get(self, name: str) -> bytes | None:
        """A note; None if there is none, or nobody can be asked for now.

        Raises:
            JoinError: process 0 is gone.
        """

    def remove(self, name: str) -> None:
        """Remove a note, if there is one."""

    def names(self) -> list[str]:
        """Of all notes but that of the endpoint; for process 0."""

    def close(self) -> None:
        """This process has met the others."""


class MeetingFile:
    """Notes as files, which only their owner may read.

    Args:
        file: that of the endpoint; the others have its name, and theirs after a dot.
    """

    lasts = True
    host: str | None = None
    pause_s = 0.02

    def __init__(self, file: Path) -> None:
        self.file = file
        self.doubt = ""
        """Why a note that is here was not taken."""

    @property
    def missing(self) -> tuple[str, str]:
        """As `Meeting.missing`."""
        if self.doubt:
            return (
                f"written {self.file} ({self.doubt})",
                "who can write into the folder of runs; or give rendezvous='HOST:PORT'",
            )
        return (
            f"written {self.file}",
            "whether the folder of runs is shared between the hosts; if it is not, give "
            "rendezvous='HOST:PORT'",
        )

    def enter(self) -> None:
        """Files can be read at any time."""

    def put(self, name: str, note: bytes) -> bool:
        """Write it all at once."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        replace_plain(self._path(name), note.decode(), PRIVATE)
        return True

    def get(self, name: str) -> bytes | None:
        """As `Meeting.get`: None also where somebody else may have written it."""
        note, why = None, ""
        try:
            note = read_believed(self._path(name))
        except FileNotFoundError:
            pass
        except OSError as error:
            why = f"what is there is not believed: {error.strerror}"
        if name == ENDPOINT:
            self.doubt = why
        return note

    def remove(self, name: str) -> None:
        """As `Meeting.remove`."""
        self._path(name).unlink(missing_ok=True)

    def names(self) -> list[str]:
        """As `Meeting.names`."""
        own = f"{self.file.name}."
        return [path.name.removeprefix(own) for path in self.file.parent.glob(f"{own}*")]

    def close(self) -> None:
        """Files stay: a late process is to be refused."""

    def _path(self, name: str) -> Path:
        return self.file.with_name(f"{self.file.name}.{name}") if name else self.file


class _Note(msgspec.Struct):
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    token: str
    credentials: Credentials | None = None
    authority: str = ""
    """Of the run, PEM with its key: each process makes its own certificate with it."""
    time: float = 0.0
    """Unix seconds at which it was written."""
    run: str = ""
    """The name of the run's folder, locked while it is running; empty where none begins."""


def meeting_file(runs: Path, place: Placement) -> MeetingFile:
    """Where the processes of one start meet that share a folder of runs."""
    return MeetingFile(runs / f"{_FILES}{place.key}.json")


def remove_old(runs: Path) -> None:
    """Remove what killed starts of this user have left in a folder of runs.

    An endpoint goes once its run has ended, any other note when nobody waits for it any more.
    """
    for path in (*runs.glob(f"{_FILES}*"), *runs.glob(f".{_FILES}*")):
        with suppress(OSError, ValueError, RecursionError, RunError):
            written = read_believed(path)
            is_old = path.stat().st_mtime < time.time() - OLD_S
            with suppress(ValueError, RecursionError):
                if name := msgspec.json.decode(written, type=_Note).run:
                    is_old = not ((runs / name / ID).is_file() and is_running(runs / name))
            if is_old:
                path.unlink()


def write(
    meeting: Meeting,
    endpoint: Endpoint,
    authority: Authority | None = None,
    run: str = "",
) -> None:
    """Say where the master listens.

    Args:
        meeting: where to.
        endpoint: has the credentials of the process that reads this, if there is no `authority`.
        authority: of the run, for processes that need certificates of their own.
        run: the name of its folder, if this process has it locked.
    """
    where = endpoint.address
    note = _Note(where.host, where.port, endpoint.token, time=time.time(), run=run)
    if authority is None:
        note.credentials = endpoint.credentials
    else:
        note.authority = authority.pem
    meeting.put(ENDPOINT, msgspec.json.encode(note))


def read(meeting: Meeting, rank: int = 0) -> Endpoint | None:
    """Where the master listens, for the process of that rank; None if that is not said, or the
    note is damaged."""
    if (note := _note(meeting)) is None:
        return None
    with suppress(ValueError):
        shown = note.credentials
        if note.authority:
            shown = Authority(note.authority).issue(Identity("worker", rank))
        endpoint = Endpoint(Address(note.host, note.port), note.token, credentials=shown)
        _ = endpoint.context  # once, and kept: it is what is damaged as a rule
        return endpoint
    return None


def _note(meeting: Meeting) -> _Note | None:
    found = meeting.get(ENDPOINT)
    try:
        return None if found is None else msgspec.json.decode(found, type=_Note)
    except (ValueError, RecursionError):
        return None


def is_of_this_start(meeting: Meeting) -> bool | None:
    """Whether the endpoint there is certainly not one that an earlier start has left; None if there
    is none."""
    if (note := _note(meeting)) is None:
        return None
    return not meeting.lasts or note.time > started_at()


def find(
    meeting: Meeting,
    stale: Collection[str] = (),
    *,
    rank: int = 0,
    timeout_s: float = TIMEOUT_S,
    look: Callable[[], None] = lambda: None,
) -> Endpoint:
    """Wait until process 0 says where the master listens.

    Args:
        meeting: where the processes meet.
        stale: tokens of former masters, to be ignored.
        rank: of this process.
        timeout_s: seconds to wait at most.
        look: called now and then; what it raises ends the wait.

    Raises:
        RunError: process 0 said nothing in that time.
    """
    began, said = time.monotonic(), False
    while True:
        endpoint = read(meeting, rank)
        if endpoint is not None and endpoint.token not in stale:
            return endpoint
        look()
        waited_s = time.monotonic() - began
        what, hint = meeting.missing
        if not said and waited_s > SAY_AFTER_S:
            print(f"instep: process 0 has not {what} yet. Look {hint}.", file=sys.stderr)
            said = True
        if waited_s > timeout_s:
            raise RunError(
                f"process 0 has not {what} in {readable_seconds(timeout_s)}. Look at what "
                f"it printed last, and {hint}."
            )
        time.sleep(meeting.pause_s)
