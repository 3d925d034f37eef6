"""The result of the trial before the first step (`trial/`): the verdict on this run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec


class Trial(NamedTuple):
    """The result of the trial. Plain data, which a new worker gets from the others."""

    merge: bool
    """Whether micro-batches may be merged into larger passes."""
    reason: str
    """Why, or why not."""
    verdict: str
    """`yes`, `no: ...` or `not shown: ...`."""
    derived: str = ""
    """A name of `weights.DERIVED`: what the loss of a Hugging Face model is a mean of."""
    each: float = 1.0
    """Numbers in the target of one sample, where they are counted (`Forward.derive`)."""
    shapes: Sequence[Sequence[int]] = ()
    """For `trial.shapes.ShapeWatch`, where the user's code makes batches."""
    passing: Sequence[str] = ()
    """Attributes of optimizers that each step makes anew: no checkpoint needs them."""
    left: Sequence[str] = ()
    """Names of what passes leave behind in Python, which steps may read (`trial.kept`)."""

    @classmethod
    def not_shown(cls, why: str, derived: str = "") -> Trial:
        """Return the result of a trial that cannot show anything, and why."""
        return cls(False, why, f"not shown: {why}", derived)

    def merged_always(self) -> Trial:
        """The result with `train.merge = "always"`."""
        verdict = self.verdict
        if self.same and not self.merge:
            verdict = (
                f"no: train.merge = 'always' merges micro-batches although {self.reason}, and the "
                "result depends on the number of workers. Leave train.merge out"
            )
        return self._replace(merge=True, reason="train.merge = 'always'", verdict=verdict)

    @property
    def same(self) -> bool:
        """Whether the run is shown to give the result of one machine."""
        return self.verdict == "yes"

    def encoded(self) -> bytes:
        """For `read`."""
        return msgspec.json.encode(self)

    @classmethod
    def read(cls, data: bytes) -> Trial | None:
        """What `encoded` gave; None if there is nothing."""
        return msgspec.json.decode(data, type=cls) if data else None


NOTHING_TO_TRY = Trial(True, "there is one micro-batch", "yes")
"""The result for a job with one micro-batch in every step."""
