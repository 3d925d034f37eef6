"""How all members come to the state of a checkpoint, also those on machines without it.

A member that sees the run's folder reads it. Of the others, one for each part of the model asks a
member that does, unless one with the same part has read it; the rest copy from its memory.
"""

from __future__ import annotations

from pathlib import Path

import torch

from instep.comm.base import Comm
from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.state.broadcast import broadcast_snapshot
from instep.state.lent import Lender, borrowed, done


def who_sees(member: Member, comm: Comm, device: torch.device) -> list[bool]:
    """By rank, which members see the run's folder; all of them call it.

    Raises:
        PeerError: a member went away meanwhile.
    """
    seen = torch.zeros(comm.size, device=device)
    seen[comm.rank] = float(member.sees_run)
    comm.all_reduce(seen).wait()
    return [bool(each) for each in seen.tolist()]


def load(
    state: CommittedState, member: Member, comm: Comm, column: Comm, device: torch.device
) -> None:
    """Take the state of the checkpoint that the present generation begins from, or of a beginning;
    every member calls it.

    Args:
        state: of this member.
        member: this one.
        comm: all members.
        column: those that have the same place in their replicas; all, without a mesh.
        device: on which tensors are sent.

    Raises:
        CheckpointError: it cannot be used.
        PeerError: a member went away meanwhile.
    """
    form = member.form
    assert form is not None, "no generation yet"
    if not form.checkpoint:
        state.load(None, ends=form.ends)
        return
    checkpoint, sees = Path(form.checkpoint), who_sees(member, comm, device)
    if not any(sees):
        state.load(checkpoint, ends=form.ends)  # says what is wrong
    ranks = comm.size // column.size
    columns = [range(place, comm.size, ranks) for place in range(ranks)]
    borrow = [each[0] for each in columns if not any(sees[rank] for rank in each)]
    state.load(checkpoint if sees[comm.rank] else None, ends=form.ends)
    if borrow:
        _borrow(state, checkpoint, comm, sees.index(True), borrow, device, ends=form.ends)
    own = columns[comm.rank % ranks]
    has = [sees[rank] or rank in borrow for rank in own]
    if not all(has):
        state.copy(column, has.index(True), mine=has[column.rank])


def _borrow(
    state: CommittedState,
    checkpoint: Path,
    comm: Comm,
    root: int,
    borrow: list[int],
    device: torch.device,
    *,
    ends: bool,
) -> None:
    lender = Lender(checkpoint) if comm.rank == root else None
    own = lender.description() if lender is not None else None
    description = broadcast_snapshot(own, comm, root, device)
    if lender is not None:
        for rank in borrow:
            lender.serve(comm, rank, device)
    elif comm.rank in borrow:
        state.load(checkpoint, ends=ends, lent=borrowed(description, comm, root, device))
        done(comm, root, device)
