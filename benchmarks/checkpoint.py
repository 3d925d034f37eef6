"""How long does a checkpoint hold training, and what does the writing cost the steps after it?

    python benchmarks/checkpoint.py [--megabytes 4 40 256] [--tensors 192] [--json FILE]

A small network is trained with AdamW. Its parameters and moments lie in one
flat piece of memory, so that one `copy_` of that piece into memory that is
mapped already moves the very bytes that a save moves. Copies and saves take
turns in one process, each just after a training step, and each save is
finished before the next begins; a busy machine slows both. `held` is the whole
time that training stands still: gathering the state (`worker/loop/saving.py`) and
taking it (`state/save.py`). Then the same steps are timed with and without a
checkpoint being written beside them, in turns. Figures are medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from engine import engine_around
from torch import Tensor, nn

from instep.data.order import Position
from instep.engine.engine import Engine
from instep.engine.update import Update
from instep.units import readable_bytes, readable_seconds
from instep.worker.loop.saving import Saver


class Trained:
    """A network, its optimizer, and the flat memory that all their state lies in."""

    def __init__(self, megabytes: int, tensors: int) -> None:
        layers = max(1, tensors // 8)  # weight and bias, each with two moments and a step
        width = round((megabytes * 1e6 / 12 / layers) ** 0.5)
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*parts)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self._inputs = torch.randn(64, width)
        self.step()
        self.flat = self._lay_out()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._inputs).square().mean().backward()
        self.optimizer.step()

    def _lay_out(self) -> Tensor:
        states = [list(state.values()) for state in self.optimizer.state.values()]
        found = [p.data for p in self.model.parameters()] + [t for state in states for t in state]
        found.sort(key=lambda tensor: -tensor.numel())  # the single numbers last: all else aligned
        flat = torch.empty(sum(tensor.numel() for tensor in found))
        places = flat.split([tensor.numel() for tensor in found])
        by_memory = {tensor.data_ptr(): place for tensor, place in zip(found, places, strict=True)}
        for tensor in [*self.model.parameters(), *(t for state in states for t in state)]:
            place = by_memory[tensor.data_ptr()].view(tensor.shape)
            place.copy_(tensor.detach())
            tensor.data = place
        self.tensors = len(found)
        return flat


def saver_of(trained: Trained, folder: Path) -> tuple[Saver, Engine]:
    """What worker 0 of a run saves with, and the engine whose commits it saves."""
    scaler = torch.amp.GradScaler("cuda", enabled=False)
    parameters = list(trained.model.parameters())
    update = Update(trained.optimizer, None, parameters, seed=0, max_grad_norm=None, scaler=scaler)
    engine, member, _ = engine_around(trained.model, update, folder, checkpoint={"every": 1})
    return Saver(member, trained.model), engine


def seconds_of(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def measure(megabytes: int, tensors: int, turns: int, folder: Path) -> dict[str, Any]:
    trained = Trained(megabytes, tensors)
    saver, engine = saver_of(trained, folder)
    target = torch.zeros_like(trained.flat)
    copies, held, quiet, beside, written = [], [], [], [], []

    def save(step: int) -> float:
        engine.state.progress = engine.state.progress._replace(step=step)
        where = Position(0, 0, step)
        return seconds_of(lambda: saver.after_step(engine, where, due=True, last=False))

    for turn in range(1, turns + 2):
        quiet.append(seconds_of(trained.step))
        copies.append(seconds_of(lambda: target.copy_(trained.flat)))
        trained.step()
        held.append(save(turn))
        begin = time.perf_counter()
        while (writing := saver._writer._writing) is not None and not writing.done():
            beside.append(seconds_of(trained.step))
        written.append(time.perf_counter() - begin)
        quiet.append(seconds_of(trained.step))
    saver._writer.finish()
    copy_s, held_s = statistics.median(copies[1:]), statistics.median(held[1:])
    return {
        "bytes": trained.flat.nbytes,
        "tensors": trained.tensors,
        "copy_s": copy_s,
        "held_s": held_s,
        "ratio": statistics.median(h / c for h, c in zip(held[1:], copies[1:], strict=True)),
        "beyond_the_copy_s": held_s - copy_s,
        "first_held_s": held[0],
        "written_after_s": statistics.median(written[1:]),
        "step_s": statistics.median(quiet),
        "step_beside_a_write_s": statistics.median(beside),
        "turns": turns,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, nargs="+", default=[4, 40, 256])
    parser.add_argument("--tensors", type=int, default=192)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1, help="of the training")
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder if absent")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows there")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    rows = []
    for megabytes in args.megabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            row = measure(megabytes, args.tensors, args.turns, Path(folder))
        rows.append(row)
        slower = row["step_beside_a_write_s"] / row["step_s"]
        print(f"state           {readable_bytes(row['bytes'])} in {row['tensors']} tensors")
        print(f"one copy        {readable_seconds(row['copy_s'])}")
        print(f"held by a save  {readable_seconds(row['held_s'])}   {row['ratio']:.2f} copies")
        print(f"the first save  {readable_seconds(row['first_held_s'])}   takes its memory")
        print(f"until on disk   {readable_seconds(row['written_after_s'])}")
        print(f"a step beside   {slower:.2f} times {readable_seconds(row['step_s'])}\n")
    if args.json:
        where = {"date": time.strftime("%Y-%m-%d"), "torch": str(torch.__version__)}
        text = json.dumps({**where, "threads": args.threads, "results": rows}, indent=1)
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
