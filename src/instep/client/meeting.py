"""Small files by which processes find a run's master: where it listens, and the token.

The processes of one start (torchrun, Slurm, MPI) meet at a file in the folder of runs;
process 0 writes it, the others wait for it. So no port has to be agreed on beforehand, none
is open to strangers, and torch's `TCPStore`, which is open to them, is not used. A running
job has such a file in its folder, for `instep scale`. Only its owner may read it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated

import msgspec

from instep.client.placement import Placement
from instep.comm.certificates import Credentials
from instep.comm.channel import Address
from instep.comm.endpoint import Endpoint
from instep.errors import RunError
from instep.plain_file import read_plain, replace_plain
from instep.units import readable_seconds

SAY_AFTER_S = 10.0
"""A longer wait prints a line."""

TIMEOUT_S = 1800.0
"""How long process 0 may take to write the file: before a resumed run it reads a checkpoint."""


class _Note(msgspec.Struct):
    host: str
    port: Annotated[int, msgspec.Meta(gt=0, lt=1 << 16)]
    token: str
    credentials: Credentials | None = None


def meeting_file(runs: Path, place: Placement) -> Path:
    """Where the processes of one start meet."""
    return runs / f".meeting-{place.key}.json"


def write(file: Path, endpoint: Endpoint) -> None:
    """Write the endpoint, all at once, readable by this user only."""
    where = endpoint.address
    leave(file, _Note(where.host, where.port, endpoint.token, endpoint.credentials))


def leave(file: Path, note: msgspec.Struct) -> None:
    """Write a note for other processes, all at once, readable by this user only."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_plain(file, msgspec.json.encode(note).decode(), 0o600)


def read(file: Path) -> Endpoint | None:
    """The endpoint in a file; None if there is no file, or it is damaged."""
    try:
        note = msgspec.json.decode(read_plain(file), type=_Note)
    except (FileNotFoundError, ValueError):
        return None
    return Endpoint(Address(note.host, note.port), note.token, credentials=note.credentials)


def find(
    file: Path,
    stale: Collection[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    look: Callable[[], None] = lambda: None,
) -> Endpoint:
    """Wait for the endpoint that process 0 writes.

    Args:
        file: where the processes meet.
        stale: tokens of former masters, to be ignored.
        timeout_s: seconds to wait at most.
        look: called now and then; what it raises ends the wait.

    Raises:
        RunError: process 0 wrote nothing in that time.
    """
    began, said = time.monotonic(), False
    while True:
        endpoint = read(file)
        if endpoint is not None and endpoint.token not in stale:
            return endpoint
        look()
        waited_s = time.monotonic() - began
        if not said and waited_s > SAY_AFTER_S:
            print(
                f"instep: waiting for process 0 to write {file} "
                "(the folder of runs must be shared between the hosts)",
                file=sys.stderr,
            )
            said = True
        if waited_s > timeout_s:
            raise RunError(
                f"process 0 has not written {file} in {readable_seconds(timeout_s)}. Look at what "
                "it printed last, and whether the folder of runs is shared between the hosts."
            )
        time.sleep(0.02)
