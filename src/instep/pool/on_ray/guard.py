"""A process that runs a command for an actor of Ray, and ends with it all that came of it.

Ray kills an actor without a word, and what that has started in sessions of its own would go on.
So this process adopts all of it. Its orders come through a pipe, one byte each; once nobody can
write into that any more, the actor is gone. Way in: `main`, started by `actor.py`.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from contextlib import suppress

from instep.pool.commands.descendants import adopt_orphans, end_descendants
from instep.system.processes import die_with_parent

LEAVE, STOP = b"l", b"s"
"""Orders: the node will soon be gone; and end. The command has a signal for each."""

SIGNALS = {LEAVE: signal.SIGUSR1, STOP: signal.SIGTERM}

LOOK_S = 0.1
"""Between two looks for processes that have ended."""

END_S = 10.0
"""For the kernel to end what is killed."""


def main(words: list[str]) -> None:
    """Run a command, write its exit code to stdout, and stay until nothing that came of it is left.

    Args:
        words: descriptor of the orders, a folder to remove if the actor is gone, and the command.
    """
    orders, folder, command = int(words[0]), words[1], words[2:]
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # they are for the command
        signal.signal(each, signal.SIG_IGN)
    adopt_orphans()
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, preexec_fn=_be_command
    )
    while lives := _obey(orders, process.pid):
        if not _reap(process.pid):
            break
    if not lives:
        end_descendants(END_S)
        shutil.rmtree(folder, ignore_errors=True)


def _be_command() -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    die_with_parent(signal.SIGTERM)


def _obey(orders: int, pid: int) -> bool:
    """Do what was ordered, if anything was; whether the actor lives."""
    if not select.select([orders], [], [], LOOK_S)[0]:
        return True
    found = os.read(orders, 1)
    with suppress(ProcessLookupError):  # it has ended
        if found:
            os.kill(pid, SIGNALS[found])
    return bool(found)


def _reap(pid: int) -> bool:
    """Take the end of children, and tell that of the command; whether there are others."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == pid:
                print(os.waitstatus_to_exitcode(ended[1]), flush=True)
        return True
    return False


if __name__ == "__main__":
    main(sys.argv[1:])
