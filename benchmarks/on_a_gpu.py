"""Is instep as fast as a plain loop on one GPU, in float32 and bfloat16?

    python benchmarks/on_a_gpu.py [--windows 8] [--json FILE]

A GPT of 10 million parameters, whose steps of some milliseconds show what surrounds them, and one
of 85 million. The plain loop is as PyTorch's tutorials write it: DataLoader, pinned memory,
autocast. It reads the loss of each step, as instep does: what it had in the queue of the GPU would
run in our turn. In turns (see turns.py) on the same GPU; the figure is the median of our speed over
the loop's, above 1 instep is faster.
"""

import argparse
import json
import struct
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader
from turns import (
    HERE,
    Program,
    ended,
    in_words,
    instep,
    over,
    steps_s,
    summed_up,
    take_turns,
    times_of,
    wait_for_steps,
    write,
)

from instep.recipe.build import call
from instep.recipe.source_file import load_function

RECIPE = "recipes/gpt.py:recipe"
BATCH, TURN_S = 16, 3.0
SIZES = {
    "10 M": {"samples": 20_000},
    "85 M": {"layers": 12, "width": 768, "heads": 12, "length": 512, "samples": 5_000},
}


def loop(precision: str, arguments: dict[str, Any], times: Path) -> None:
    """The plain loop, without end."""
    recipe: Any = call(load_function(str(HERE / RECIPE)), arguments, 7)
    model = recipe.model.cuda()
    optimizer = recipe.optimizer(model.parameters())
    loader = DataLoader(recipe.train, BATCH, shuffle=True, drop_last=True, pin_memory=True)
    written = times.open("wb", buffering=0)
    while True:
        for batch in loader:
            written.write(struct.pack("<d", time.time()))
            inputs, target = (each.cuda(non_blocking=True) for each in batch)
            optimizer.zero_grad()
            low = precision == "bfloat16"
            with torch.autocast("cuda", torch.bfloat16) if low else nullcontext():
                loss = recipe.loss(recipe.model(inputs), target)
            loss.backward()
            optimizer.step()
            loss.item()


def compare(size: str, precision: str, windows: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as text:
        ours, times = Path(text) / "instep", Path(text) / "plain.times"
        arguments = json.dumps(SIZES[size])
        words = [precision, "--loop", arguments, "--times", str(times)]
        settings = {"train.global_batch": BATCH, "train.precision": f'"{precision}"'}
        settings |= {"train.device": '"cuda"', "train.micro_batches": 1}
        settings |= {f"arguments.{key}": value for key, value in SIZES[size].items()}
        programs = {
            "plain": Program([sys.executable, __file__, *words]),
            "instep": instep(RECIPE, settings, ours, workers=1),
        }
        with ended(programs):
            wait_for_steps(lambda: times.stat().st_size // 8 if times.exists() else 0)
            wait_for_steps(lambda: len(times_of(ours)))
            take_turns(programs, TURN_S, windows)
        began = {"plain": np.fromfile(times, "<f8"), "instep": times_of(ours)}
        steps = {p: steps_s(began[p], programs[p].turns[:windows]) for p in programs}
    ratios = [1 / ratio for ratio in over(steps["instep"], steps["plain"])]
    plain = float(np.nanmedian(steps["plain"]))
    print(f"{size} {precision}: step {plain * 1e3:.2f} ms, speed {in_words(ratios)}", flush=True)
    card = torch.cuda.get_device_name()
    return {"model": size, "precision": precision, "card": card, "plain_step_s": plain,
            "speed over a plain loop": summed_up(ratios)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("precision", nargs="?", help="of --loop")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--loop", type=json.loads, help="be the plain loop: arguments")
    parser.add_argument("--times", type=Path, help="where the plain loop writes when steps begin")
    args = parser.parse_args()
    if args.loop is not None:
        loop(args.precision, args.loop, args.times)
    results = [
        compare(size, precision, args.windows)
        for size in SIZES
        for precision in ("float32", "bfloat16")
    ]
    if args.json:
        write(args.json, results)


if __name__ == "__main__":
    main()
