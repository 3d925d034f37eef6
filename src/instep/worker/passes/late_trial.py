"""Tries what the trial before step 1 could not see, when it comes and before it counts.

Code of the user's may pad to the longest sample, and a long one is seldom. Where a batch has a
shape that was not compared with others in one step, its step is tried. And a loss or layer of the
user's may do something else once the model is trained: leave out samples whose loss is small, mix
those of a batch after a warm-up. So some micro-batches are compared again in steps that become
rare, and in the last. The verdict may be another one from there on.
"""

from __future__ import annotations

from collections.abc import Iterator

from instep.data.loader import Loader, Read
from instep.data.order import Position
from instep.data.reading.generators import preserved
from instep.engine.member import Member
from instep.engine.passes import Share
from instep.engine.state.committed import CommittedState
from instep.engine.trial_result import Trial
from instep.errors import SpecError, one_line
from instep.recipe.forward import Forward
from instep.recipe.weights import is_of_torch
from instep.system.kernels import per_machine
from instep.system.memory import room
from instep.usercode.places import is_of_user
from instep.worker.passes.activity import Activity
from instep.worker.trial.reads import shapes_in, try_step, try_trained
from instep.worker.trial.shapes import ShapeWatch

TRYING = "trying a batch"
"""The phase of a worker that tries what it is to train on."""

_TRIES = 3
"""Steps with batches of another shape, but of one shape in the step, which are tried."""

_FIRST, _RARER = 16, 4
"""The first step in which a trained model is tried, and how many times later each other one is."""

_COPIES, _BESIDE = 16, 4_000_000_000
"""Room for so many copies of the model is wanted (parameters and gradients in float64, apart and as
one batch), and for so many bytes of what their passes keep."""


class LateTrial:
    """Looks at the batches of a worker before they count.

    Args:
        member, forward, loader, state: the worker's.
        activity: told what is being done.
        last: the step that ends the run, which is tried too; None if that is not known.
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
        last: int | None,
        alone: bool,
    ) -> None:
        self._member, self._job, self._forward = member, member.job, forward
        self._loader, self._state, self._activity = loader, state, activity
        self._last, self._alone, self._watch = last, alone, ShapeWatch()

    def begin(self, trial: Trial) -> None:
        """Take this trial's shapes for those that are known."""
        self._watch = ShapeWatch(trial.shapes)

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

    def try_trained(
        self, where: Position, share: Share, step: int, *, fastest: bool | None = None
    ) -> None:
        """Try the model as it is now, if it is time and it is for this worker to do, for which the
        others wait: the one that is dealt most, or else the one with the step's first sample.

        Args:
            where: the step.
            share: of it.
            step: its number.
            fastest: whether this worker is dealt most; None where all are dealt evenly.

        Raises:
            SpecError: the result may be another than that of one machine, and `check.strict`.
        """
        self._say_what_is_lost(step)
        if fastest is None or self._job.data.parts or self._forward.recipe.given["train"].streams:
            fastest = bool(share.passes) and share.passes[0].samples.first == where.first
        is_time = _is_time(step) or step == self._last
        if not (is_time and fastest and self._trial.same and self._may()):
            return
        before, found = self._trial, self._trial
        try:
            with self._activity.during(TRYING), preserved():
                found = try_trained(self._forward, self._loader, self._job, where, share)
        except Exception as error:  # of the user's code, or no room
            why = f"{type(error).__name__}: {one_line(error)}"
            self._member.warn(f"the loss was not compared again in step {step} ({why}).")
        self._forward.derive(before.derived, before.each)
        if found.verdict.startswith("no: "):
            verdict = f"no: in step {step}, {found.verdict.removeprefix('no: ')}"
            say_late(self._member, self._state, before._replace(verdict=verdict), step)

    def _say_what_is_lost(self, step: int) -> None:
        if not (self._state.lost and self._trial.same and self._job.sync.rounds is None):
            return
        if lost := [each for each in self._state.lost if each not in self._trial.passing]:
            verdict = (
                f"not shown: {lost[0]} is not in state_dict(), and step {step} begins without what "
                "it was in the step before. Keep it in state_dict(): as self.state['name'], or in "
                "param_groups"
            )
            say_late(self._member, self._state, self._trial._replace(verdict=verdict), step)

    def _may(self) -> bool:
        """Whether loss or model have code of the user's, and there is room for more copies."""
        recipe, model = self._forward.recipe, self._forward.model
        own = recipe.compute_loss is not None or not is_of_torch(recipe.loss)
        own = own or any(map(is_of_user, map(type, model.modules())))
        if not own or not self._alone or recipe.turns or recipe.embed is not None:
            return False
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        there = room(per_machine(self._job.workers, self._job.launch.count))
        return self._forward.device.type == "cpu" and _COPIES * size + _BESIDE < there

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


def _is_time(step: int) -> bool:
    rare = _FIRST
    while rare < step:
        rare *= _RARER
    return step == rare


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
