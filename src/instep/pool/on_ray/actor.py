"""The actor on a node of a Ray cluster that has `instep host` there."""

from __future__ import annotations

import os
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
        self._lock, self._guard = threading.Lock(), _Guard.none()

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
            if self._guard.code is not None:
                self._guard = _Guard(_at_home(words), files, self._end_if_over)
            guard = self._guard
        guard.ended.wait()
        return guard.code if guard.code is not None else 1

    def leave(self) -> None:
        """Tell the command that its node will soon be gone."""
        self._guard.order(LEAVE)

    def stop(self) -> None:
        """Ask the command to end."""
        self._guard.order(STOP)

    def _end_if_over(self, guard: _Guard) -> None:
        time.sleep(STAY_S)
        with self._lock:
            if guard is self._guard:  # nobody has asked for another command
                os._exit(0)


class _Guard:
    """The guard of one command, as the actor sees it."""

    def __init__(
        self,
        words: Sequence[str],
        files: Mapping[str, bytes],
        over: Callable[[_Guard], None] | None,
    ) -> None:
        self.code: int | None = None
        self.ended = threading.Event()
        if over is None:
            self.code = 0
            self.ended.set()
            return
        folder = tempfile.mkdtemp(prefix="instep-ray-")
        for name, data in files.items():
            replace_plain(Path(folder) / name, data, PRIVATE)
        (orders, self._orders), (said, says) = os.pipe(), os.pipe()
        guard = [sys.executable, "-m", "instep.pool.on_ray.guard", str(orders), folder]
        command = [word.replace("{files}", folder) for word in words]
        # no child of the actor, whose children Ray may kill one by one
        apart = ["/bin/sh", "-c", '"$@" &', "sh", *guard, *command]
        process = subprocess.Popen(apart, stdout=says, pass_fds=(orders,), start_new_session=True)
        os.close(orders)
        os.close(says)
        threading.Thread(target=self._follow, args=(process, said, over), daemon=True).start()

    @classmethod
    def none(cls) -> _Guard:
        """Make one of a command that has ended."""
        return cls((), {}, None)

    def order(self, what: bytes) -> None:
        """Give an order, unless the command has ended."""
        if self.code is None:
            with suppress(OSError):
                os.write(self._orders, what)

    def _follow(
        self, process: subprocess.Popen[bytes], said: int, over: Callable[[_Guard], None]
    ) -> None:
        with process, open(said, "rb") as lines:
            line = lines.readline().decode().strip()
            self.code = int(line) if line.lstrip("-").isdecimal() else 1
            self.ended.set()
            lines.read()  # until nothing is left of what came of the command
        os.close(self._orders)
        over(self)


def _at_home(words: Sequence[str]) -> list[str]:
    return [word.replace("{python}", sys.executable) for word in words]
