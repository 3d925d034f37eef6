"""When worker 0 saves, and what goes into a checkpoint: all that resuming needs, of one commit.

The writing itself is in `state/save.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.served.tables import ServedTables
from instep.engine.state.capture import STRATEGY
from instep.engine.state.parts import captured_parts
from instep.errors import CheckpointError, RunError
from instep.job.file import dump
from instep.state.boxes import BoxCut, MeshRank
from instep.state.export.hugging_face import keep_config
from instep.state.export.whole import Lent, lend, save_whole
from instep.state.files.manifest import published
from instep.state.files.room import LAST_RESERVE_BYTES, RESERVE_BYTES
from instep.state.files.staging import save_model
from instep.state.intact import discard_after
from instep.state.retention import Best, facts_of
from instep.state.save import CheckpointShard, CheckpointWriter, Saved
from instep.state.snapshot import (
    COPIES,
    PART,
    Snapshot,
    model_tensors,
    parameters_sha256,
    tied_names,
)
from instep.store.folder import RESUMED_FROM, run_id
from instep.worker.loop.shard_files import number_of, unsaved_s, why_unwritten


class Saver:
    """Saves checkpoints during training, and the model at its end.

    Args:
        member: for the job, the run folder and the log.
        model: of this worker.
        best: which checkpoints are kept for their validation.
        now: a clock that never goes back, in seconds.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        best: Best | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._member, self._model = member, model
        kept = model_tensors(model)  # a model that cannot be saved is refused before it is trained
        self._model_bytes = sum(tensor.nbytes for tensor in kept.values())
        try:
            keep_config(model, member.run)
        except (OSError, TypeError, ValueError) as error:
            text = "the model's configuration was not kept, so that `instep export` can write no "
            member.emit("warning", text=f"{text}folder for from_pretrained: {error}")
        self._every_s, self._now = member.job.checkpoint.every_s, now
        self._saved_s = now() - unsaved_s(member.run)
        self._newest = self._last = 0  # saved in this session; the one to be saved as its last
        self._unsaved: CheckpointError | None = None  # why the newest save failed, if it did
        self._job, self._id = dump(member.job), run_id(member.run)
        self._writer = CheckpointWriter(
            member.run / "checkpoints",
            keep_last=member.job.checkpoint.keep_last,
            keep_every=member.job.checkpoint.keep_every,
            best=best,
            sync_first=[member.run / name for name in RESUMED_FROM],
            may_publish=lambda: not member.lease.fenced,
        )

    @property
    def newest(self) -> int:
        """The step of the newest checkpoint that this session has completed; 0 before the first."""
        return self._newest

    def late(self) -> bool:
        """Whether the last save is longer ago than the job allows."""
        return self._every_s is not None and self._now() - self._saved_s >= self._every_s

    def is_best(self, step: int, metrics: Mapping[str, float] | None) -> bool:
        """Whether a validation is among the best, so that its step is saved."""
        return self._writer.is_best(step, metrics)

    def after_step(
        self,
        engine: Engine,
        where: Position,
        *,
        due: bool,
        last: bool,
        metrics: Mapping[str, float] | None = None,
        own: Mapping[str, Tensor] = MappingProxyType({}),
        shards: Mapping[str, CheckpointShard] | CheckpointError = MappingProxyType({}),
        since: float | None = None,
    ) -> None:
        """Save the commit if it is due; report what has been published since the last call.

        Args:
            engine: has just committed a step.
            where: its place in the data.
            due: whether it is saved.
            last: whether it is the last of this session.
            metrics: of the validation that followed this step, if one did.
            own: state that single workers have, summed; on a mesh, `write_shards` wants it.
            shards: what servers and ranks have written; or the error of one that could not.
            since: the `perf_counter` at which training paused for it; now, if left out.
        """
        step = engine.state.progress.step
        if isinstance(shards, CheckpointError):
            self._saved_s, self._last = self._now(), step if last else 0
            self._warn(shards)
        elif due:
            self._saved_s = (
                self._now()
            )  # also if it fails: a full disk is not tried again at every step
            try:
                since = time.perf_counter() if since is None else since
                self._member.records.flush()  # else the records would be older than the checkpoint
                snapshot = self._snapshot(engine, where)
                if own and self._member.job.mesh.ranks == 1:
                    snapshot.tensors["own"] = dict(own)
                snapshot.facts.update(facts_of(metrics))
                engine.clock.save += self._writer.save(
                    snapshot,
                    since=since,
                    shards=shards,
                    # and what the model will take
                    reserve=self._model_bytes + LAST_RESERVE_BYTES if last else RESERVE_BYTES,
                )
                self._last = step if last else 0
            except CheckpointError as error:
                self._member.emit("warning", text=f"no checkpoint of step {step}: {error}")
        self._tell()

    def _snapshot(self, engine: Engine, where: Position) -> Snapshot:
        snapshot = engine.state.capture(engine.buffers.moved)
        if PART in snapshot.tensors:  # `write_shards` has written these
            written = {g for g in snapshot.tensors if g.startswith(STRATEGY)} | {PART, COPIES}
            for group in written:
                del snapshot.tensors[group]
        snapshot.facts.update(
            epoch=where.epoch,
            next_position=where.stop,
            ledger_bytes=engine.records.ledger.size_bytes,
            ledger_crc32=engine.records.ledger.crc32(),
            job=self._job,
            run=self._id,
        )
        return snapshot

    def _tell(self) -> None:
        for outcome in self._writer.poll():
            if isinstance(outcome, Saved):
                self._newest, self._unsaved = outcome.step, None
                self._member.emit(
                    "checkpoint_saved",
                    step=outcome.step,
                    path=str(outcome.path),
                    size_bytes=outcome.size_bytes,
                    held_s=outcome.held_s,
                    seconds=outcome.seconds,
                )
            elif isinstance(outcome, CheckpointError):
                self._warn(outcome)
            else:
                raise outcome

    def _warn(self, error: CheckpointError) -> None:
        """Warn once while the cause stays the same; every save tries again."""
        before, self._unsaved = self._unsaved, error
        if before is None or number_of(before) != number_of(error):
            self._member.emit("warning", text=str(error))

    def hand_over(self) -> None:
        """Finish what is being written: another worker saves from now on."""
        self._writer.finish()
        self._tell()

    def drop_after(self, step: int) -> None:
        """Discard the checkpoints of later steps, which will be computed again.

        Raises:
            CheckpointError: one cannot be renamed.
        """
        self._writer.finish()
        self._tell()
        folder = self._member.run / "checkpoints"
        discard_after(folder, step)
        self._writer.forget_after(step)
        if self._newest > step:
            self._newest = max((left for left, _ in published(folder)), default=0)
        self._last = 0 if self._last > step else self._last

    def finish(
        self, step: int, comm: Comm | None = None, tables: ServedTables | None = None
    ) -> None:
        """Wait for the last checkpoint and write `model.safetensors`.

        Args:
            step: the last.
            comm: the members of the run, of which the other ranks of this replica call
                `lend_model`; needed where a replica is a mesh.
            tables: embeddings whose rows are on servers, of which rows may be asked.

        Raises:
            RunError: one of the two cannot be written; the text says what was saved.
            CheckpointError: the model cannot be stored in the format.
            PeerError: a rank of this replica was lost.
        """
        self._writer.finish()
        self._tell()
        missing = [] if self._newest >= self._last else ["its checkpoint"]
        cause = self._unsaved and (self._unsaved.__cause__ or self._unsaved)
        try:
            self._save_model(step, comm, tables)
        except CheckpointError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError):
                raise
            missing.append("model.safetensors")
        if missing:
            newest = (
                f"The newest checkpoint is that of step {self._newest}."
                if self._newest
                else "This session has saved no checkpoint."
            )
            raise RunError(
                f"training is over with step {step}, but {' and '.join(missing)} could not be "
                f"saved in {self._member.run}: {why_unwritten(cause)}. {newest} "
                "Make room, or get access, then resume the run."
            )

    def _save_model(self, step: int, comm: Comm | None, tables: ServedTables | None = None) -> None:
        member, path = self._member, self._member.run / "model.safetensors"
        facts, last = {"step": str(step), "job": member.job.name}, LAST_RESERVE_BYTES
        if member.job.mesh.ranks > 1:
            assert comm is not None, "the ranks of a mesh send what they have"
            lent = Lent(comm, member.job.mesh.ranks, *_own_model(member, self._model))
            size, digest = save_whole(path, lent.entries, lent.tied, lent.gather, facts, last)
        elif tables is not None:
            own = model_tensors(self._model)
            tied = tied_names(own)
            entries = {n: each for n, each in own.items() if n not in tied} | tables.shapes()

            def gather(name: str) -> Tensor | Iterator[Tensor]:
                return own[name] if name in own else tables.read(name)

            size, digest = save_whole(path, entries, tied, gather, facts, last)
        else:
            digest = parameters_sha256(self._model)
            size = save_model(path, self._model, facts | {"parameters_sha256": digest}, last)
        member.emit(
            "model_saved", step=step, path=str(path), parameters_sha256=digest, size_bytes=size
        )


def lend_model(comm: Comm, member: Member, model: nn.Module) -> None:
    """Send rank 0 what it writes of the model while it is in `Saver.finish`; every member but
    rank 0 calls it, and those that are not in rank 0's replica have nothing to send.

    Args:
        comm: the members of the run, replica by replica.
        member: this one.
        model: of this worker.

    Raises:
        CheckpointError: the model cannot be stored in the format.
        PeerError: a member was lost.
    """
    if 0 < comm.rank < member.job.mesh.ranks:
        lend(comm, *_own_model(member, model))


def _own_model(member: Member, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, BoxCut]]:
    """What this rank writes of the model, by name, and which parts they are."""
    rank = MeshRank(member.job.mesh, member.number)
    parts = captured_parts(model_tensors(model), {}, {}, model, rank)
    own = {name.removeprefix("model/"): tensor for name, tensor in parts.own.items()}
    return own, {name.removeprefix("model/"): cut for name, cut in parts.cuts.items()}
