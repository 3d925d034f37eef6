"""Detects silent corruption: a machine whose processor or memory gives wrong values.

There are three checks, all cheap. Each worker checks that its parameters are still what its last
update made them (`state/digest.py:MemoryWatch`). In some steps all workers compare a digest of
their whole state. In some steps each worker also computes one micro-batch of another worker, and
the digests of both gradients are compared. Digests travel in the notes of the step; `repeats.py`
decides which worker is wrong.

A worker that is found to be wrong kills itself, and is replaced like a lost worker. If wrong
gradients may have been committed since the last successful check, the others go back to a copy
from before. Checkpoints that were saved since are discarded first, also if the run ends because
no worker can be replaced. If no worker has a copy, the run restarts from the newest checkpoint
that is left. `engine/observers.py` says when each method is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.dealing import deal
from instep.data.loader import Slice
from instep.data.order import Position
from instep.engine.dealing import Speeds
from instep.engine.passes import Pass, Share, parts_of
from instep.errors import Unrepeatable, WorkerError
from instep.integrity.clean_copy import CleanCopy
from instep.integrity.repeats import (
    STATE_EVERY,
    Recomputed,
    Repeat,
    WrongRanks,
    by_majority,
    by_trial,
    repeats_every,
    repeats_of,
)
from instep.integrity.rollback import UNLIKE, FoundDifference, Rollback
from instep.state.digest import MemoryWatch, combined, digests
from instep.worker.loop.observed import Observed

WATCH_SHARE = 0.005
"""Share of the time of a step in which parameters are checked."""

COPY_EVERY = 4
"""Of the steps whose comparison succeeded, one in so many is copied, to go back to.

The first of a generation is copied as well: a new worker has no copy until then.
"""

_NUMBERS = 6
"""For each rank: digests of its state, of its own gradient, and of the gradient that it repeated;
two numbers each."""


class GradientDigests:
    """Digests of the gradients of one pass, taken when each gradient is complete.

    Args:
        parameters: how many there are.
    """

    def __init__(self, parameters: int) -> None:
        self._taken: list[list[int]] = [[] for _ in range(parameters)]
        self._zero = self._on = False

    def add(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete."""
        if self._on:
            self._taken[slot].extend(digests([gradient]))
            self._zero = self._zero and not gradient.to_dense().any()

    def begin(self) -> None:
        """A pass begins whose gradients are compared."""
        for taken in self._taken:
            taken.clear()
        self._on = self._zero = True

    def end(self) -> tuple[int, bool]:
        """The digest of the pass's gradients, and whether all were zero."""
        self._on = False
        return combined([combined(taken) for taken in self._taken]), self._zero


class CorruptionCheck:
    """One worker's part in the checks: an observer of its steps.

    Args:
        observed: the worker.
        copy: of a state that was right, to go back to.
    """

    def __init__(self, observed: Observed, copy: CleanCopy | None = None) -> None:
        model, update = observed.model, observed.update
        self._run_pass, self._train = observed.run_pass, observed.member.job.train
        self._model, self._optimizer = model, update.optimizer
        self._rollback = Rollback(observed, copy or CleanCopy(observed.state), self._gather)
        self._watch = MemoryWatch(model.named_parameters(), WATCH_SHARE)
        self._digests: GradientDigests | None = None

    # ---- generations

    def generation(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        """A generation begins."""
        self._comm, self._parameters = comm, list(parameters)
        self._rollback.generation(comm.rank, comm.size)
        self._digests = GradientDigests(len(parameters)) if comm.size > 1 else None
        self._every = repeats_every(self._train.micro_batches, comm.size)
        self._repeats: list[Repeat] = []
        self._speeds: Speeds | None = None
        self._watch.record()

    def over(self) -> None:
        """The generation is over; a second call does nothing."""
        self._digests = None

    def formed(self, *, anew: bool) -> None:
        """Agree on the last step that was checked; the state of a new group counts as right."""
        self._rollback.formed(anew=anew)

    def go_back(self) -> bool:
        """Restore the copy, if corruption was found; whether it was."""
        return self._rollback.go_back()

    # ---- a step

    def plan(
        self, planned: Iterator[tuple[Position, Share]], first: int, speeds: Speeds | None
    ) -> Iterator[tuple[Position, Share]]:
        """Plan an additional first pass in steps that repeat a micro-batch.

        Args:
            planned: position and share of each step.
            first: number of the first of these steps.
            speeds: by which work is distributed.
        """
        self._speeds = speeds
        for step, (where, share) in enumerate(planned, first):
            for repeat in self._repeats_of(step, where):
                if repeat.second == self._comm.rank:
                    again = self._pass(where, repeat.number)
                    share = share._replace(passes=[again, *share.passes])
            yield where, share

    def _repeats_of(self, step: int, where: Position) -> list[Repeat]:
        dealt = deal(self._parts(where), self._comm.size, self._speeds)
        return repeats_of(step, self._every, dealt)

    def _pass(self, where: Position, number: int) -> Pass:
        """The pass that repeats a micro-batch; its gradient does not count."""
        first, stop = where.micro_batch(number, self._parts(where))
        return Pass(Slice(where.epoch, first, stop), number, repeats=True)

    def _parts(self, where: Position) -> int:
        return parts_of(where, self._train)

    def begin_step(self, step: int, where: Position) -> None:
        """A step begins, or is tried again."""
        self._step, self._where = step, where
        self._compares = self._comm.size > 1 and step % STATE_EVERY == 0
        self._repeats = self._repeats_of(step, where)
        self._own = self._other = 0

    def begin_pass(self, part: Pass) -> None:
        """The backward pass of `part` is about to run."""
        if self._digests is not None and self._counts(part):
            self._digests.begin()

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Take its digest, if the pass is one that is compared."""
        if self._digests is not None:
            self._digests.add(slot, gradient)

    def end_pass(self, part: Pass) -> None:
        """The backward pass of `part` is over."""
        if self._digests is None or not self._counts(part):
            return
        digest, _ = self._digests.end()
        if part.repeats:
            self._other = digest
        else:
            self._own = digest

    def _counts(self, part: Pass) -> bool:
        rank, number = self._comm.rank, part.number
        return part.repeats or any((r.owner, r.number) == (rank, number) for r in self._repeats)

    def passes_done(self) -> None:
        """After this worker's passes: check that its parameters are what its last update made them.

        Raises:
            WorkerError: they are not, and this worker cannot be replaced.
        """
        changed = self._watch.find_change()
        if changed is None:
            return
        how = "it is not what the last update made it"
        verdict = WrongRanks((self._comm.rank,), how=how)
        self._rollback.report(
            FoundDifference("parameter", changed, verdict), self._step, self._step - 1
        )
        self._rollback.kill_itself(self._step)

    @property
    def size(self) -> int:
        """How many numbers `notes` has."""
        return _NUMBERS * self._comm.size

    def notes(self) -> list[float]:
        """This worker's digests, in the places of its rank; the sum over ranks has those of all."""
        numbers = [0.0] * self.size
        if self._compares:
            at = _NUMBERS * self._comm.rank
            state = combined(digests(tensor for _, tensor in self._state()))
            numbers[at : at + _NUMBERS] = [
                half for digest in (state, self._own, self._other) for half in _halves(digest)
            ]
        return numbers

    def judge(self, notes: list[float]) -> None:
        """Compare the digests of all workers, with the same result on each.

        Args:
            notes: of all ranks, summed.

        Raises:
            PeerError: there is a difference, and this worker is not named; the members go back,
                and form another group.
            WorkerError: there is a difference, and the run cannot continue.
        """
        if not self._compares:
            return
        sent = [_joined(notes[at : at + 2]) for at in range(0, len(notes), 2)]
        states, own, other = sent[0::3], sent[1::3], sent[2::3]
        if found := self._compare_states(states) or self._compare_gradients(own, other):
            self._rollback.act_on(found, self._step)
        self._rollback.dispel_doubts()
        if self._repeats:
            copies = self._step // self._every % COPY_EVERY == 0
            self._rollback.trust(self._step - 1, copies=copies)

    def unrepeatable(self, error: Unrepeatable) -> None:
        """All ran their passes again, and some gradients differ; every worker calls it.

        Raises:
            PeerError, WorkerError: as `judge`, if those of one worker alone differ.
        """
        mine = [bool(answer) for (answer,) in self._gather([int(error.mine)])]
        if sum(mine) == 1:
            how = "they were different when they were computed again"
            found = FoundDifference(
                "gradient", "all passes", WrongRanks((mine.index(True),), how=how)
            )
            self._rollback.act_on(found, self._step)

    def committed(self) -> None:
        """Remember the parameters, which do not change until the next update."""
        self._watch.record()

    # ---- which worker is wrong

    def _state(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is equal on all workers after a commit, in a fixed order."""
        named = dict(self._model.named_parameters())
        state = [*named.items(), *self._model.named_buffers()]
        for name, parameter in named.items():
            kept = self._optimizer.state.get(parameter, {})
            values = [(key, kept[key]) for key in sorted(kept)]
            state += [(f"{key} of {name}", v) for key, v in values if isinstance(v, Tensor)]
        return state

    def _compare_states(self, states: list[int]) -> FoundDifference | None:
        if len(set(states)) == 1:
            return None
        named = self._state()
        tables = self._gather(digests(tensor for _, tensor in named))
        for (name, _), row in zip(named, zip(*tables, strict=True), strict=True):
            if len(set(row)) > 1:
                return FoundDifference("state", name, by_majority(row))
        return FoundDifference("state", "a tensor", by_majority(states))

    def _compare_gradients(self, own: list[int], other: list[int]) -> FoundDifference | None:
        differing = [r for r in self._repeats if own[r.owner] != other[r.second]]
        if not differing:
            return None
        repeat = differing[0]
        before = {repeat.owner: own[repeat.owner], repeat.second: other[repeat.second]}
        verdict = by_trial(repeat, before, self._compute_again(repeat))
        if verdict is None:
            raise WorkerError(
                f"workers computed different gradients for micro-batch {repeat.number} of step "
                f"{self._step}, and again different ones when they repeated it. {UNLIKE}"
            )
        return FoundDifference("gradient", f"micro-batch {repeat.number}", verdict)

    def _compute_again(self, repeat: Repeat) -> list[Recomputed]:
        """Every rank computes a micro-batch again: twice, and once with its loss times 0."""
        assert self._digests is not None
        part, answers = self._pass(self._where, repeat.number), list[int]()
        for factor in (1.0, 1.0, 0.0):
            self._digests.begin()
            self._run_pass(part, factor)
            digest, zero = self._digests.end()
            answers.append(digest if factor else int(zero))
        every = self._gather(answers)
        return [Recomputed(first, second, bool(zero)) for first, second, zero in every]

    def _gather(self, own: list[int]) -> list[list[int]]:
        """The numbers of every rank, in the order of ranks; all ranks give equally many."""
        device = self._parameters[0].device
        table = torch.zeros(self._comm.size, len(own), 2, dtype=torch.float64, device=device)
        halves = [_halves(number) for number in own]
        table[self._comm.rank] = torch.tensor(halves, dtype=torch.float64, device=device)
        self._comm.all_reduce(table).wait()
        return [[_joined(halves) for halves in row] for row in table.tolist()]


def _halves(digest: int) -> tuple[float, float]:
    """A digest as two numbers that are exact in float64."""
    return float(digest >> 32), float(digest & 0xFFFFFFFF)


def _joined(halves: Sequence[float]) -> int:
    high, low = halves
    return (int(high) << 32) | int(low)
