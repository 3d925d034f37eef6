"""Files of a checkpoint that servers or the ranks of a mesh write together."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.state.capture import STRATEGY
from instep.engine.state.loading import who_sees
from instep.engine.state.parts import rank_state
from instep.errors import CheckpointError
from instep.state.boxes import MeshRank
from instep.state.files.manifest import MANIFEST, FileEntry, reason
from instep.state.files.room import LAST_RESERVE_BYTES, RESERVE_BYTES
from instep.state.files.sending import receive_file, send_file
from instep.state.files.staging import SAVING, write_tensors
from instep.state.pieces import CUTS, SHARD, TABLE
from instep.state.save import CheckpointShard
from instep.state.snapshot import PART

_ROW = 33
"""Size and SHA-256 of a file, in numbers."""


class _MemberFile(NamedTuple):
    """A file of a checkpoint that one member writes."""

    path: Path
    writer: int
    """Its rank among the members."""
    who: str
    """For messages."""


def write_shards(
    engine: Engine,
    member: Member,
    own: Mapping[str, Tensor] = MappingProxyType({}),
    *,
    last: bool = False,
) -> dict[str, CheckpointShard] | CheckpointError:
    """Have servers, and the ranks of the first replica if it is a mesh, write what they alone have
    of the last commit; all members call it.

    Training pauses until all files are written.

    Args:
        engine: has just committed a step.
        member: this one.
        own: on a mesh, state that single workers have, summed over the ranks of this place in
            all replicas, as `KIND/PARAMETER`.
        last: whether the commit is the last of this session.

    Returns:
        By the name of the group, the files that the checkpoint will contain; or the error, if a
        member could not write its part.

    Raises:
        PeerError: a member went away meanwhile.
    """
    comm, form, step = engine.comm, member.form, engine.state.progress.step
    assert form is not None, "no generation yet"
    folder = member.run / "checkpoints"
    files, mine = dict[str, _MemberFile](), dict[str, tuple[Mapping[str, Tensor], dict[str, str]]]()
    parts = member.job.mesh.ranks if member.job.mesh.ranks > 1 else 0
    servers, tables = comm.size - len(form.servers), engine.tables
    for kind, first, workers in (
        (f"{PART}-", 0, form.members[:parts] if parts else ()),
        (SHARD, servers, form.servers),
        (TABLE, servers, form.servers if tables is not None else ()),
    ):
        for number, worker in enumerate(workers):
            path = folder / f"{SAVING}{step}-{kind}{number}-{form.generation}"
            who = f"{'server' if first == servers else 'worker'} {worker}"
            files[f"{kind}{number}"] = _MemberFile(path, first + number, who)
    if comm.rank < parts:
        snapshot = engine.state.capture(engine.buffers.moved)
        groups = snapshot.tensors.items()
        remembered = {group: state for group, state in groups if group.startswith(STRATEGY)}
        rank = MeshRank(member.job.mesh, member.number)
        tensors, cuts = rank_state(own, remembered, engine.model, rank)
        tensors |= snapshot.tensors[PART]
        cuts |= {name: cut for name, cut in snapshot.cuts.items() if name in tensors}
        mine[f"{PART}-{comm.rank}"] = tensors, {CUTS: json.dumps(cuts)}
    if shard := engine.own.shard():
        mine[f"{SHARD}{comm.rank - servers}"] = shard, {}
    if tables is not None and comm.rank >= servers:
        mine[f"{TABLE}{comm.rank - servers}"] = tables.shard()
    reserve = LAST_RESERVE_BYTES if last else RESERVE_BYTES
    return _write_files(comm, member, step, files, mine, engine.device, reserve)


def _write_files(
    comm: Comm,
    member: Member,
    step: int,
    files: Mapping[str, _MemberFile],
    mine: Mapping[str, tuple[Mapping[str, Tensor], dict[str, str]]],
    device: torch.device,
    reserve: int,
) -> dict[str, CheckpointShard] | CheckpointError:
    """Each member writes its own, rank 0 also those of members that do not see the run's folder;
    all learn whether all could. As `write_shards`."""
    told, sees = torch.zeros(len(files), _ROW, dtype=torch.int64), who_sees(member, comm, device)
    for row, (group, file) in enumerate(files.items()):
        own, entry = mine.get(group), None
        try:
            if not sees[file.writer]:
                if comm.rank == file.writer:
                    send_file(comm, 0, own, device=device)
                elif comm.rank == 0:
                    entry = receive_file(
                        comm, file.writer, file.path, device=device, reserve=reserve
                    )
            elif own is not None:
                entry = write_tensors(file.path, *own, reserve)
        except CheckpointError as error:
            cause = error.__cause__
            told[row, 0] = -1 - ((cause.errno or 0) if isinstance(cause, OSError) else 0)
            if int(told[row, 0]) == -1:  # the error has no number
                member.emit("warning", text=f"no checkpoint of step {step}: {error}")
        if entry is not None:
            told[row] = torch.tensor([entry.size_bytes, *bytes.fromhex(entry.sha256)])
    comm.all_reduce(told).wait()
    written = {
        group: CheckpointShard(file.path, FileEntry(size, bytes(digest).hex()))
        for (group, file), (size, *digest) in zip(files.items(), told.tolist(), strict=True)
        if size > 0
    }
    failed = [file for file, row in zip(files.values(), told.tolist(), strict=True) if row[0] < 0]
    if not failed:
        return written
    for shard_file in written.values() if comm.rank == 0 else ():
        shard_file.path.unlink(missing_ok=True)
    code = next(-1 - size for size in told[:, 0].tolist() if size < 0)
    return could_not_write(step, failed[0].who, failed[0].path.parent, code)


def could_not_write(step: int, who: str, folder: Path, code: int) -> CheckpointError:
    """What to raise, or tell, where one of those that write a checkpoint could not.

    Args:
        step: of the checkpoint.
        who: could not.
        folder: where.
        code: of the system's error; 0 if its log has the cause.
    """
    cause = OSError(code, os.strerror(code)) if code else None
    why = reason(cause) if cause else "its log says why"
    unsaved = CheckpointError(
        f"no checkpoint of step {step}: {who} could not write its part "
        f"in {folder}: {why}. Earlier ones are untouched."
    )
    unsaved.__cause__ = cause
    return unsaved


def unsaved_s(run: Path) -> float:
    """Seconds since the last save, or since the session began, for a worker that starts to save.

    The worker that saved before may be dead, so the times of files are used: `job.toml` is
    written at the start of a session.
    """
    checkpoints = sorted((run / "checkpoints").glob(f"*/{MANIFEST}"))
    written = []
    for file in [run / "job.toml", *checkpoints]:
        with suppress(OSError):  # deleted meanwhile
            written.append(file.stat().st_mtime)
    return max(0.0, time.time() - max(written, default=math.inf))


def why_unwritten(cause: BaseException | None) -> str:
    """Say why a file could not be written."""
    return reason(cause) if isinstance(cause, OSError) else str(cause)


def number_of(error: CheckpointError) -> object:
    """Identifies the cause; the text contains figures that change."""
    return getattr(error.__cause__, "errno", str(error))
