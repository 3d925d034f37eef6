"""Tells what an earlier process has left in memory of this host, and leaves its own there."""

import json
import signal
from pathlib import Path

import tiny
import torch

from instep.system.host_memory import HostMemory
from instep.system.slots import TensorSpec


def recipe(folder, waits=True):
    memory = HostMemory()
    stamps = memory.stamps()
    found = [memory.at(*stamp)["residual"].unique().tolist() for stamp in stamps]
    memory.lay_out({"residual": TensorSpec((1 << 20,), torch.float32)})
    number = stamps[0].number + 1 if stamps else 1
    memory.stage(1, number, 0)["residual"].fill_(number)
    memory.staged(1, number, 0)
    memory.stage(1, number + 1, 0)["residual"][
        : 1 << 10
    ] = -1  # it is killed with half of it written
    part = Path(folder, "found.part")
    part.write_text(json.dumps({"outlives": memory.outlives, "found": found}))
    part.rename(part.with_name("found.json"))
    if waits:
        signal.pause()
    return tiny.recipe()
