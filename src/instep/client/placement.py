"""Which process this is among those that somebody else started, and how they meet.

torchrun, Slurm and MPI say so in environment variables. The processes meet
at a small file in the folder of runs: process 0 writes where its master
listens and the run's token, readable by its owner only; the others wait for
it. So no port is agreed on beforehand, none is open to strangers, and
torch's `TCPStore`, which is, is not used.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from instep.comm.channel import Address
from instep.comm.endpoint import Endpoint
from instep.errors import RunError, SpecError
from instep.units import readable_seconds

SAY_AFTER_S = 10.0
"""A wait longer than this is said aloud."""

TIMEOUT_S = 1800.0
"""How long process 0 may take to invite: where a run goes on, it reads all of a checkpoint."""


class Placement(NamedTuple):
    """Where a process stands among its fellows."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    key: str
    """The same for the processes of one start, another for the next."""

    @property
    def one_host(self) -> bool:
        """Whether all processes are on this machine."""
        return self.local_size == self.size


_DIALECTS = {
    # who: rank, size, local rank, local size, and what tells one start from another
    "torchrun": (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "Slurm": (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
    "MPI": (
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
}


def placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """Read the environment; alone, if nothing in it speaks of others.

    Raises:
        SpecError: a variable is there and is not a number, or numbers disagree, or none tells
            one start from another.
    """
    for who, (names, identity) in _DIALECTS.items():
        if names[0] not in environment or names[1] not in environment:
            continue
        rank, size = (_number(environment, name, who) for name in names[:2])
        local_rank = _number(environment, names[2], who, rank)
        local_size = _local_size(environment, names[3], who, size)
        if not 0 <= rank < size:
            raise SpecError(f"{names[0]}={rank} with {names[1]}={size}: a rank is below the size.")
        told = [environment.get(name, "") for name in identity]
        if size > 1 and not any(told):
            raise SpecError(
                f"{names[1]}={size}, and nothing in the environment tells this start from another, "
                f"whose processes it would meet. Set {identity[-1]} to the same value for all "
                "processes of one start, such as 29500."
            )
        key = "-".join([who, str(size), *told])
        return Placement(rank, size, local_rank, local_size, re.sub(r"[^\w.-]", "_", key))
    return Placement(0, 1, 0, 1, f"alone-{os.getpid()}")


def _number(environment: Mapping[str, str], name: str, who: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    try:
        return int(text or "")
    except ValueError:
        raise SpecError(
            f"{name}={text!r} in the environment: {who} gives a number there."
        ) from None


def _local_size(environment: Mapping[str, str], name: str, who: str, size: int) -> int:
    if who == "Slurm" and name not in environment:
        given = (n for n in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES") if n in environment)
        nodes = _number(environment, next(given, "SLURM_NNODES"), who, 1)
        if nodes < 1:
            raise SpecError(f"SLURM_NNODES={nodes}: tasks are on one node at least.")
        return max(1, size // nodes)
    return _number(environment, name, who, size)


def check_network(place: Placement, network: str) -> None:
    """Refuse hosts between which anybody may listen; every process finds the same.

    Raises:
        SpecError: the processes are on several hosts, and the network between
            them has not been declared private.
    """
    if not place.one_host and network != "private":
        raise SpecError(
            f"the {place.size} processes are on several hosts, and traffic between them is not "
            "encrypted. If only trusted machines reach that network, say network='private'."
        )


def host_address(place: Placement) -> str:
    """The address that process 0 listens on.

    Raises:
        SpecError: there are several hosts, and this one's name does not lead to it.
    """
    if place.one_host:
        return "127.0.0.1"
    address = socket.gethostbyname(socket.gethostname())
    if address.startswith("127.") or address == "0.0.0.0":
        raise SpecError(
            f"this host's name, {socket.gethostname()}, leads to {address}, which other hosts "
            "cannot reach. Give the name its network address (in /etc/hosts, as a rule)."
        )
    return address


def meeting_file(runs: Path, place: Placement) -> Path:
    """Where the processes of one start meet."""
    return runs / f".meeting-{place.key}.json"


def invite(file: Path, endpoint: Endpoint) -> None:
    """Process 0: leave the endpoint in the meeting file."""
    address = endpoint.address
    leave(file, {"host": address.host, "port": address.port, "token": endpoint.token})


def leave(file: Path, note: Mapping[str, object]) -> None:
    """Leave a note for other processes, all of it at once, and for this user's eyes only."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f"{file.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as out:
        json.dump(note, out)
    beside.replace(file)


def read(file: Path) -> Endpoint | None:
    """The endpoint in the meeting file; None where there is none, or what it says is of no use."""
    try:
        note = json.loads(file.read_text())
        host, port, token = note["host"], note["port"], note["token"]
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    sound = isinstance(host, str) and type(port) is int and isinstance(token, str)
    return Endpoint(Address(host, port), token) if sound and 0 < port < 1 << 16 else None


def find(
    file: Path,
    stale: Collection[str] = (),
    *,
    timeout_s: float = TIMEOUT_S,
    look: Callable[[], None] = lambda: None,
) -> Endpoint:
    """The others: wait for the endpoint.

    Args:
        file: where they meet.
        stale: tokens of which nothing is to be expected.
        timeout_s: seconds to wait at most.
        look: called now and then; what it raises ends the wait.

    Raises:
        RunError: process 0 wrote nothing in that time.
    """
    began, said = time.monotonic(), False
    while True:
        endpoint = read(file)
        if endpoint is not None and endpoint.token not in stale:
            return endpoint
        look()
        if not said and time.monotonic() - began > SAY_AFTER_S:
            print(
                f"instep: waiting for process 0 to write {file} "
                "(the folder of runs must be shared between the hosts)",
                file=sys.stderr,
            )
            said = True
        if time.monotonic() - began > timeout_s:
            raise RunError(
                f"process 0 has not written {file} in {readable_seconds(timeout_s)}. Look at what "
                "it printed last, and whether the folder of runs is shared between the hosts."
            )
        time.sleep(0.02)
