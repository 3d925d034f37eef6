"""Who has a server's part beside itself, and how one that lacks it gets it.

With `copy` the next server takes the same steps on it (`take_copies`). Where no worker is left, the
servers together have all parameters (`gather_parts`). All of this happens while a generation
begins: nothing here knows gradients or steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.named import receive_named, send_named
from instep.errors import WorkerError
from instep.records import BEGINNING, Attempt
from instep.sync.generation import Memory, Mover
from instep.sync.servers.cuts import Packed, ServerPart

PARAMETERS = "parameters/"
"""In memory that outlives a server, before the number of a server: the part that it has moved,
[bytes]."""


def take_copies(
    comm: Comm,
    servers: Sequence[int],
    mine: int,
    parts: Sequence[ServerPart],
    mover: Mover,
    lacks: bool,
) -> None:
    """Give servers that lack their state, and that of their copy, what others have of it.

    Args:
        comm: every rank of it calls this.
        servers: their ranks.
        mine: which of them this rank is; -1 for a worker.
        parts: of each server.
        mover: has, or gets, the state.
        lacks: whether this server does.

    Raises:
        WorkerError: what it lacks no server has.
        PeerError: a rank went away.
    """
    lacking = torch.zeros(len(servers))
    lacking[mine] += float(lacks)
    comm.all_reduce(lacking).wait()
    taken, count = dict[str, Tensor](), len(servers)
    for server, part in enumerate(parts):
        keeps = [server, (server + 1) % count]
        having = [one for one in keeps if not lacking[one]]
        for one in keeps:
            if not lacking[one] or mine < 0:
                continue
            if mine == one:
                if not having:
                    raise lost(mine, count)
                taken |= receive_named(comm, servers[having[0]])
            elif having and mine == having[0]:
                send_named(comm, of_part(part, mover.states()), servers[one])
    if lacks:
        mover.load_states(taken)


def gather_parts(
    comm: Comm,
    root: int,
    servers: Sequence[int],
    memory: Memory | None,
    lacks: Attempt | None,
    room: Callable[[int], Packed] | None,
) -> None:
    """Give one server the parts of the others, if it lacks them; see `generation.Scattered`.

    Args:
        comm: every rank of it calls this.
        root: the rank that is to have all.
        servers: their ranks.
        memory: of this rank; what the process before left may be there.
        lacks: on `root`, the commit whose parameters it has not all of, if there are such.
        room: on `root`, if it lacks some, where the part of a server goes.

    Raises:
        WorkerError: the part of a server is lost.
        PeerError: a rank went away.
    """
    wanted = torch.tensor([0, *BEGINNING] if lacks is None else [1, *lacks])
    comm.broadcast(wanted, root)
    told, *commit = wanted.tolist()
    if not told:
        return
    left = memory.at(*commit) if memory is not None and comm.rank in servers else None
    has = torch.zeros(len(servers), len(servers))  # which has whose part
    for server in range(len(servers)) if left else ():
        has[servers.index(comm.rank), server] = float(f"{PARAMETERS}{server}" in (left or {}))
    comm.all_reduce(has).wait()
    for server in range(len(servers)):
        givers = [rank for rank, row in zip(servers, has, strict=True) if row[server]]
        if not givers:
            raise lost(server, len(servers))
        if root in givers:
            continue
        if comm.rank == root:
            assert room is not None, "it has been part of a commit"
            packed = room(server)
            if len(packed.flat):
                comm.receive(packed.flat, givers[0]).wait()
                packed.store()
        elif comm.rank == givers[0] and left is not None:
            own = left[f"{PARAMETERS}{server}"]
            if len(own):
                comm.send(own, root).wait()


def of_part(part: ServerPart, states: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of what an optimizer keeps, that for the pieces of a part."""
    pieces = {(str(slot), f"{start}:{stop}") for slot, start, stop in part.pieces}
    every = ((name, name.split("/"), state) for name, state in states.items())
    return {name: state for name, (slot, *_, at), state in every if (slot, at) in pieces}


def lost(server: int, servers: int) -> WorkerError:
    """What to raise where no process has a server's part."""
    which = "the server"
    if servers > 1:
        which = f"server {server + 1} of {servers} (in the order of their numbers)"
    return WorkerError(
        f"the optimizer state of {which} was lost with the memory of its host, or its fork "
        "server, or that memory was damaged (it has a checksum), and no other process has it. "
        "Resume the run: it continues from the newest checkpoint."
    )
