"""The fork server of a machine: imports torch once, then forks a worker at every word.

Importing torch takes seconds, a fork takes milliseconds. Whatever a fork
would break must not exist here: no thread, no store, no CUDA context. The
user's recipe file is imported before the fork too, so that its own imports are
paid once; if that leaves threads or CUDA behind, the server starts itself
again and leaves that import to the workers.

It ends, and ends its workers, when the master hangs up or on SIGTERM.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
import tomllib
from pathlib import Path
from typing import NoReturn

from instep.comm.channel import Address, Channel
from instep.comm.messages import Exited, Hello, KillAll, StartWorker, Welcome
from instep.errors import PeerError
from instep.run.launch.base import Seat
from instep.run.processes import die_with_parent, exit_code_of

_NO_PRELOAD = "INSTEP_NO_PRELOAD"
_SEAT = "INSTEP_SEAT"


def main() -> None:
    """Serve one run."""
    began = time.time()
    die_with_parent(signal.SIGTERM)
    note = os.environ.pop(_SEAT, "") or sys.stdin.readline()
    seen = json.loads(note)
    seat = Seat(Address(seen["host"], seen["port"]), seen["token"])
    channel = Channel.connect(seat.address)
    hello = Hello(token=seat.token, role="host", number=0, pid=os.getpid())
    channel.send(hello)
    welcome = channel.wait_for(Welcome)
    phases = {"interpreter": began - welcome.started}
    _import_torch()
    phases["import torch"] = time.time() - began
    preloading = time.time()
    recipe = Path(tomllib.loads(welcome.job)["recipe"].rpartition(":")[0])
    if not os.environ.get(_NO_PRELOAD) and not _preload(recipe):
        _start_again(note)
    phases["import recipe"] = time.time() - preloading
    Server(channel, seat, phases).serve()


def _import_torch() -> None:
    import torch

    from instep.run.quick_start import spare_dynamo

    spare_dynamo()
    torch.set_num_threads(1)
    import instep.run.worker  # noqa: F401  what a worker needs, imported before the fork


def _preload(recipe: Path) -> bool:
    """Import the recipe's file; False if a fork would now be unsafe."""
    import torch

    from instep.run.recipe import load_module

    try:
        load_module(recipe)
    except (Exception, SystemExit):
        pass  # each worker meets the same error, and reports it
    return threading.active_count() == 1 and not torch.cuda.is_initialized()


def _start_again(note: str) -> NoReturn:
    environment = {**os.environ, _NO_PRELOAD: "1", _SEAT: note}
    command = [sys.executable, "-P", "-m", "instep.run.launch.fork_server"]
    os.execve(sys.executable, command, environment)


class Server:
    """Forks, reaps, reports."""

    def __init__(self, channel: Channel, seat: Seat, phases: dict[str, float]) -> None:
        self._channel, self._seat, self._phases = channel, seat, phases
        self._workers: dict[int, int] = {}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._ending = False

    def serve(self) -> None:
        """Until the master hangs up."""
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            while not self._ending:
                self._reap()
                self._obey()  # before waiting: messages may have come together with the welcome
                select.select([self._channel.fileno(), self._wake_read], [], [])
        except PeerError:
            pass
        finally:
            self._kill_all()

    def _end(self, *_: object) -> None:
        self._ending = True

    def _obey(self) -> None:
        while (message := self._channel.poll()) is not None:
            if isinstance(message, StartWorker):
                self._fork(message)
            elif isinstance(message, KillAll):
                self._kill_all(wait=False)

    def _fork(self, order: StartWorker) -> None:
        forked = time.time()
        pid = os.fork()
        if pid:
            self._workers[pid] = order.number
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)
            self._channel.close()
            _redirect(Path(order.log))
            from instep.run.worker import main as work

            code = work(self._seat, order.number, {**self._phases, "forked": forked})
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)  # nothing of the server's is run down in its child

    def _reap(self) -> None:
        while self._wake_read in select.select([self._wake_read], [], [], 0)[0]:
            os.read(self._wake_read, 4096)
        while self._workers:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            number = self._workers.pop(pid, None)
            if number is not None:
                self._channel.send(Exited(number=number, pid=pid, code=exit_code_of(status)))

    def _kill_all(self, *, wait: bool = True) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        while wait and self._workers:
            pid, _ = os.waitpid(-1, 0)
            self._workers.pop(pid, None)


def _redirect(log: Path) -> None:
    """Standard output and error to a file, standard input from nowhere."""
    try:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full disk, say: then where the server's own output goes
        output = os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)


if __name__ == "__main__":
    main()
