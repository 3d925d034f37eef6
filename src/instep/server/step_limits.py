"""Steps at which just the units up to them have to be there, and how late those were.

Servers without lockstep lease units of later steps meanwhile; not beyond such a step.
Way in: `StepLimits`, `LagCount`.
"""

from __future__ import annotations

from instep.engine.member import Member
from instep.job.spec import JobSpec
from instep.server.micro_batches import Portions


class StepLimits:
    """Which steps those are: validations, checkpoints and ends.

    Args:
        job: of the run.
        last: its last step, if that is known.
        portions: where steps begin and end.
        samples: in an epoch.
        validates: whether the run has a validation set.
    """

    def __init__(
        self,
        job: JobSpec,
        last: int | None,
        portions: Portions,
        samples: int,
        *,
        validates: bool,
    ) -> None:
        self._job, self._last, self._portions = job, last, portions
        self._samples, self._validates = samples, validates
        self._next = 0
        self.ends_at: int | None = None
        """The step that turned out to be the last."""
        self._saves_at: int | None = None

    def from_step(self, step: int) -> int:
        """Find the first limit that is not before a step."""
        if self._next < step:
            self._next = step
            while not self.has(self._next):
                self._next += 1
        limits = (self._next, self.ends_at, self._saves_at)
        return min(step for step in limits if step is not None)

    def end_at(self, step: int) -> None:
        """Let a step be the last, if none was made so before."""
        self.ends_at = self.ends_at or step

    def save_at(self, step: int) -> None:
        """Let there be a checkpoint after a step, though none is due."""
        self._saves_at = self._saves_at or step

    def take_save(self, step: int) -> bool:
        """Whether that checkpoint is to be made now; it is asked for once."""
        if step != self._saves_at:
            return False
        self._saves_at = None
        return True

    def has(self, step: int) -> bool:
        """Whether the job makes a step one."""
        if self.ends(step):
            return True
        every = self._job.train.validate_every
        ends_epoch = self._portions.where(step).stop == self._samples
        validates = step % every == 0 if every else ends_epoch
        return self._job.checkpoint.due(step) or (validates and self._validates)

    def ends(self, step: int) -> bool:
        """Whether the job ends, or stops, with a step."""
        return step in (self._last, self._job.train.stop_after_steps)


class LagCount:
    """Lags of commits that no event has told of: by how many updates others came before.

    Args:
        figures: how many there are, their sum, and the largest.
    """

    def __init__(self, figures: tuple[int, int, int] = (0, 0, 0)) -> None:
        self.figures = figures

    def add(self, lag: int) -> None:
        """Count one."""
        updates, total, largest = self.figures
        self.figures = updates + 1, total + lag, max(largest, lag)

    def tell(self, member: Member, step: int) -> None:
        """Emit the event, and begin anew."""
        (updates, total, largest), self.figures = self.figures, (0, 0, 0)
        mean = total / max(1, updates)
        member.emit("lag_measured", step=step, updates=updates, mean=mean, largest=largest)
