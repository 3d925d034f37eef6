"""What a launcher is: it starts host processes, and ends what it started."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from instep.comm.endpoint import Endpoint


class Launcher(Protocol):
    """Starts a host on each machine; it starts the workers there, as the master asks."""

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Bring up the host of number `endpoint.host`. Returns at once; it calls the master itself.

        Args:
            endpoint: where the master is.
            logs: existing folder for what the processes print.
        """

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the host that was started last under this number, negative for a
        signal; None while it runs. Another that it has brought up may have taken its place."""

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the host that was started last under this number, and nothing of what it has
        started, if it was stopped (SIGSTOP), as far as that can be seen from here."""

    def stop(self) -> None:
        """End the host and all it has started, now, and wait until they are gone.

        A second call does nothing.
        """
