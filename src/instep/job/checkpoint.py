"""The table `[checkpoint]` of a job."""

from __future__ import annotations

from typing import Literal

from instep.job.base import Natural, Positive, Section
from instep.units import seconds_in


class CheckpointSpec(Section, frozen=True, kw_only=True):
    """When to save during training, and what to keep; a run always saves at its end."""

    every: str | Positive = "5m"
    """Steps between checkpoints, or a time: `"90s"`, `"5m"`, `"1h30m"`; `"never"`: at the end."""

    keep_last: Positive = 2
    """Newest checkpoints to keep; older ones are deleted once a newer one is complete."""

    keep_every: Natural = 0
    """Above 0: also save each step that is a multiple of it, whatever `every` says, and keep it for
    good."""

    keep_best: Natural = 0
    """How many of the best to keep too; a validation among the best so far is saved at once,
    whatever `every` says."""

    copy_to: str = ""
    """Folder or URL, such as `s3://bucket/runs`, that gets copies too while training continues."""

    best_metric: str = "loss"
    """The metric of the validation that decides: `loss`, or one of the recipe."""

    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether small or large is better; `auto` is `min` for `loss` and `max` for all others."""

    @property
    def every_s(self) -> float | None:
        """Seconds between checkpoints; None if steps are counted, or none is saved."""
        if isinstance(self.every, int) or self.every == "never":
            return None
        return seconds_in(self.every)

    def due(self, step: int) -> bool:
        """Whether a checkpoint follows a step because of its number alone."""
        rhythms = (self.every, self.keep_every)
        return any(isinstance(n, int) and n > 0 and step % n == 0 for n in rhythms)

    def __post_init__(self) -> None:
        try:
            bare = isinstance(self.every, str) and self.every.strip()[-1:].isdigit()
            sensible = not bare and (self.every_s is None or self.every_s > 0)
        except ValueError:
            sensible = False
        if not sensible:
            raise ValueError(
                f"every = {self.every!r}: needs to be a number of steps, a time above 0 such as "
                "'90s', '5m' or '1h30m', or 'never'."
            )
