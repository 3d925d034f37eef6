"""What does it take to plan an epoch of 10^9 samples, and what memory?

    python benchmarks/billion.py [--samples 1000000000] [--only resample]

Each way is planned in a process of its own: once when a run starts, and then two epochs, each with
a batch of 512 from its middle, cut into micro-batches. Processor seconds, and how much the resident
memory has grown at most, beyond an order of few samples. Labels and lengths are a column of 65,536
that is repeated; a run reads all labels once when it starts, which is not in these figures. The
weights of a `WeightedRandomSampler` are the user's, 8 bytes a sample, and not in the memory here;
torch draws from 2^24 samples at most, so it is planned for so many. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

BATCH, PARTS, SEED, EPOCHS = 512, 8, 5, (7, 8)
COLUMN = 1 << 16
TORCHS_MOST = 1 << 24
WAYS = (
    "plain",
    "tokens",
    "sources",
    "stream",
    "mixed_streams",
    "sampler",
    "resample",
    "stratified",
    "reweight",
)

Made = Callable[[int], Any]


def _memory(kind: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(kind))


def _column(high: int) -> Callable[[Any], Any]:
    drawn = np.random.default_rng(1).integers(1, high, COLUMN)
    return lambda indices: drawn[indices % COLUMN]


def _classes(samples: int) -> Any:
    """Labels of 49 classes, counted in blocks as long as the column."""
    from instep.data.class_codes import CountedCodes

    look, blocks = _column(50), -(-samples // COLUMN)
    counts = np.tile(np.bincount(look(np.arange(COLUMN)) - 1), (blocks, 1))
    return CountedCodes(
        lambda first, stop: look(np.arange(first, stop)) - 1,
        lambda indices: look(indices) - 1,
        blocks * COLUMN,
        counts,
        COLUMN,
    )


def made(way: str, samples: int, weights: Any = None) -> Any:
    """An order, as a run has it; `weights` are a sampler's."""
    from instep.data.balance import ClassOrder, InProportion, Members, Wished, planned_counts
    from instep.data.lengths import ByLength
    from instep.data.mixture import SourceMembers, planned_shares
    from instep.data.order import Order
    from instep.data.reading.streams.shares import MixedPlan, MixedTurns
    from instep.data.reading.streams.turns import StreamPlan, Turns

    if way in ("resample", "stratified", "reweight"):
        codes = _classes(samples)
        members = Members(codes)
        if way == "reweight":
            return Order(samples, SEED), codes
        if way == "stratified":
            return InProportion(members, SEED)
        return ClassOrder(members, planned_counts(codes.counts, "inverse"), SEED)
    if way == "sampler":
        return Wished(weights, SEED, samples)
    if way == "tokens":
        base, lengths = Order(samples, SEED), _column(500)
        cuts = {"window": 16_384, "seed": SEED, "micro_batches": PARTS, "tokens": 65_536}
        return ByLength(base, samples, lengths, **cuts)
    if way == "sources":
        sizes = np.array([samples // 2, samples // 4, samples // 4])
        planned = planned_shares(sizes, np.array([0.7, 0.2, 0.1]), [False] * 3)
        return ClassOrder(SourceMembers(sizes), planned, SEED)
    each = samples // PARTS
    if way == "stream":
        plan = StreamPlan(PARTS, 2048, True, (each,) * PARTS, samples)
        return Turns(plan, SEED, BATCH)
    if way == "mixed_streams":
        half = (each // 2,) * PARTS
        plans = tuple(StreamPlan(PARTS, 1024, True, half, samples // 2, n, 2) for n in (0, 1))
        counts = (samples * 7 // 10, samples - samples * 7 // 10)
        shares = tuple(count / samples for count in counts)
        return MixedTurns(MixedPlan(plans, shares, counts, samples), SEED, BATCH)
    return Order(samples, SEED)


def batch(order: Any, epoch: int) -> int:
    """Take a batch from the middle of an epoch, micro-batch by micro-batch; how many it had."""
    from instep.data.order import Position

    order, codes = order if isinstance(order, tuple) else (order, None)
    if hasattr(order, "steps"):  # by length
        where = order.of(epoch, order.steps // 2)
    else:
        positions = order.positions(epoch) if hasattr(order, "positions") else order.samples
        first = positions // 2 // BATCH * BATCH
        where = Position(epoch, first, first + BATCH)
    count = 0
    for number in range(PARTS):
        found = order.indices(epoch, *where.micro_batch(number, PARTS))
        count += len(found)
        if codes is not None:
            codes.of(found)
    return count


def measured(way: str, samples: int) -> dict[str, Any]:
    """Plan in this process."""
    batch(made("plain", 10_000), 0)
    weights = np.random.default_rng(1).random(samples) if way == "sampler" else None
    before, cpu = _memory("VmRSS"), time.process_time()
    order = made(way, samples, weights)
    begun, took = time.process_time() - cpu, []
    for epoch in EPOCHS:
        cpu = time.process_time()
        count = batch(order, epoch)
        took.append(round(time.process_time() - cpu, 4))
    more = (_memory("VmHWM") - before) / 1e6
    found = {"samples": samples, "start_cpu_s": round(begun, 2), "epoch_cpu_s": took}
    return found | {"batch": count, "mb": round(more, 1)}


def main() -> int:
    """Print a line for each way, and one JSON object at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=10**9)
    parser.add_argument("--only", choices=WAYS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        print(json.dumps(measured(args.only, args.samples)))
        return 0
    result = {}
    for way in [args.only] if args.only else WAYS:
        samples = min(args.samples, TORCHS_MOST) if way == "sampler" else args.samples
        command = [sys.executable, __file__, "--here", "--only", way, "--samples", str(samples)]
        out = subprocess.run(command, stdout=-1, check=True).stdout
        result[way] = json.loads(out)
        print(json.dumps({way: result[way]}), flush=True)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
