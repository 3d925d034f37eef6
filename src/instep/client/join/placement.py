"""Which process this is among those that torchrun, Slurm or MPI started.

They say so in environment variables. How the processes then meet is not known here.
Way in: `placement`.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from typing import NamedTuple

from instep.errors import SpecError


class Placement(NamedTuple):
    """The place of a process among the processes of one start."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    key: str
    """The same for all processes of one start, different for the next start."""

    @property
    def one_host(self) -> bool:
        """Whether all processes are on this machine."""
        return self.local_size == self.size


_VARIABLES = {
    # launcher: rank, size, local rank, local size, and what tells one start from another
    "torchrun": (
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_ADDR", "MASTER_PORT"),
    ),
    "MPI": (  # before Slurm, in whose jobs mpirun is used too
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
    ),
    "Slurm": (
        ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ),
}

_NO_TASKS = ("", "4294967290", "4294967291")
"""What SLURM_STEP_ID says in a batch script and in an interactive shell."""


def placement(environment: Mapping[str, str] = os.environ) -> Placement:
    """Read the environment; a process alone, if it names no others.

    Raises:
        SpecError: a variable is not a number, or numbers disagree, or nothing tells one start
            from another.
    """
    for who, (names, identity) in _VARIABLES.items():
        if names[0] not in environment or names[1] not in environment:
            continue
        if who == "Slurm" and environment.get("SLURM_STEP_ID", "") in _NO_TASKS:
            continue  # there Slurm says that this is task 0 of all that the job may start
        rank, size = (_number(environment, name, who) for name in names[:2])
        local_rank = _number(environment, names[2], who, rank)
        local_size = _local_size(environment, names[3], who, size)
        if not 0 <= rank < size:
            raise SpecError(f"{names[0]}={rank} with {names[1]}={size}: a rank is below the size.")
        ids = [environment.get(name, "") for name in identity]
        if size > 1 and not any(ids):
            raise SpecError(
                f"{names[1]}={size}, and nothing in the environment tells this start from another, "
                f"whose processes it could meet. Set {identity[-1]} to the same value for all "
                "processes of one start, such as 29500."
            )
        key = "-".join([who, str(size), *ids])
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


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address.

    Raises:
        SpecError: the name leads to none.
    """
    return address_of(host).startswith("127.")


def address_of(host: str) -> str:
    """The address that a name leads to.

    Raises:
        SpecError: it leads to none.
    """
    try:
        return socket.gethostbyname(host)
    except OSError as error:
        raise SpecError(
            f"rendezvous: the name {host!r} leads to no address ({error.strerror}). Give the "
            "address of the machine of process 0."
        ) from None


def host_address(place: Placement) -> str:
    """The address that process 0 listens on.

    Raises:
        SpecError: there are several hosts, and this one's name leads to no address that they reach.
    """
    if place.one_host:
        return "127.0.0.1"
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
        unfit = address.startswith("127.") or address == "0.0.0.0"
    except OSError as error:
        address, unfit = f"no address ({error.strerror})", True
    if unfit:
        raise SpecError(
            f"this host's name, {name}, leads to {address}, which other hosts cannot reach. Give "
            "the name its network address (in /etc/hosts, as a rule), or say where process 0 is "
            "found with rendezvous='HOST:PORT'."
        )
    return address
