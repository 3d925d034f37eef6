"""What a loop asks of a `DataLoader` beside its batches.

`dataset` and `batch_size` are there. What decides in a `DataLoader` which samples come, and in
what order, is the job's here: asking for that says so.
"""

from __future__ import annotations

from typing import Any, Never

_OF_THE_JOB = ("sampler", "batch_sampler", "set_epoch", "generator", "drop_last")


class AsLoader:
    """A loader that `prepare` gives.

    Args:
        dataset: what was given, or that of the `DataLoader` that was.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    @property
    def batch_size(self) -> int:
        """Samples of a full batch of this process."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Never:
        if name in _OF_THE_JOB:
            raise AttributeError(
                f"a loader of session.prepare() has no {name}: the job deals the samples, in an "
                "order of its own in each epoch, so nothing is to be set. Leave it out."
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
