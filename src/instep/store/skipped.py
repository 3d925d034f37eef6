"""Which samples were left out of committed steps, from events and ledger.

A worker tells of a sample before its step is agreed on. Where the step then
came to nothing it was computed again, by another generation, which tells of
its own; so an event counts if its step stands in the ledger with its
generation. The ledger itself names positions, whether read or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

Event = dict[str, Any]


def skipped_in(events: Iterable[Event], ledger: np.ndarray[Any, Any]) -> list[Event]:
    """`sample_skipped` events of training that count, each sample of a step once.

    Args:
        events: of a run, oldest first.
        ledger: [records] of `events.LEDGER`, of committed steps.
    """
    told = {
        (e["step"], e["generation"], e["index"]): e
        for e in events
        if e["event"] == "sample_skipped" and e["dataset"] == "training"
    }
    mine = ledger[np.isin(ledger["step"], [step for step, _, _ in told])]
    committed = set(zip(mine["step"].tolist(), mine["generation"].tolist(), strict=True))
    return [event for key, event in told.items() if key[:2] in committed]
