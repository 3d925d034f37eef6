"""A copy of a rank's last commit in memory of its host, for a replica that no other can restore.

A replica that loses a rank is started again whole. Where it is the only one, nobody else has the
parameters. So each of its ranks copies what a commit left into memory that outlives it; the
processes that take their places continue from the newest commit of which all have a copy. What a
snapshot holds is not known here.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.records import Attempt
from instep.state.boxes import read_cut
from instep.state.snapshot import Snapshot, tied_names
from instep.system.host_memory import HostMemory

_FACTS = "facts"
_NOTHING, _SLOTS = Attempt(-1, -1, -1), 2


class HostCopy:
    """Two slots of host memory, for the last commit and the one that is being copied."""

    def __init__(self) -> None:
        self._memory = HostMemory(part=1)
        self._layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        self.lasts = self._memory.outlives
        """Whether the memory outlives this process; else nothing is copied."""

    @torch.no_grad()
    def keep(self, snapshot: Snapshot, at: Attempt) -> None:
        """Copy what a commit left.

        Raises:
            NoRoom: this process may not take so much memory.
        """
        tensors, facts = _flat(snapshot)
        layout = {name: (tuple(each.shape), each.dtype) for name, each in tensors.items()}
        layout[_FACTS] = (_room(len(facts)),), torch.uint8
        if layout != self._layout:
            self._memory.lay_out(layout)
            self._layout = layout
        slots = self._memory.stage(*at)
        for name, tensor in tensors.items():
            slots[name].copy_(tensor)
        slots[_FACTS].zero_()
        slots[_FACTS][: len(facts)].copy_(torch.frombuffer(bytearray(facts), dtype=torch.uint8))
        self._memory.staged(*at)

    def of_all(self, comm: Comm, device: torch.device) -> tuple[Attempt, Snapshot] | None:
        """What earlier processes left of the newest commit of which all ranks have a copy.

        A rank that is killed in the middle of a copy has the commit before it, and so have the
        others: none begins a commit before all have ended the last one. What a rank has of a newer
        commit is forgotten; its step is taken again.

        Args:
            comm: the replica's ranks; each calls this.
            device: of the tensors that `comm` sums.

        Returns:
            The commit, and what this rank had of it; tensors are copies.
        """
        mine = self.held()
        table = torch.zeros(comm.size, _SLOTS, len(_NOTHING), dtype=torch.int64, device=device)
        table[comm.rank] = torch.tensor([*mine, _NOTHING, _NOTHING][:_SLOTS])
        comm.all_reduce(table).wait()
        ranks = [{Attempt(*each) for each in row} - {_NOTHING} for row in table.tolist()]
        common = set.intersection(*ranks)
        if not common:
            return None
        newest = max(common)
        return newest, self.back_to(newest)

    def held(self) -> list[Attempt]:
        """The commits of which there are copies, the newest first."""
        stamps = self._memory.stamps() if self.lasts else []
        return [Attempt(*stamp) for stamp in stamps if self._memory.at(*stamp) is not None]

    def back_to(self, at: Attempt) -> Snapshot:
        """What there is of one of these commits; newer ones are forgotten. Tensors are copies."""
        for each in self.held():
            if each > at:
                self._memory.forget(*each)
        held = self._memory.at(*at)
        assert held is not None, "it is held"
        return _snapshot(held)

    def clear(self) -> None:
        """Forget what was copied: another replica or a checkpoint has the state."""
        self._memory.clear()

    def drop(self) -> None:
        """Give back the memory; nothing is copied from now on."""
        self._memory.drop()
        self.lasts = False


def _flat(snapshot: Snapshot) -> tuple[dict[str, Tensor], bytes]:
    tensors: dict[str, Tensor] = {}
    firsts: dict[str, dict[str, str]] = {}
    for group, named in snapshot.tensors.items():
        firsts[group] = {name: name for name in named} | tied_names(named)
        tensors |= {f"{group} {name}": named[name] for name in firsts[group].values()}
    rest = {"step": snapshot.step, "facts": snapshot.facts, "cuts": snapshot.cuts, "firsts": firsts}
    return tensors, msgspec.json.encode(rest)


def _snapshot(held: dict[str, Tensor]) -> Snapshot:
    rest: dict[str, Any] = msgspec.json.decode(bytes(held[_FACTS].numpy()).rstrip(b"\0"))
    groups: dict[str, dict[str, str]] = rest["firsts"]
    copies = {name: tensor.clone() for name, tensor in held.items() if name != _FACTS}
    return Snapshot(
        step=rest["step"],
        tensors={
            group: {name: copies[f"{group} {first}"] for name, first in firsts.items()}
            for group, firsts in groups.items()
        },
        facts=rest["facts"],
        cuts={name: read_cut(*cut) for name, cut in rest["cuts"].items()},
    )


def _room(size: int) -> int:
    """Bytes for facts of a size, with some left, so that the layout seldom changes."""
    return 1 << (size + size // 4).bit_length()
