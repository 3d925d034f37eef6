"""Files of a checkpoint that several members write, since each has what the others have not."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.errors import CheckpointError
from instep.state.save import CheckpointShard
from instep.worker.loop.shard_files import write_shards

Shards: TypeAlias = dict[str, CheckpointShard] | CheckpointError
"""Files that several members have written, by the name of their group; or why there are none."""


class Parts:
    """Has all members write what they alone have: ranks of a mesh, and strategies with laws."""

    def __init__(self, engine: Engine, member: Member) -> None:
        self._engine, self._member = engine, member

    @property
    def many(self) -> bool:
        """Whether a checkpoint has files that several members write."""
        return bool(self._engine.turn.strategy.laws) or self._member.job.mesh.ranks > 1

    def write(self, due: bool, *, last: bool) -> tuple[bool, dict[str, Tensor], Shards]:
        """Have all write what they alone have, if a checkpoint is due: only the worker that saves
        knows which are the best.

        Returns:
            Whether it is; what single workers have; the files.

        Raises:
            PeerError: a member was lost.
        """
        engine = self._engine
        save = torch.tensor([float(due)], device=engine.device)
        engine.comm.broadcast(save)
        if not save.item():
            return False, {}, {}
        own = engine.own_state()
        return True, own, write_shards(engine, self._member, own, last=last)
