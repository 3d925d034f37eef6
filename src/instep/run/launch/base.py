"""What a launcher is: it brings up host processes, and ends whatever it brought up.

Beside it what the processes are told: where their master is, and the token
by which it knows them.
"""

from __future__ import annotations

import secrets
import signal
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from instep.comm.channel import Address, Hub, listen

END = signal.SIGUSR1
"""What has a fork server end. SIGTERM it ignores: who stops a whole service sends that to every
process, and it is the client that decides what follows."""

INSIDE = "INSTEP_INSIDE"
"""Set in every process that a launcher starts: a recipe that starts another run is refused."""

POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

SETTINGS = {INSIDE: "1", **dict.fromkeys(POOLS, "1")}
"""Environment of a host: one thread for libraries that would start a pool before the fork."""


@dataclass(frozen=True)
class Seat:
    """All that a new process needs to find its master and be believed."""

    address: Address
    token: str
    host: int = 0
    """The number of the host that the process is on."""


def host_log(logs: Path, host: int) -> Path:
    """Where a host prints; the first has the plain name."""
    return logs / (f"host-{host}.log" if host else "host.log")


class Switchboard:
    """Where a run's masters listen, one after the other, before the first is there.

    Args:
        host: address to listen on.
        listener: that listens already, and was made by another process.
        token: that the other process chose.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.listener = listener or listen(host)
        name = self.listener.getsockname()
        self.seat = Seat(Address(name[0], name[1]), token or secrets.token_hex(16))

    @cached_property
    def hub(self) -> Hub:
        """The connections, for the one process that takes them in."""
        return Hub(self.listener)

    def close(self) -> None:
        """Hang up on everyone; a second call does nothing."""
        if "hub" in self.__dict__:
            self.hub.close()
        self.listener.close()


class Launcher(Protocol):
    """Starts a host on each machine; it starts the workers there, at the master's word."""

    def start(self, seat: Seat, logs: Path) -> None:
        """Bring up the host of number `seat.host`. Returns at once; it calls the master itself.

        Args:
            seat: where the master is.
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
