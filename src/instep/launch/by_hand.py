"""Machines on each of which somebody starts `instep host`, in any order.

Each keeps one connection to this end, on which it is told to start its fork server; `joining.py`
is the other end. One that is lost counts as killed, and takes its place again when it is back.
Everything happens in the caller's thread: each call takes in what has arrived. Ways in:
`ByHandLauncher`, and `JoinedMachines` for another launcher at whose gate machines join.
"""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from instep.comm.protocol import messages as m
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError
from instep.job.launch import ClusterSpec, LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.gate import Gate
from instep.launch.join_folder import JoinFolder
from instep.launch.local import TIMEOUT_S
from instep.launch.node import Needs
from instep.store.folder import host_log, id_of
from instep.units import host_and_port
from instep.words import plural


@dataclass
class _Host:
    order: m.Serve | None = None
    """What its machine is to do, also when it is back."""
    logs: Path = Path()
    code: int | None = None


class JoinedMachines:
    """Has machines that join at a gate start fork servers.

    Args:
        gate: at which they join.
        count: how many there are.
        needs: what each must have.
    """

    def __init__(self, gate: Gate, count: int, needs: Needs) -> None:
        self._gate, self._hosts = gate, [_Host() for _ in range(count)]
        self._needs: dict[str, Any] = msgspec.to_builtins(needs)

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Ask a machine for a fork server, at once or when it is back."""
        host = self._hosts[endpoint.host]
        host.code, host.logs = None, logs
        table: dict[str, Any] = msgspec.to_builtins(endpoint)
        run_id = id_of(logs.parent)
        host.order = m.Serve(endpoint=table, logs=str(logs), run_id=run_id, needs=self._needs)
        self._gate.send(endpoint.host, host.order)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of a fork server; None while it runs, or until its machine is back."""
        self.turn(0.0)
        return self._hosts[host].code

    def end_if_stopped(self, host: int = 0) -> None:
        """Ask a machine to kill its fork server, if it was stopped."""
        self._gate.send(host, m.EndIfStopped())

    def give_back(self, host: int) -> None:
        """Ask a machine to leave, which ends what it has started."""
        self._gate.send(host, m.Leave())
        self._hosts[host].order, self._hosts[host].code = None, -signal.SIGKILL

    def stop(self) -> None:
        """End what all machines have started; one that is cut off does so by itself."""
        self._gate.close(2 * TIMEOUT_S)

    def turn(self, timeout_s: float) -> None:
        """Take in what arrives within a time."""
        for number, message in self._gate.turn(timeout_s):
            host = self._hosts[number]
            match message:
                case m.Joined() if host.order is not None and host.code is None:
                    self._gate.send(number, host.order)
                case m.HostEnded(code=code, detail=detail):
                    host.code = code
                    if detail:
                        with suppress(OSError), open(host_log(host.logs, number), "a") as log:
                            log.write(detail + "\n")
                case None if host.order is not None and host.code is None:
                    host.code = -signal.SIGKILL


class ByHandLauncher:
    """Has the machines of a cluster start fork servers, once they have joined.

    Args:
        cluster: which they are.
        needs: what each must have.
        address: of this machine, to listen on.

    Raises:
        SpecError: nothing can listen at `cluster.master`, or the tokens cannot be written.
    """

    def __init__(self, cluster: ClusterSpec, needs: Needs, address: str) -> None:
        self._cluster, self._address, self._waiting = cluster, address, False
        self._folder = JoinFolder(Path(cluster.certificates))
        self._folder.prepare(len(cluster.places))
        _, port = host_and_port(cluster.master)
        self._gate = Gate((address, port), cluster.places, self._folder, self._say)
        self._machines = JoinedMachines(self._gate, len(cluster.places), needs)

    @classmethod
    def of(cls, job: JobSpec) -> ByHandLauncher:
        """Listen for the machines of a job's cluster."""
        for key in ("nodes", "cpus", "gpus", "address", "options"):
            if value := getattr(job.launch, key):
                raise SpecError(
                    f"launch.{key} = {value!r} with launch.on = 'by_hand': [cluster] names the "
                    "machines, and where they find this one. Leave it out."
                )
        return cls(job.cluster, Needs.of(job), _address(job))

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """Once all machines are there; waits for them, and says for which."""
        count, said, self._waiting = len(self._cluster.places), "", True
        self._say(f"waiting for {plural(count, 'machine')}, each with its own token file:")
        for number, place in enumerate(self._cluster.places):
            file = self._folder.token_file(number)
            command = f"instep host --join {self._cluster.master} --token-file {file}"
            self._say(f"{place}: {command}")
        while missing := ", ".join(self._gate.missing):
            if missing != said:
                said = missing
                self._say(f"missing {missing}")
            self._machines.turn(0.2)
        self._say("all machines have joined")
        self._waiting = False
        return msgspec.structs.replace(launch, nodes=count, address=self._address)

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Ask a machine for a fork server, at once or when it is back."""
        self._machines.start(endpoint, logs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of a fork server; None while it runs, or until its machine is back."""
        return self._machines.ended(host)

    def end_if_stopped(self, host: int = 0) -> None:
        """Ask a machine to kill its fork server, if it was stopped."""
        self._machines.end_if_stopped(host)

    def stop(self) -> None:
        """End what all machines have started; one that is cut off does so by itself."""
        self._machines.stop()

    def _say(self, text: str) -> None:
        if self._waiting:  # later the run itself says what happens
            print(f"cluster {text}", file=sys.stderr, flush=True)


def _address(job: JobSpec) -> str:
    """Where to listen, as a number.

    Raises:
        SpecError: it is no address, or all of them.
    """
    name, given = host_and_port(job.cluster.master)[0], f"cluster.master = {job.cluster.master!r}"
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        why = error.strerror or error
        raise SpecError(f"{given}: {name!r} leads to no address ({why}).") from None
    if address == "0.0.0.0":
        raise SpecError(
            f"{given} means every address of this machine, and the run would listen on all its "
            "networks. Give the one that the other machines reach."
        )
    return address
