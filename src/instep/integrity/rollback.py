"""Consequences of corruption: who ends, what is discarded, and where the others go back to.

How it is found is not known here (`corruption.py`).
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, NoReturn

from instep.errors import PeerError, WorkerError
from instep.integrity.clean_copy import CleanCopy
from instep.integrity.repeats import WrongRanks
from instep.worker.loop.observed import Observed

MOST_IN_DOUBT = 3
"""How often the members go back without knowing which worker is wrong; then the run ends."""

UNLIKE = (
    "Either one of them computes wrong values, or the model is not deterministic. To test the "
    "model: instep run JOB --check-determinism"
)


class FoundDifference(NamedTuple):
    """A difference that was found."""

    what: str
    """`parameter`, `state` or `gradient`."""
    where: str
    """A tensor's name, or which micro-batch."""
    verdict: WrongRanks


class Rollback:
    """One worker's way back to the last state that was found right.

    Args:
        observed: the worker.
        copy: of such a state.
        gather: gives the numbers of every rank, in the order of ranks; all ranks call it.
    """

    def __init__(
        self, observed: Observed, copy: CleanCopy, gather: Callable[[list[int]], list[list[int]]]
    ) -> None:
        self._observed, self._member = observed, observed.member
        self._copy, self._gather = copy, gather
        self._right = -1  # the last step whose state was checked; -1 if none was
        self._doubts = 0
        self._nobody_has_a_copy = False
        self._found_at: int | None = None  # the step of what it goes back for

    def generation(self, rank: int, size: int) -> None:
        """A generation begins."""
        self._rank, self._size = rank, size
        self._kept = False  # whether a copy was made in this generation

    def formed(self, *, anew: bool) -> None:
        """Agree on the last step that was checked.

        The first state, or that of a checkpoint, is copied: it counts as right.
        """
        if anew:
            self._copy.keep()
            self._right, self._kept = self._copy.step, True
        if self._size > 1:
            self._right = max(known for (known,) in self._gather([self._right + 1])) - 1
        # what was saved since the last check may be wrong
        self._observed.drop_after(self._observed.state.progress.step)

    def go_back(self) -> bool:
        """Restore the copy, if corruption was found.

        A worker without a copy kills itself; its replacement copies the state of a peer.
        """
        step, self._found_at = self._found_at, None
        if step is None:
            return False
        if self._copy.step < 0:
            if self._nobody_has_a_copy:  # again: rank 0 may have been lost before it did
                self._observed.set_aside(max(0, self._right))
            text = f"worker {self._member.number} has no copy to go back to, and is replaced."
            self._member.emit("warning", text=text)
            self.kill_itself(step)
        self._copy.give_back()
        self._right = min(self._right, self._copy.step)
        return True

    def dispel_doubts(self) -> None:
        """All workers have the same state."""
        self._doubts = 0

    def trust(self, step: int, *, copies: bool) -> None:
        """The state of a step was found right; it is copied, or the first of the generation is."""
        self._right = step
        if copies or not self._kept:
            self._copy.keep()
            self._kept = True

    def act_on(self, found: FoundDifference, step: int) -> NoReturn:
        """Make all go back, or end the run; this worker kills itself if it is the wrong one.

        Raises:
            PeerError: this worker is not named, and the members go back.
            WorkerError: the run cannot continue.
        """
        verdict, rank = found.verdict, self._rank
        others = [r for r in range(self._size) if r not in verdict.named] or [rank]
        clean_step = self._clean_step(others)
        if rank == others[0]:
            self.report(found, step, clean_step)
        if not self._member.recovers:
            clean_step = -1  # the run ends, and the copies with it
        self._discard_wrong_checkpoints(clean_step)
        words = _in_words(found, self._numbers(verdict), step)
        if not self._member.recovers:
            raise WorkerError(words)
        self._doubts += not verdict.named
        if self._doubts >= MOST_IN_DOUBT:
            raise WorkerError(f"{words} This happened {self._doubts} times. {UNLIKE}")
        self._nobody_has_a_copy = clean_step < 0
        if rank in verdict.named:
            self.kill_itself(step)
        self._found_at = step
        raise PeerError("corruption was found in the state or the gradient of a worker.")

    def _discard_wrong_checkpoints(self, clean_step: int) -> None:
        """Rank 0, which saves, discards them; the others wait, as all may be lost soon.

        The run would then restart from the newest checkpoint.
        """
        if self._rank == 0:
            self._observed.set_aside(clean_step if clean_step >= 0 else max(0, self._right))
        with suppress(PeerError):  # a lost worker changes nothing
            self._gather([0])

    def _clean_step(self, others: list[int]) -> int:
        """The step that the remaining workers go back to; -1 if none of them has a copy.

        All agree on it before one kills itself: afterwards no exchange would succeed.
        """
        try:
            steps = self._gather([self._copy.step + 1])
        except PeerError:  # a worker is lost already
            return self._copy.step
        return max(steps[rank][0] for rank in others) - 1

    def _numbers(self, verdict: WrongRanks) -> tuple[list[int], list[int]]:
        form = self._member.form
        assert form is not None, "no generation yet"
        named, suspects = ([form.members[r] for r in ranks] for ranks in verdict[:2])
        return named, suspects

    def report(self, found: FoundDifference, step: int, clean_step: int) -> None:
        """Record a difference, and the step that the others go back to."""
        named, suspects = self._numbers(found.verdict)
        self._member.emit(
            "corruption_found",
            step=step,
            workers=named,
            suspects=suspects,
            what=found.what,
            where=found.where,
            how=found.verdict.how,
            clean_step=clean_step,
        )

    def kill_itself(self, step: int) -> NoReturn:
        """End this process, which is replaced.

        Raises:
            WorkerError: it cannot be replaced.
        """
        if not self._member.recovers:
            raise WorkerError(
                f"worker {self._member.number} has a wrong value in memory at step {step}: "
                "see corruption_found in events.jsonl. Resume the run on another machine: the "
                "checkpoints before that step are right."
            )
        self._member.records.flush()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL was survived")


def _in_words(found: FoundDifference, numbers: tuple[list[int], list[int]], step: int) -> str:
    named, suspects = numbers
    who = ", ".join(f"worker {n}" for n in named) or (
        " or ".join(f"worker {n}" for n in suspects) + ", it is not known which,"
    )
    return (
        f"{who} was found to have a wrong {found.what} at step {step} ({found.where}): "
        f"{found.verdict.how}."
    )
