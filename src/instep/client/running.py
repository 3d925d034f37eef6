"""A run that goes on, from outside: found by its folder, and asked for something.

While a run goes on, its folder has a file that tells where its master
listens, and the token; only its owner may read it. Nothing here imports torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from instep.comm.channel import Address, Channel
from instep.comm.endpoint import Endpoint
from instep.comm.messages import Answer, Hello, Scale, Welcome
from instep.errors import PeerError, RunError, SpecError
from instep.plain_file import read_plain
from instep.store.run_folder import RunFolder

MOST_WORKERS = 1 << 15

ANSWER_S = 10.0
"""How long a master may take to answer; one that was lost is replaced meanwhile."""

FILE = "endpoint.json"
"""In the run folder, while the run goes on."""


@contextmanager
def seated(run: Path, endpoint: Endpoint) -> Iterator[None]:
    """Let the run be found, for as long as the context lasts.

    Raises:
        RunError: the run folder cannot be written.
    """
    path = run / FILE
    note = {"host": endpoint.address.host, "port": endpoint.address.port, "token": endpoint.token}
    try:
        path.unlink(missing_ok=True)  # of a client that was killed
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(note, file)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Make room, or get access."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the disk may have given up: the next client removes it
            path.unlink(missing_ok=True)


def scale(run: Path, workers: int) -> None:
    """Have a run that goes on use so many workers from one of its next commits on.

    Raises:
        RunError: there is no such run, or it does not go on.
        SpecError: it cannot have so many workers.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise SpecError(
            f"--workers {workers}: a run needs 1 or more, and no more than it has work for."
        )
    channel = call(run)
    try:
        channel.send(Scale(workers=workers))
        _await(channel)
        answer = channel.wait_for(Answer)
    except PeerError:
        raise _not_going_on(run) from None
    finally:
        channel.close()
    if answer.refusal:
        raise SpecError(answer.refusal)


def call(run: Path) -> Channel:
    """A channel to the master of a run that goes on.

    Raises:
        RunError: there is no such run, or it does not go on.
    """
    folder = RunFolder(run)  # says what is wrong with the path
    try:
        note = json.loads(read_plain(folder.path / FILE))
        endpoint = Endpoint(Address(note["host"], note["port"]), note["token"])
        channel = Channel.connect(endpoint.address)
        channel.send(Hello(token=endpoint.token, role="client", number=1, pid=os.getpid()))
        _await(channel)
        channel.wait_for(Welcome)
    except (OSError, ValueError, KeyError, TypeError, PeerError):
        raise _not_going_on(run) from None
    return channel


def _await(channel: Channel) -> None:
    if not channel.wait(ANSWER_S):
        raise PeerError("no answer came.")


def _not_going_on(run: Path) -> RunError:
    folder = RunFolder(run)
    joined = " (the processes of instep.join cannot be reached)" if folder.joined else ""
    return RunError(
        f"no run goes on in {run}{joined}; it is {folder.outcome}. To go on with another number "
        f"of workers: {folder.to_resume}"
    )
