"""Looks out for silent corruption: a machine that computes, or remembers, something wrong.

Three looks, all cheap. Each worker sees whether its parameters are still what
its last update made them (`state/digest.py:MemoryWatch`). Now and then all compare
a digest of their whole state. And now and then each computes one micro-batch
of another a second time, and the gradients' digests are compared. The digests
travel in the notes of the step; who is wrong is decided in `repeats.py`.

Whoever is found to be wrong ends itself, and is replaced as a lost worker is.
Where wrong gradients may have been committed meanwhile, the others go back to
a copy from before, and checkpoints that were saved since are set aside before
anybody ends itself, also where nobody could take its place and the run ends.
Where nobody has a copy, the run begins again from the newest checkpoint that is
left. When it is called is said in `worker/step/observers.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.balance import deal
from instep.data.loader import Slice
from instep.data.order import Position, micro_batch
from instep.errors import PeerError, Unrepeatable, WorkerError
from instep.integrity.clean_copy import CleanCopy
from instep.integrity.repeats import (
    STATE_EVERY,
    Repeat,
    Trial,
    Verdict,
    by_majority,
    by_trial,
    repeats_every,
    repeats_of,
)
from instep.spec import TrainSpec
from instep.state.digest import MemoryWatch, combined, digests
from instep.worker.observed import Observed
from instep.worker.step.dealing import Speeds
from instep.worker.step.passes import Pass, Share, parts_of

WATCH_SHARE = 0.005
"""Of a step's time, for looking at parameters."""

MOST_IN_DOUBT = 3
"""So often a run goes back because of the same doubt; then it ends."""

COPY_EVERY = 4
"""Of the steps in which all was compared and found right, every so many is kept to go back to.

The first of a generation is kept as well: who came later has no copy until then.
"""

_NUMBERS = 6
"""For each rank: state, gradient of its own, gradient of another; two numbers each."""

_UNLIKE = (
    "Either one of them computes wrongly, or the model does not give the same again. To see "
    "whether it does: instep run JOB --check-determinism"
)


class Found(NamedTuple):
    """Something is wrong."""

    what: str
    """`parameter`, `state` or `gradient`."""
    where: str
    """A tensor's name, or which micro-batch."""
    verdict: Verdict


class Hearing:
    """Digests of the gradients of one pass, taken as each gradient is complete.

    Args:
        parameters: how many there are.
    """

    def __init__(self, parameters: int) -> None:
        self._heard: list[list[int]] = [[] for _ in range(parameters)]
        self._zero = self._on = False

    def hear(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete."""
        if self._on:
            self._heard[slot].extend(digests([gradient]))
            self._zero = self._zero and not gradient.to_dense().any()

    def begin(self) -> None:
        """A pass begins, whose gradients count."""
        for heard in self._heard:
            heard.clear()
        self._on = self._zero = True

    def end(self) -> tuple[int, bool]:
        """The digest of the pass's gradients, and whether all were zero."""
        self._on = False
        return combined([combined(heard) for heard in self._heard]), self._zero


class CorruptionCheck:
    """One worker's part in looking out: an observer of its steps.

    Args:
        observed: what is known of the worker.
        copy: to go back to.
    """

    def __init__(self, observed: Observed, copy: CleanCopy | None = None) -> None:
        model, update = observed.model, observed.update
        self._observed, self._member = observed, observed.member
        self._model, self._optimizer = model, update.optimizer
        self._copy = copy or CleanCopy(observed.state)
        self._right = -1  # the last step whose state is known to be right; -1 if none is
        self._watch = MemoryWatch(model.named_parameters(), WATCH_SHARE)
        self._doubts = 0
        self._hearing: Hearing | None = None
        self._nobody_has_a_copy = self._going_back = False

    # ---- generations

    def generation(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        """A generation begins."""
        self._comm, self._parameters = comm, list(parameters)
        self._hearing = Hearing(len(parameters)) if comm.size > 1 else None
        self._every = repeats_every(self._member.job.train.micro_batches, comm.size)
        self._repeats: list[Repeat] = []
        self._speeds: Speeds | None = None
        self._kept = False  # whether a copy was made in this generation
        self._watch.record()

    def over(self) -> None:
        """The generation is over; a second call does nothing."""
        self._hearing = None

    def formed(self, *, anew: bool) -> None:
        """Learn from the others up to which step all is known to be right.

        The state of a beginning, or of a checkpoint, is the first to go back to.
        """
        if anew:
            self._copy.keep()
            self._right, self._kept = self._copy.step, True
        if self._comm.size > 1:
            self._right = max(known for (known,) in self._shared([self._right + 1])) - 1
        # what was saved since a clean copy may be wrong
        self._observed.drop_after(self._observed.state.progress.step)

    def go_back(self) -> bool:
        """Take up the copy, if corruption was found.

        Who has none leaves its place to a process that takes a peer's state.
        """
        if not self._going_back:
            return False
        self._going_back = False
        if self._copy.step < 0:
            if self._nobody_has_a_copy:  # once more: rank 0 may have been lost before it did
                self._observed.set_aside(max(0, self._right))
            text = f"worker {self._member.number} has nothing to go back to, and is replaced."
            self._member.emit("warning", text=text)
            self._end_myself()
        self._copy.give_back()
        self._right = min(self._right, self._copy.step)
        return True

    # ---- a step

    def plan(
        self, planned: Iterator[tuple[Position, Share]], first: int, speeds: Speeds | None
    ) -> Iterator[tuple[Position, Share]]:
        """The same plan; in some steps with a pass before all others that repeats another's.

        Args:
            planned: position and share of each step.
            first: number of the first of these steps.
            speeds: by which their work is dealt.
        """
        self._speeds = speeds
        for step, (where, share) in enumerate(planned, first):
            for repeat in self._repeats_of(step, where):
                if repeat.second == self._comm.rank:
                    again = self._pass(where, repeat.number)
                    share = share._replace(passes=[again, *share.passes])
            yield where, share

    def _repeats_of(self, step: int, where: Position) -> list[Repeat]:
        parts = parts_of(where, self._member.job.train)
        return repeats_of(step, self._every, deal(parts, self._comm.size, self._speeds))

    def _pass(self, where: Position, number: int) -> Pass:
        return repeated_pass(where, number, self._member.job.train)

    def begin_step(self, step: int, where: Position) -> None:
        """A step begins, or begins once more."""
        self._step, self._where = step, where
        self._repeats = self._repeats_of(step, where)
        self._own = self._other = 0

    def begin_pass(self, part: Pass) -> None:
        """The backward pass of `part` is about to run."""
        if self._hearing is not None and self._counts(part):
            self._hearing.begin()

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Its digest is taken, where the pass is one that is compared."""
        if self._hearing is not None:
            self._hearing.hear(slot, gradient)

    def end_pass(self, part: Pass) -> None:
        """The backward pass of `part` is over."""
        if self._hearing is None or not self._counts(part):
            return
        digest, _ = self._hearing.end()
        if part.repeats:
            self._other = digest
        else:
            self._own = digest

    def _counts(self, part: Pass) -> bool:
        rank, number = self._comm.rank, part.number
        return part.repeats or any((r.owner, r.number) == (rank, number) for r in self._repeats)

    def passes_done(self) -> None:
        """This worker's passes are done: its parameters must be what its last update made them.

        Raises:
            WorkerError: they are not, and nobody could take this worker's place.
        """
        changed = self._watch.find_change()
        if changed is None:
            return
        how = "it is not what the last update made it"
        verdict = Verdict((self._comm.rank,), how=how)
        self._tell(Found("parameter", changed, verdict), self._step - 1)
        self._end_myself()

    @property
    def size(self) -> int:
        """How many numbers `notes` has."""
        return _NUMBERS * self._comm.size

    def notes(self) -> list[float]:
        """What the others are told, each rank in a place of its own, to be summed."""
        numbers = [0.0] * self.size
        if self._comm.size > 1 and self._state_is_due():
            at = _NUMBERS * self._comm.rank
            state = combined(digests(tensor for _, tensor in self._state()))
            numbers[at : at + _NUMBERS] = [
                half for digest in (state, self._own, self._other) for half in _halves(digest)
            ]
        return numbers

    def _state_is_due(self) -> bool:
        return self._step % STATE_EVERY == 0

    def judge(self, notes: list[float]) -> None:
        """Compare what all have told; every worker comes to the same.

        Args:
            notes: of all ranks, summed.

        Raises:
            PeerError: something is wrong, and not known to be this worker's; the members go
                back, and form another group.
            WorkerError: something is wrong, and it cannot be mended.
        """
        if self._comm.size == 1 or not self._state_is_due():
            return
        told = [_whole(notes[at : at + 2]) for at in range(0, len(notes), 2)]
        states, own, other = told[0::3], told[1::3], told[2::3]
        if found := self._compare_states(states) or self._compare_gradients(own, other):
            self._answer(found)
        self._doubts = 0
        if not self._repeats:
            return
        self._right = self._step - 1
        if not self._kept or self._step // self._every % COPY_EVERY == 0:
            self._copy.keep()
            self._kept = True

    def unrepeatable(self, error: Unrepeatable) -> None:
        """All ran their passes again, and not all came to the same; every worker calls it.

        Raises:
            PeerError, WorkerError: as `judge`, if it was one worker alone.
        """
        mine = [bool(answer) for (answer,) in self._shared([int(error.mine)])]
        if sum(mine) == 1:
            how = "they were others when they were computed again"
            self._answer(Found("gradient", "all passes", Verdict((mine.index(True),), how=how)))

    def committed(self) -> None:
        """Parameters have moved, and now stay as they are until the next step has its gradients."""
        self._watch.record()

    # ---- who it is

    def _state(self) -> list[tuple[str, Tensor]]:
        """Every tensor that is equal on all workers after a commit, in one order."""
        named = dict(self._model.named_parameters())
        state = [*named.items(), *self._model.named_buffers()]
        for name, parameter in named.items():
            kept = self._optimizer.state.get(parameter, {})
            values = [(key, kept[key]) for key in sorted(kept)]
            state += [(f"{key} of {name}", v) for key, v in values if isinstance(v, Tensor)]
        return state

    def _compare_states(self, states: list[int]) -> Found | None:
        if len(set(states)) == 1:
            return None
        named = self._state()
        tables = self._shared(digests(tensor for _, tensor in named))
        for (name, _), row in zip(named, zip(*tables, strict=True), strict=True):
            if len(set(row)) > 1:
                return Found("state", name, by_majority(row))
        return Found("state", "a tensor", by_majority(states))

    def _compare_gradients(self, own: list[int], other: list[int]) -> Found | None:
        differing = [r for r in self._repeats if own[r.owner] != other[r.second]]
        if not differing:
            return None
        repeat = differing[0]
        before = {repeat.owner: own[repeat.owner], repeat.second: other[repeat.second]}
        verdict = by_trial(repeat, before, self._try_again(repeat))
        if verdict is None:
            raise WorkerError(
                f"workers gave several gradients for micro-batch {repeat.number} of step "
                f"{self._step}, and do not give their own again. {_UNLIKE}"
            )
        return Found("gradient", f"micro-batch {repeat.number}", verdict)

    def _try_again(self, repeat: Repeat) -> list[Trial]:
        """Have every rank compute a micro-batch again, twice, and once for no loss at all."""
        assert self._hearing is not None
        part, answers = self._pass(self._where, repeat.number), list[int]()
        for factor in (1.0, 1.0, 0.0):
            self._hearing.begin()
            self._observed.run_pass(part, factor)
            digest, zero = self._hearing.end()
            answers.append(digest if factor else int(zero))
        return [Trial(first, second, bool(zero)) for first, second, zero in self._shared(answers)]

    def _shared(self, own: list[int]) -> list[list[int]]:
        """The numbers of every rank, by rank; all give as many."""
        device = self._parameters[0].device
        table = torch.zeros(self._comm.size, len(own), 2, dtype=torch.float64, device=device)
        halves = [_halves(number) for number in own]
        table[self._comm.rank] = torch.tensor(halves, dtype=torch.float64, device=device)
        self._comm.all_reduce(table).wait()
        return [[_whole(halves) for halves in row] for row in table.tolist()]

    # ---- what follows

    def _answer(self, found: Found) -> NoReturn:
        verdict, rank = found.verdict, self._comm.rank
        others = [r for r in range(self._comm.size) if r not in verdict.named] or [rank]
        clean_step = self._clean_step(others)
        if rank == others[0]:
            self._tell(found, clean_step)
        if not self._member.recovers:
            clean_step = -1  # all ends, the copies too
        self._let_no_wrong_checkpoint_be_taken_up(clean_step)
        words = _in_words(found, self._numbers(verdict), self._step)
        if not self._member.recovers:
            raise WorkerError(words)
        self._doubts += not verdict.named
        if self._doubts >= MOST_IN_DOUBT:
            raise WorkerError(f"{words} It was so {self._doubts} times. {_UNLIKE}")
        self._nobody_has_a_copy = clean_step < 0
        if rank in verdict.named:
            self._end_myself()
        self._going_back = True
        raise PeerError("corruption was found in the state or the gradient of a worker.")

    def _let_no_wrong_checkpoint_be_taken_up(self, clean_step: int) -> None:
        """All may be gone soon, and then the run begins again from the newest checkpoint.

        Rank 0 does it, which saves; nobody goes on before it has.
        """
        if self._comm.rank == 0:
            self._observed.set_aside(clean_step if clean_step >= 0 else max(0, self._right))
        with suppress(PeerError):  # who is lost ends nothing by it
            self._shared([0])

    def _clean_step(self, others: list[int]) -> int:
        """The step that those who stay go back to; -1 where none of them has a copy.

        It is asked of all before anybody ends itself, so that no sum is torn down in which
        somebody still learns what was found.
        """
        try:
            steps = self._shared([self._copy.step + 1])
        except PeerError:  # somebody has ended itself already
            return self._copy.step
        return max(steps[rank][0] for rank in others) - 1

    def _numbers(self, verdict: Verdict) -> tuple[list[int], list[int]]:
        """The workers' own numbers of who is named and of who is suspect."""
        form = self._member.form
        assert form is not None, "no generation yet"
        named, suspects = ([form.members[r] for r in ranks] for ranks in verdict[:2])
        return named, suspects

    def _tell(self, found: Found, clean_step: int) -> None:
        named, suspects = self._numbers(found.verdict)
        self._member.emit(
            "corruption_found",
            step=self._step,
            workers=named,
            suspects=suspects,
            what=found.what,
            where=found.where,
            how=found.verdict.how,
            clean_step=clean_step,
        )

    def _end_myself(self) -> NoReturn:
        """Leave this worker's place to another process."""
        if not self._member.recovers:
            raise WorkerError(
                f"worker {self._member.number} holds something wrong in memory at step "
                f"{self._step}: see corruption_found in events.jsonl. Go on elsewhere: the "
                "checkpoints before it are right."
            )
        self._member.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL was survived")


def repeated_pass(where: Position, number: int, train: TrainSpec) -> Pass:
    """The pass that repeats a micro-batch of the step at `where`; it counts nothing there."""
    first, stop = micro_batch(where.first, where.stop, number, parts_of(where, train))
    return Pass(Slice(where.epoch, first, stop), number, repeats=True)


def _in_words(found: Found, numbers: tuple[list[int], list[int]], step: int) -> str:
    named, suspects = numbers
    who = ", ".join(f"worker {n}" for n in named) or (
        " or ".join(f"worker {n}" for n in suspects) + ", it cannot be told which,"
    )
    return (
        f"{who} was found to have a wrong {found.what} at step {step} ({found.where}): "
        f"{found.verdict.how}."
    )


def _halves(digest: int) -> tuple[float, float]:
    """Two numbers that a sum of float64 with zeros leaves as they are."""
    return float(digest >> 32), float(digest & 0xFFFFFFFF)


def _whole(halves: Sequence[float]) -> int:
    high, low = halves
    return (int(high) << 32) | int(low)
