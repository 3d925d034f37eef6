"""The first batch of a manifest of 10^9 samples in 10^4 shards: seconds, and resident memory.

    python benchmarks/first_batch.py --to FOLDER [--shards 10000] [--batch 512]

The shards are sparse files of zeros, each of 100,000 samples of 8 float32 and a class. A new
process opens the manifest, draws the first global batch of an epoch in the global and in the
windowed order, and reads it; what it has mapped counts, too. The second round has the same pages in
the page cache. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

SAMPLES = 100_000
ROWS = 16_384
"""Samples of a record batch, as the writer has at most."""

READER = """
import json, sys, time

def memory():
    with open("/proc/self/status") as file:
        lines = [line.split() for line in file]
    return {line[0]: int(line[1]) * 1024 for line in lines if line[0] in KINDS}

KINDS = ("VmRSS:", "RssAnon:", "RssFile:")
folder, order, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
import torch
from instep.data.order import Order, key
from instep.data.sources import shards
from instep.data.windowed import Windowed

Order(5, 1).indices(0, 0, 5)
before, began, cpu = memory(), time.monotonic(), time.process_time()
dataset = shards(folder)
opened_s = time.monotonic() - began
if order == "global":
    chosen = Order(len(dataset), key(0, 1)).indices(0, 0, count)
else:
    chosen = Windowed(dataset.shard_sizes, 16384, 0, batch=count, lanes=8).indices(0, 0, count)
got = dataset.__getitems__(chosen.tolist())
took_s, after, cpu = time.monotonic() - began, memory(), time.process_time() - cpu
assert len(got) == count
more = {name.strip(":"): round((after[name] - before[name]) / 1e6, 1) for name in KINDS}
times = {"opened_s": opened_s, "seconds": took_s, "cpu_s": cpu}
print(json.dumps({**{name: round(each, 3) for name, each in times.items()}, "mb": more}))
"""


def make(folder: Path, count: int) -> None:
    """Write the manifest, and sparse shards that differ in nothing."""
    from instep.data.shards.columns import Column
    from instep.data.shards.manifest import Manifest, Shard, write_manifest
    from instep.data.shards.views import View
    from instep.data.shards.writer import ShardWriter

    folder.mkdir(parents=True, exist_ok=True)
    columns = [Column("x", "array", "float32", (8,)), Column("y", "number", "int64")]
    template = folder / "template.arrow"
    with ShardWriter(template, columns) as writer:
        for first in range(0, SAMPLES, ROWS):
            rows = min(ROWS, SAMPLES - first)
            writer.write([View(np.zeros((rows, 8), np.float32)), View(np.zeros(rows, np.int64))])
        writer.close()
    whole = template.read_bytes()
    template.unlink()
    pages = [(at, whole[at : at + 4096]) for at in range(0, len(whole), 4096)]
    pages = [(at, page) for at, page in pages if any(page)]
    shards = []
    for number in range(count):
        with open(folder / f"shard-{number:05}.arrow", "wb") as file:
            file.truncate(len(whole))
            for at, page in pages:
                file.seek(at)
                file.write(page)
        shards.append(Shard(f"shard-{number:05}.arrow", SAMPLES, len(whole)))
    size = count * len(whole)
    made = Manifest(
        columns=columns, samples=count * SAMPLES, bytes=size, sha256="0", bad=0, shards=shards
    )
    write_manifest(folder, made)


def main() -> int:
    """Make, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--batch", type=int, default=512)
    given = parser.parse_args()
    if not (given.to / "manifest.json").exists():
        make(given.to, given.shards)
    found: dict[str, Any] = {"shards": given.shards, "samples": given.shards * SAMPLES}
    for order in ("global", "windowed"):
        for turn in ("first", "again"):
            words = [sys.executable, "-c", READER, str(given.to), order, str(given.batch)]
            out = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            found[f"{order} {turn}"] = json.loads(out)
            print(order, turn, out, end="", flush=True)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
