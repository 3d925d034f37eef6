"""Batches whose shapes the trial before step 1 did not compare: tried when they come.

Code of the user's may pad to the longest sample, and a long one is seldom. Where a batch has a
shape that was not compared with others in one step, its step is tried before it counts; the verdict
may be another one from there on.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.data.loader import Loader, Read
from instep.data.order import Position
from instep.data.reading.generators import preserved
from instep.engine.member import Member
from instep.engine.state.committed import CommittedState
from instep.engine.trial_result import Trial
from instep.errors import SpecError
from instep.recipe.forward import Forward
from instep.worker.passes.activity import Activity
from instep.worker.trial.reads import shapes_in, try_step
from instep.worker.trial.shapes import Watch

TRYING = "trying a batch"
"""The phase of a worker that tries what it is to train on."""

_TRIES = 3
"""Steps with batches of another shape, but of one shape in the step, which are tried."""


class LateTrial:
    """Looks at the batches of a worker before they count.

    Args:
        member, forward, loader, state: the worker's.
        activity: told what is being done.
        alone: whether this process has the whole model, so that it can try a step.
    """

    def __init__(
        self,
        member: Member,
        forward: Forward,
        loader: Loader,
        state: CommittedState,
        activity: Activity,
        *,
        alone: bool,
    ) -> None:
        self._member, self._job, self._forward = member, member.job, forward
        self._loader, self._state, self._activity = loader, state, activity
        self._alone, self._watch = alone, Watch()

    def begin(self, trial: Trial) -> None:
        """Take this trial's shapes for those that are known."""
        self._watch = Watch(trial.shapes)

    @property
    def _trial(self) -> Trial:
        assert self._state.trial is not None, "the workers have agreed on one"
        return self._state.trial

    def tried(self, where: Position, reads: Iterator[Read], step: int) -> Iterator[Read]:
        """The same batches; a step with an odd one is tried before that counts.

        Raises:
            SpecError: the result may be another than that of one machine, and `check.strict`.
        """
        for read in reads:
            if read.size and self._trial.same and (odd := self._watch.odd(read.batch, read.size)):
                self._try_odd(where, odd, step)
            yield read

    def _try_odd(self, where: Position, odd: str, step: int) -> None:
        if not self._alone:
            why = "whether that changes the result was not tried"
            self._say(f"not shown: {why}", odd, step)
            return
        trial, found = self._trial, self._trial
        with self._activity.during(TRYING), preserved():
            shapes = shapes_in(self._loader, self._job, where)
            mixed = self._watch.mixed(shapes)
            if len(shapes) > 1 and (mixed or self._watch.tries < _TRIES):
                found = try_step(self._forward, self._loader, self._job, where)
                self._forward.derive(trial.derived, trial.each)
                self._watch.learn(found.shapes)
            else:  # nothing is padded otherwise than in one batch
                self._watch.learn(shapes[0] if len(shapes) > 1 else (), tried=False)
        if not found.same:
            self._say(found.verdict, odd, step)

    def _say(self, verdict: str, odd: str, step: int) -> None:
        """The verdict is another one from this step on."""
        kind, _, why = verdict.partition(": ")
        verdict = f"{kind}: in step {step} a sample has the shape {odd}; {why}"
        say_late(self._member, self._state, self._trial._replace(verdict=verdict), step)


def say_late(member: Member, state: CommittedState, trial: Trial, step: int) -> None:
    """Let the verdict be another one from now on.

    Args:
        member, state: the worker's.
        trial: with the other verdict.
        step: from which on it holds.

    Raises:
        SpecError: the job wants no other result than that of one machine, by `check.strict`.
    """
    state.trial = trial
    member.emit("same_as_one_machine", verdict=trial.verdict, step=step)
    if member.job.check.strict:
        text = f"check.strict = true trains no further. Same as one machine: {trial.verdict}."
        raise SpecError(text)
