"""A running job, seen from another program: found by its folder, and changed.

While a job is running, its folder has a file that says where its master listens
(`meeting.py`). Nothing here imports torch. Way in: `scale`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from instep.client.join import meeting
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import Answer, Hello, Scale, Welcome
from instep.errors import PeerError, RunError, SpecError
from instep.store.run_folder import RunFolder

MOST_WORKERS = 1 << 15

ANSWER_S = 10.0
"""How long a master may take to answer; a lost one is replaced in that time."""

FILE = "endpoint.json"
"""In the run folder, during the run."""


@contextmanager
def published(run: Path, endpoint: Endpoint) -> Iterator[None]:
    """Let other programs find the run's master, for as long as the context lasts.

    Raises:
        RunError: the run folder cannot be written.
    """
    path = run / FILE
    try:
        meeting.write(meeting.MeetingFile(path), endpoint)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror}. Make room, or get access."
        ) from None
    try:
        yield
    finally:
        with suppress(OSError):  # the disk may have failed: the next client replaces the file
            path.unlink(missing_ok=True)


def scale(run: Path, workers: int, places: list[int] | None = None) -> None:
    """Change the number of workers of a running job, from one of its next steps on.

    Args:
        run: its folder.
        workers: how many it is to have.
        places: workers that there is room for on each host, where a pool decides that.

    Raises:
        RunError: there is no such run, or it is not running.
        SpecError: it cannot have so many workers.
    """
    if not 1 <= workers <= MOST_WORKERS:
        raise SpecError(
            f"--workers {workers}: a run needs 1 worker or more, and work for each of them."
        )
    channel = call(run)
    try:
        channel.send(Scale(workers=workers, places=places))
        answer = channel.wait_for(Answer, ANSWER_S)
    except PeerError:
        raise not_running(run) from None
    except TimeoutError:
        raise silent(run) from None
    finally:
        channel.close()
    if answer.refusal:
        raise SpecError(answer.refusal)


def call(run: Path) -> Channel:
    """A channel to the master of a running job.

    Raises:
        RunError: there is no such run, or it is not running.
    """
    folder = RunFolder(run)  # says what is wrong with the path
    try:
        file = meeting.MeetingFile(folder.path / FILE)
        if (endpoint := meeting.read(file)) is None:
            if file.doubt:
                raise RunError(f"{file.file}: {file.doubt}. Call this as the user of the run.")
            raise not_running(run)
        channel = Channel.connect(endpoint.address, context=endpoint.context)
    except (OSError, PeerError):
        raise not_running(run) from None
    try:
        channel.send(Hello(token=endpoint.token, role="client", number=1, pid=os.getpid()))
        channel.wait_for(Welcome, ANSWER_S)
    except (PeerError, TimeoutError) as error:
        channel.close()
        raise (silent if isinstance(error, TimeoutError) else not_running)(run) from None
    return channel


def silent(run: Path) -> RunError:
    """That a run's master says nothing; if it was lost, another would have taken its place."""
    return RunError(
        f"the master of {run} does not answer, for {ANSWER_S:g} s. Look whether its processes were "
        "stopped, and try again."
    )


def not_running(run: Path) -> RunError:
    """That a run is not running, and how to resume it."""
    folder = RunFolder(run)
    joined = " under instep run, so its processes cannot be reached" if folder.joined else ""
    return RunError(
        f"{run} is not running{joined}; it is {folder.outcome}. To resume it with another "
        f"number of workers: {folder.to_resume}"
    )
