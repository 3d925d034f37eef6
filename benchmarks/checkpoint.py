"""How long does a checkpoint hold training, against one copy of the state in memory?

    python benchmarks/checkpoint.py [--megabytes 256] [--tensors 200] [--repeats 9]

Copies and saves take turns in one process, so that a busy machine slows both.
The first save takes its staging memory and is compared with a copy that takes
new memory too; every later one with a copy into memory that is there. Each
save is finished before the next begins. Prints a table; writes nothing else.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot
from instep.units import readable_bytes, readable_seconds


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def state_of(megabytes: int, tensors: int) -> dict[str, Tensor]:
    """Parameters as a network has them: half of them large, half of them small."""
    large = megabytes * 1_000_000 // 4 // max(1, tensors // 2)
    return {f"{n}": torch.randn(large if n % 2 == 0 else 64) for n in range(tensors)}


def copy_into(target: dict[str, Tensor], source: dict[str, Tensor]) -> None:
    for name, tensor in source.items():
        target[name].copy_(tensor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if absent")
    args = parser.parse_args()

    state = state_of(args.megabytes, args.tensors)
    target: dict[str, Tensor] = {}
    fresh_s = seconds_of(lambda: target.update((n, t.clone()) for n, t in state.items()))
    copies, held, written = [], [], []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        writer = CheckpointWriter(Path(folder))
        for step in range(args.repeats + 1):
            copies.append(seconds_of(lambda: copy_into(target, state)))
            held.append(writer.save(Snapshot(step=step, tensors={"model": state}, facts={})))
            writer.finish()
            written += [saved.seconds for saved in writer.poll()]
    copy_s, held_s = statistics.median(copies[1:]), statistics.median(held[1:])
    size = sum(tensor.nbytes for tensor in state.values())
    print(f"state           {readable_bytes(size)} in {len(state)} tensors")
    print(f"one copy        {readable_seconds(copy_s)}")
    print(f"held by a save  {readable_seconds(held_s)}   {held_s / copy_s:.2f} times one copy")
    print(
        f"the first save  {readable_seconds(held[0])}   "
        f"{held[0] / fresh_s:.2f} times one copy into new memory"
    )
    print(f"until on disk   {readable_seconds(statistics.median(written))}")


if __name__ == "__main__":
    main()
