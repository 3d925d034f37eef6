"""The actor on a node of a Ray cluster that has `instep host` there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from instep.plain_file import PRIVATE, replace_plain
from instep.pool.on_ray.guard import LEAVE, STOP

STAY_S = 2.0
"""An actor whose command has ended, with all that came of it, waits for another one for so long."""


class NodeCommand:
    """Runs a command where it was placed, and ends once nothing is left of what came of it.

    Its process outlives the program that has asked for it, as its name is known to the cluster.
    """

    def __init__(self) -> None:
        self._lock, self._guards = threading.Lock(), list[_Guard]()
        self._folder = tempfile.mkdtemp(prefix="instep-ray-")  # of all commands, one after another

    def node(self) -> str:
        """The id of its node."""
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def run(self, words: Sequence[str], files: Mapping[str, bytes]) -> int:
        """Run a command to its end, or wait for the one that runs; its exit code.

        Args:
            words: of the command; `{python}` in them is that of the node, and `{files}` a folder.
            files: that the command needs there, by name. Nobody else can read them.
        """
        with self._lock:
            for name, data in files.items():
                replace_plain(Path(self._folder) / name, data, PRIVATE)
            if not self._guards or self._guards[-1].code is not None:
                found = [word.replace("{files}", self._folder) for word in words]
                found = [word.replace("{python}", sys.executable) for word in found]
                self._guards.append(_Guard(found, self._folder, self._end_if_over))
            guard = self._guards[-1]
        guard.ended.wait()
        return guard.code if guard.code is not None else 1

    def leave(self) -> None:
        """Tell the command that its node will soon be gone."""
        self._order(LEAVE)

    def stop(self) -> None:
        """Ask the command to end."""
        self._order(STOP)

    def _order(self, what: bytes) -> None:
        for guard in self._guards[-1:]:
            guard.order(what)

    def _end_if_over(self) -> None:
        """End this process, if nothing is left and nobody asks for another command."""
        time.sleep(STAY_S)
        with self._lock:
            if all(guard.over for guard in self._guards):
                shutil.rmtree(self._folder, ignore_errors=True)
                os._exit(0)


class _Guard:
    """The guard of one command, as the actor sees it.

    Args:
        words: of the command.
        folder: that the guard removes if the actor is gone.
        at_end: called once nothing is left of what came of the command.
    """

    def __init__(self, words: Sequence[str], folder: str, at_end: Callable[[], None]) -> None:
        self.code: int | None = None
        self.ended, self.over = threading.Event(), False
        (orders, self._orders), (said, says) = os.pipe(), os.pipe()
        guard = [sys.executable, "-m", "instep.pool.on_ray.guard", str(orders), folder, *words]
        # no child of the actor, whose children Ray may kill one by one
        apart = ["/bin/sh", "-c", '"$@" &', "sh", *guard]
        process = subprocess.Popen(apart, stdout=says, pass_fds=(orders,), start_new_session=True)
        os.close(orders)
        os.close(says)
        arguments = process, said, at_end
        threading.Thread(target=self._follow, args=arguments, daemon=True).start()

    def order(self, what: bytes) -> None:
        """Give an order, unless the command has ended."""
        if self.code is None:
            with suppress(OSError):
                os.write(self._orders, what)

    def _follow(
        self, process: subprocess.Popen[bytes], said: int, at_end: Callable[[], None]
    ) -> None:
        with process, open(said, "rb") as lines:
            line = lines.readline().decode().strip()
            self.code = int(line) if line.lstrip("-").isdecimal() else 1
            self.ended.set()
            lines.read()  # until nothing is left of what came of the command
        os.close(self._orders)
        self.over = True
        at_end()
