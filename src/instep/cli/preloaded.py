"""The process that has imported what commands of instep need, and becomes them in forks.

It ends with the one that started it (`detached/warm.py`); what it has forked continues. Nothing of
torch runs in it, and it has one thread. Way in: `main`.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import socket
import sys
import time
from contextlib import suppress

import msgspec

from instep.cli import GROUPS
from instep.cli import main as run_command
from instep.cli.parsing import make_ready
from instep.comm.protocol.connection import HEARTBEAT_S
from instep.detached.warm import WarmStart
from instep.errors import INTERRUPTED
from instep.job.file import build, dump
from instep.launch.warm import become, keep_warm
from instep.plain_file import plain
from instep.system.environment import POOLS
from instep.system.lease import SignsOfLife
from instep.system.processes import PAUSES_S, die_with_parent, name_process, wait_readable

NAME = "instep-warm"

USED = (
    *("instep.cli.running", "instep.client.submit", "instep.client.results"),
    *("instep.client.watchdog", "instep.client.running", "instep.control.master_process"),
    *("instep.launch.fork_server", "instep.process", "encodings.idna", "psutil"),
    *("instep.report.page.page", "instep.report.timeline", "instep.report.terminal.closing"),
)
"""Modules that the client, the master, the fork server and the workers of a run import."""


def main() -> None:
    """Fork commands until the process that asks for them has ended."""
    asked, signs = socket.socket(fileno=int(sys.argv[1])), SignsOfLife(int(sys.argv[2]))
    die_with_parent(signal.SIGKILL)
    name_process(NAME)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    import_all()
    keep_warm()
    with suppress(BrokenPipeError):
        while True:
            signs.show()
            if not wait_readable([asked.fileno()], HEARTBEAT_S):
                continue
            note, files, _, _ = socket.recv_fds(asked, 1 << 16, 2)
            if not note:
                return
            _start(msgspec.json.decode(note, type=WarmStart), files[0])


def import_all() -> None:
    """Import what a client, a master, a fork server and a worker need."""
    before = {name: os.environ.get(name) for name in POOLS}
    os.environ.update(dict.fromkeys(POOLS, "1"))  # read by libraries as they are loaded
    gc.disable()
    import torch

    from instep.recipe.quick_start import spare_dynamo

    spare_dynamo()
    torch.set_num_threads(1)
    for name in USED:
        importlib.import_module(name)
    make_ready(GROUPS)
    dump(build({"recipe": "a.py:a"}, source="a job"))  # the checks of its types are made once
    gc.freeze()
    gc.enable()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def _start(wanted: WarmStart, lock: int) -> None:
    """Fork a command; if the system has no room for it, it is tried again for some seconds."""
    try:
        for pause_s in (*PAUSES_S, 0.0):
            try:
                pid = os.fork()
                break
            except OSError:
                time.sleep(pause_s)
        else:
            return
        if not pid:
            _be(wanted, lock)
    finally:
        os.close(lock)


def _be(wanted: WarmStart, lock: int) -> None:
    """Be the command, in the fork; nothing follows."""
    try:
        nothing = os.open(os.devnull, os.O_RDONLY)
        with open(wanted.log, "ab", opener=plain) as output:
            become(
                lambda: _command(wanted.words, lock),
                name="instep",
                given=nothing,
                output=output.fileno(),
                errors=output.fileno(),
                keep=[lock],
            )
    finally:
        os._exit(1)


def _command(words: list[str], lock: int) -> int:
    """Run a command; its process and then its exit code are in the file that it has locked."""
    code = 1
    os.write(lock, f"{os.getpid()}\n".encode())
    sys.argv = ["instep", *words]
    try:
        code = run_command(words)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        os.write(lock, f"{code}\n".encode())
    return code


if __name__ == "__main__":
    main()
