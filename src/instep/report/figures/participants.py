"""Participants with data of their own: what each has, and how well the model does on its part."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np

from instep.store.run_files import Event
from instep.store.run_folder import RunFolder, RunPlan
from instep.words import short_number


class HasParticipants(Protocol):
    """Records of a run that tell of participants."""

    @property
    def plan(self) -> RunPlan: ...

    @property
    def last_step(self) -> int: ...

    def named(self, event: str) -> list[Event]: ...

    def last(self, event: str) -> Event: ...


class OfParticipants(NamedTuple):
    """Columns with a value for each participant."""

    samples: list[int]
    epochs: list[int]
    """Of its own, that it has finished."""
    validation_samples: list[int]
    """Empty where the validation set is not divided, as are `metrics`."""
    metrics: dict[str, list[float | None]]
    """Of the last validation, by name; None for one without samples."""


def of_participants(folder: HasParticipants) -> OfParticipants | None:
    """What is known of each; None where participants have no data of their own."""
    own = folder.plan.own_rounds
    if own is None:
        return None
    validated = [e for e in folder.named("participants_validated") if e["step"] <= folder.last_step]
    return OfParticipants(
        own.sizes.tolist(),
        own.epochs(folder.last_step).tolist(),
        folder.last("data_divided").get("validation_sizes") or [],
        validated[-1]["metrics"] if validated else {},
    )


def spread_of(folder: RunFolder) -> dict[str, dict[str, float]] | None:
    """How the metrics of the last validation differ: by name their `least`, `median`, `most` and
    `deviation` (standard, over participants); None where they are not known."""
    each = of_participants(folder)
    if each is None or not each.metrics:
        return None
    spread = {}
    for name, given in each.metrics.items():
        values = np.array([value for value in given if value is not None], np.float64)
        if len(values):
            figures = values.min(), np.median(values), values.max(), values.std()
            named = zip(("least", "median", "most", "deviation"), map(float, figures), strict=True)
            spread[name] = dict(named)
    return spread


def spread_in_words(spread: dict[str, dict[str, Any]]) -> str:
    """`loss 0.0501 to 0.312, accuracy 0.91 to 1.0000`, from what `spread_of` gives."""
    return ", ".join(
        f"{name} {short_number(each['least'])} to {short_number(each['most'])}"
        for name, each in spread.items()
    )
