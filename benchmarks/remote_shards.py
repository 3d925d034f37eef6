"""What do shards at a URL cost a step, once this host has them, beside shards in a folder?

    python benchmarks/remote_shards.py [--batch 64] [--turns 40]

Shards of 64 MB are prepared, and served on loopback. Two datasets, of the folder and of the URL,
read the same batches of random samples in turns. What reading from the cache costs more for each
batch, over a step of 20 ms, is the cost; and a step with nothing in the cache is said beside it.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from instep.data.shards.urls.remote import CACHE
from instep.data.sources import shards
from instep.prepare.asked import Asked
from instep.prepare.prepare import prepare

STEP_S, BATCHES, SAMPLES = 0.02, 50, 40_000


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files of a folder, and prints nothing."""

    def log_message(self, *args: Any) -> None:
        """Keep silent."""


def make(folder: Path) -> None:
    """Prepare some 160 MB in shards of 64 MB."""
    rng = np.random.default_rng(1)
    (folder / "clean.py").write_text(
        "import numpy as np\n\ndef record(raw):\n"
        "    drawn = np.random.default_rng(raw['id'])\n"
        "    return {'x': drawn.random(1000, np.float32), 'y': raw['id'] % 10}\n"
    )
    rows = (json.dumps({"id": int(number)}) for number in rng.permutation(SAMPLES))
    (folder / "raw.jsonl").write_text("\n".join(rows))
    asked = Asked(sources=["raw.jsonl"], map="clean.py:record", to="shards", shard_bytes=64 << 20)
    prepare(asked, lambda _: None, workers=2)


def seconds(dataset: Any, batches: list[list[int]]) -> float:
    """Seconds for each batch."""
    began = time.perf_counter()
    for batch in batches:
        for index in batch:
            dataset[index]
    return (time.perf_counter() - began) / len(batches)


def main() -> int:
    """Make, serve, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--turns", type=int, default=40)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        os.environ[CACHE] = str(Path(name, "cache"))
        make(Path(name))
        handler = functools.partial(Quiet, directory=str(Path(name, "shards")))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = shards("shards")
        there = shards(f"http://127.0.0.1:{server.server_address[1]}")
        rng = np.random.default_rng(2)
        size = (BATCHES, given.batch)
        cold = seconds(there, rng.integers(0, SAMPLES, size)[:1].tolist())
        times: dict[str, list[float]] = {"here": [], "there": []}
        for _ in range(given.turns):
            batches: list[list[int]] = rng.integers(0, SAMPLES, size).tolist()
            times["here"].append(seconds(here, batches))
            times["there"].append(seconds(there, batches))
        server.shutdown()
        os.chdir("/")
    more = [b - a for a, b in zip(times["here"], times["there"], strict=True)]
    print(
        json.dumps(
            {
                "folder_ms": 1e3 * median(times["here"]),
                "url_ms": 1e3 * median(times["there"]),
                "more_of_a_step": median(more) / STEP_S,
                "first_batch_s": cold,
            }
        )
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
