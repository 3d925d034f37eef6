"""Does the windowed order mix as the global one does, and how much of the set do hosts read?

A set of ten classes, sorted by class, shuffled once (as `instep prepare --shuffle` does) and cut
into 80 shards. The global order stands beside the windowed one, with a lane for each of 8
micro-batches and with one lane for all, on the shuffled set and on the sorted one:

- chi-square of the classes of each batch, over its expectation for a random batch;
- loss of a small classifier after two epochs on samples that it was not trained on, over seeds;
- shards that 1, 2 and 4 hosts read in an epoch, over those of the set. Each host keeps 24 shards,
  and drops the one that it has not used for longest.

    python benchmarks/windowed.py [--seeds 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from instep.data.dealing import deal
from instep.data.order import AnyOrder, Indices, Order, micro_batch, position, steps_in_epoch
from instep.data.windowed import Windowed

SAMPLES, SHARDS, CLASSES, BATCH, PARTS, WINDOW = 40_000, 80, 10, 64, 8, 4_096
KEPT = 24
SIZE = SAMPLES // SHARDS
LABELS = np.arange(SAMPLES) * CLASSES // SAMPLES
ONCE = np.random.default_rng(0).permutation(SAMPLES)
"""The external shuffle: which sample of the sorted set stands where."""


def orders(seed: int) -> dict[str, AnyOrder]:
    sizes = [SIZE] * SHARDS
    return {
        "global": Order(SAMPLES, seed),
        "windowed": Windowed(sizes, WINDOW, seed, batch=BATCH, lanes=PARTS),
        "one lane": Windowed(sizes, WINDOW, seed),
    }


def chi_square(order: AnyOrder, labels: Indices, epochs: int) -> float:
    """Mean over batches, over the degrees of freedom; 1 for random batches (but for n - 1)."""
    full, expected = SAMPLES // BATCH * BATCH, BATCH / CLASSES
    found = []
    for epoch in range(epochs):
        batches = labels[order.indices(epoch, 0, full)].reshape(-1, BATCH)
        counts = np.stack([(batches == each).sum(1) for each in range(CLASSES)], 1)
        found.append(((counts - expected) ** 2 / expected).sum(1).mean() / (CLASSES - 1))
    return float(np.mean(found))


def loss(order: AnyOrder, inputs: torch.Tensor, labels: torch.Tensor, seed: int) -> float:
    """Of an MLP that is trained for two epochs, on samples of its own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        for step in range(1, steps_in_epoch(SAMPLES, BATCH) + 1):
            _, first, stop = position(step, SAMPLES, BATCH)
            chosen = torch.from_numpy(order.indices(epoch, first, stop))
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(inputs[SAMPLES:]), labels[SAMPLES:]))


def made() -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs that overlap, and their classes; the last 10,000 are to measure the loss on."""
    rng = np.random.default_rng(1)
    labels = np.concatenate([LABELS, rng.integers(0, CLASSES, 10_000)])
    centres = rng.normal(size=(CLASSES, 20))
    inputs = centres[labels] + 1.5 * rng.normal(size=(len(labels), 20))
    return torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels)


def read_by(hosts: int, order: AnyOrder) -> float:
    """Shards that hosts read in an epoch, each host its own, over those of the set."""
    read = 0
    for share in deal(PARTS, hosts):
        held: dict[int, int] = {}
        for step in range(1, steps_in_epoch(SAMPLES, BATCH) + 1):
            _, first, stop = position(step, SAMPLES, BATCH)
            low, _ = micro_batch(first, stop, share.start, PARTS)
            _, high = micro_batch(first, stop, share.stop - 1, PARTS)
            for shard in np.unique(order.indices(0, low, high) // SIZE).tolist():
                read += shard not in held
                held[shard] = step
            while len(held) > KEPT:
                del held[min(held, key=lambda each: held[each])]
    return read / SHARDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    inputs, labels = made()
    results: dict[str, Any] = {}
    for data, where in (("shuffled once", ONCE), ("sorted by class", np.arange(SAMPLES))):
        stood = np.concatenate([where, np.arange(SAMPLES, len(labels))])
        seen = inputs[stood], labels[stood]
        for name in orders(0):
            chi = chi_square(orders(0)[name], LABELS[where], 20)
            losses = [loss(orders(seed)[name], *seen, seed) for seed in range(args.seeds)]
            results[f"{data}, {name}"] = {
                "chi_square": round(chi, 4),
                "loss": round(float(np.mean(losses)), 4),
                "losses": [round(each, 4) for each in sorted(losses)],
            }
            print(f"{data:16} {name:9} chi-square {chi:.3f}  loss {np.mean(losses):.4f}", end=" ")
            print(f"[{min(losses):.4f}, {max(losses):.4f}]", flush=True)
    reads = {
        name: {hosts: read_by(hosts, order) for hosts in (1, 2, 4)}
        for name, order in orders(0).items()
    }
    for name, each in reads.items():
        print(f"shards read, over the set: {name:9} {each}")
    if args.json:
        told = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "load": [round(each) for each in os.getloadavg()[:2]],
            "samples": SAMPLES,
            "shards": SHARDS,
            "batch": BATCH,
            "micro_batches": PARTS,
            "window": WINDOW,
            "seeds": args.seeds,
            "results": results,
            "shards_read_over_the_set": reads,
        }
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
