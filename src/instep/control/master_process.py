"""The master as a process of its own: if it is killed, another continues from its journal.

The client starts it (`client/watchdog.py`). It hands over the socket to listen on, which
outlives the process, and a pipe for signs of life. Under `instep.join` process 0 is the
client. The job is in the run folder; the rest comes as a line of JSON on standard input.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from instep.comm.encryption.certificates import Authority
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.control.hosts.hosts import Process
from instep.control.journal import Journal
from instep.control.master import Master
from instep.errors import InstepError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import plain
from instep.report.figures.summary import committed_losses
from instep.report.terminal.live import View, make_view
from instep.store.folder import id_of
from instep.store.run_folder import RunFolder
from instep.system import causes
from instep.system.lease import SignsOfLife
from instep.system.output import Output
from instep.system.processes import die_with_parent

FLUSH_S = 1.0
"""How long the last messages may take to be sent."""


def main() -> int:
    """Be the master of a run until it is over, or this process is killed."""
    die_with_parent(signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the client gets them, and sends `Interrupt`
    note = json.loads(sys.stdin.readline())
    signs = SignsOfLife(note["signs"])
    signs.show()  # what follows reads the run's folder; before, there were imports
    sys.stderr = output = Output(sys.stderr)  # a reader may pause, and the master must not
    run = Path(note["run"])
    board = Switchboard(
        listener=socket.socket(fileno=note["listener"]),
        token=note["token"],
        authority=Authority(note["authority"]) if note["authority"] else None,
    )
    stale = None
    try:
        stale = _serve(run, note, board, signs)
    except InstepError as error:
        _log_error(run)
        _refuse(board, error)
        return error.exit_code
    except BaseException:
        _log_error(run)
        return 1
    finally:
        _flush(board)
        output.drain(FLUSH_S)
    if stale is not None:
        stale.signal(signal.SIGKILL)  # where it is process 0, the kernel ends this one with it
    return 0


def _serve(
    run: Path, note: dict[str, Any], board: Switchboard, signs: SignsOfLife
) -> Process | None:
    """Returns a process of this machine that cannot end by itself."""
    job = spec_file.load(run / "job.toml")
    if nodes := note.get("nodes"):  # as many as the launcher has found
        job = replace(job, launch=replace(job.launch, nodes=nodes))
    views = _views(job, run, note)
    try:
        journal = Journal(run)
        master = Master(
            job,
            run,
            board,
            views=views,
            hosted=note["hosted"],
            gives_back=note["gives_back"],
            places=note["places"],
            started=journal.begin.started,
            about=note["about"],
            start_point=journal.begin.start_point,
            journal=journal,
            signs=signs,
            why=note["why"],
            run_id="" if note["hosted"] else id_of(run),  # a host has looked already
        )
        master.serve()
        return master.stale
    finally:
        for view in views:
            view.close()


def _views(job: JobSpec, run: Path, note: dict[str, Any]) -> list[View]:
    if note["quiet"]:
        return []
    before = RunFolder(run)  # of the master that was lost, or of earlier sessions
    so_far, earlier = (before, None) if note["why"] else (None, committed_losses(before))
    return [make_view(job, run, json=note["json"], so_far=so_far, earlier=earlier)]


def _log_error(run: Path) -> None:
    with contextlib.suppress(OSError), open(run / "logs" / "master.log", "a", opener=plain) as log:
        traceback.print_exc(file=log)


def _refuse(board: Switchboard, error: InstepError) -> None:
    """Have the client end with an error of this process, also if it has yet to connect."""
    refused = causes.refused(error)
    sent: set[Peer] = set()
    deadline = time.monotonic() + FLUSH_S
    while time.monotonic() < deadline:
        for peer in board.hub.peers():
            if peer not in sent:
                sent.add(peer)
                board.hub.send(peer, refused)
        for _ in board.hub.receive(0.05):
            pass


def _flush(board: Switchboard) -> None:
    """Wait until the last messages have been sent."""
    deadline = time.monotonic() + FLUSH_S
    with contextlib.suppress(OSError):
        while any(peer.unsent for peer in board.hub.peers()) and time.monotonic() < deadline:
            for _ in board.hub.receive(0.05):
                pass
    board.close()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # nothing is left to run down
