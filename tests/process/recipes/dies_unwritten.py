"""The worker that writes the ledger dies once, when a step is committed and not yet written."""

import os
import signal
from pathlib import Path
from typing import Any

import splits
from first_come import first

import instep
from instep.store.ledger import Ledger


def recipe(file: str, step: int, **arguments: Any) -> instep.Recipe:
    append = Ledger.append

    def dies(self: Ledger, shares: Any) -> bytes:
        if shares and shares[0][0] == step and first(Path(file)):
            os.kill(os.getpid(), signal.SIGKILL)
        return append(self, shares)

    Ledger.append = dies
    return splits.recipe(**arguments)
