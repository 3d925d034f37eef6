"""How the parameters are shared out among servers, and what of it lies on this rank.

It is the same in all generations of a process. Nothing here knows gradients or steps. Way in:
`SharedParts`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.buckets import Bucket
from instep.comm.codecs.base import Codec
from instep.errors import SpecError
from instep.records import Attempt
from instep.sync.generation import Memory, Mover, Servers
from instep.sync.servers.copies import lost, take_copies
from instep.sync.servers.cuts import Packed, cut
from instep.sync.servers.differences import Differences
from instep.sync.servers.kept_rows import KeptRows
from instep.sync.servers.own_part import OwnPart


class SharedParts:
    """Cuts the parameters, and the state that the optimizer has for them.

    Args:
        buckets: of the parameters.
        parameters: by slot.
        mover: the optimizer.
        servers: how many there are.
        mine: which of them this rank is; -1 for a worker.
        copy: whether each keeps a copy of the part before its own.
        codec: how segments look on the wire; None where all travel as they are.
        encoded: whether a parameter is encoded.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[Parameter],
        mover: Mover,
        *,
        servers: int,
        mine: int,
        copy: bool,
        codec: Codec | None,
        encoded: Callable[[Tensor], bool],
    ) -> None:
        self.parameters, self.mover, self.codec, self.copy = parameters, mover, codec, copy
        self._servers, self._mine = servers, mine
        self.parts = cut(buckets, parameters, servers, by_element=mover.by_element)
        """The part of each server."""
        kept = range(servers) if mine < 0 else [mine]
        if mine >= 0 and copy:
            kept = [mine, (mine - 1) % servers]
        self.held = {server: Packed(self.parts[server].pieces, parameters) for server in kept}
        """By server, its part as the workers hold it, moved towards the next commit. A worker has
        all; a server has its own, and that of which it keeps a copy."""
        every = [(n, segment) for n, part in enumerate(self.parts) for segment in part.segments]
        every = [(n, s) for n, s in every if encoded(parameters[s.pieces[0].slot])]
        self.encoded = [segment for _, segment in every]
        """Those that are encoded."""
        self.back: Differences | None = None
        """With a codec, what goes back to the workers."""
        if codec is not None:
            here = {segment: self.held[n] for n, segment in every if n in self.held}
            self.back = Differences(codec, here)
        self.own: OwnPart | None = None
        """A server's part; None on a worker."""
        if mine < 0:
            mover.hold({})
        else:
            self.own = OwnPart(mine, self.held, parameters, mover, self.back)

    @property
    def whole(self) -> bool:
        """Whether this rank has all parts."""
        return len(self.held) == self._servers

    def room(self, server: int) -> Packed:
        """Room for the part of a server."""
        return Packed(self.parts[server].pieces, self.parameters)

    def take(self, left: Mapping[str, Tensor] | None, memory: Memory | None) -> None:
        """A server takes up what the process before has left in memory, if there was one."""
        if self.own is not None and left is not None:
            assert memory is not None, "it has left something there"
            self.own.take(left)
            self.own.at = Attempt(*memory.stamps()[0])

    def begin(self, memory: Memory | None, rows: KeptRows | None) -> None:
        """A generation begins; `memory` and `rows` are a server's, as for `OwnPart.begin`."""
        if self.own is not None:
            assert memory is not None, "a server has memory"
            self.own.begin(memory, rows)
        for packed in self.held.values() if self._mine >= 0 or self.back is not None else ():
            packed.load()

    def hold(self, comm: Comm, servers: Sequence[int], at: Attempt, *, begins: bool) -> None:
        """Have memory hold the state of the last commit, which is what the optimizer has then.

        Args:
            comm, servers: of the generation.
            at: the last commit.
            begins: whether the optimizer has its state.

        Raises:
            WorkerError: it was lost with the process before.
        """
        own, lacks, has = self.own, False, None
        if own is not None:
            has = own.at
            lacks = bool(at.number) and not begins if has is None else has[:2] != at[:2]
        if self.copy:
            take_copies(comm, servers, self._mine, self.parts, self.mover, lacks)
        elif lacks:
            raise lost(self._mine, self._servers)
        if own is not None and (has is None or lacks):
            own.stage(at)
            own.at = at

    def store(self, there: Sequence[bool]) -> None:
        """Give the model what it is to have, of parameters that a rank has used."""
        for segment in self.back.payloads if self.back is not None and self.own is None else ():
            assert self.back is not None
            self.back.take(segment, there)
        for packed in self.held.values():
            packed.store()


def checked(
    servers: Servers | None, comm: Comm, device: torch.device, *, copy: bool, tables: bool
) -> Servers:
    """The servers of a generation.

    Args:
        servers: what it says of them.
        comm: its members.
        device: has the parameters.
        copy: whether servers are to keep copies of each other's parts.
        tables: whether they have embeddings.

    Raises:
        SpecError: they cannot serve this job.
    """
    if servers is None or not servers.ranks or len(servers.ranks) == comm.size:
        raise SpecError(
            "sync.name = 'server_sync' needs at least one server and one worker. Set "
            "sync.servers, or use all_reduce."
        )
    if device.type != "cpu":
        raise SpecError(
            f"sync.name = 'server_sync' works in the memory of the host, and the model is on "
            f"{device}. Set train.device = 'cpu', or use all_reduce."
        )
    if copy and len(servers.ranks) < 2:
        raise SpecError(
            "sync.options.copy = true: another server keeps the copy, so there must be two. "
            "Set sync.servers = 2 or more, or leave it out."
        )
    if copy and tables:
        raise SpecError(
            "sync.options.copy = true keeps no copies of embeddings (sparse=True). Leave "
            "one of the two out."
        )
    return servers
