"""How much memory does a process of a sharded replica take, beside what is promised?

    python benchmarks/mesh_memory.py [--case MILLIONS,BLOCKS,SHARD ...] [--json FILE]

A GPT and AdamW in float32, ZeRO 3, one replica on this machine. Promised are, beyond a process that
has imported torch: parameters, gradients and optimizer state over `shard`, two gathered blocks, and
one gradient of a block that is not split. Measured is the largest resident memory (VmHWM) of each
worker, from its start and over a few steps of training alone, less that of the fork server that it
was forked from. The copies of commits in memory of the host lie apart (RssShmem), and are taken
off. Each case runs as the launcher starts it, and with thresholds of malloc as they are by default.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from recovery import HERE, NEWEST, UnderInstep, full_again, newest_pids
from turns import write

from instep.events import STEPS, read_records

RECIPE = f"{HERE / 'recipes' / 'host_copies.py'}:recipe"
CASES = [(50, 8, 2), (50, 16, 4), (100, 8, 4), (100, 16, 2)]
WORDS, LENGTH = 256, 16
PLAIN = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""What glibc comes to by itself where blocks of 32 MB are freed."""


def width_of(millions: int, blocks: int) -> int:
    """A multiple of 16; a block has 12 times its square."""
    return 16 * round(math.sqrt(millions * 1e6 / (12 * blocks)) / 16)


def promise(blocks: int, width: int, shard: int) -> int:
    """Bytes."""
    block = 12 * width * width + 13 * width
    rest = 2 * WORDS * width + LENGTH * width + 2 * width
    return 16 * (blocks * block + rest) // shard + 3 * 4 * block


def memory_of(pid: int) -> dict[str, int]:
    """Of `/proc/PID/status` and `smaps_rollup`, in bytes."""
    found = {}
    for name in ("status", "smaps_rollup"):
        for line in Path(f"/proc/{pid}/{name}").read_text().splitlines():
            words = line.split()
            if words[-1] == "kB":
                found[words[0].rstrip(":")] = 1024 * int(words[1])
    found["USS"] = found["Private_Clean"] + found["Private_Dirty"]
    return found


def measure(millions: int, blocks: int, shard: int, steps: int, *, plain: bool) -> dict[str, Any]:
    width = width_of(millions, blocks)
    arguments = {
        "layers": blocks,
        "width": width,
        "heads": 16,
        "length": LENGTH,
        "samples": 400,
        "tried": 0,
    }
    keys = {"mesh.shard": shard, "train.micro_batches": shard, "train.determinism": '"order"'}
    keys |= {f"arguments.{name}": value for name, value in arguments.items()}
    os.environ.update(PLAIN if plain else {})
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run = UnderInstep(folder, shard, shard, RECIPE, keys)
        try:
            if not full_again(run, 0.0, 600.0):
                print((folder / "said").read_text()[-3000:], file=sys.stderr)
                raise SystemExit("the run did not begin")
            first = wait_for(run, 3)
            pids = newest_pids(run.run)
            server = memory_of(psutil.Process(pids[0]).ppid())
            start = [memory_of(pid) for pid in pids]
            for pid in pids:
                Path(f"/proc/{pid}/clear_refs").write_text("5")  # VmHWM begins anew
            last = wait_for(run, first + steps)
            trained = [memory_of(pid) for pid in pids]
        finally:
            run.end()
            for name in PLAIN:
                os.environ.pop(name, None)
        records = read_records(run.run / "steps.bin", STEPS)
    begins = np.sort(records["begin"][(records["worker"] == 0) & (records["step"] >= first)])
    wanted, base = promise(blocks, width, shard), server["Rss"]
    own = max(e["VmHWM"] - e["RssShmem"] - e["RssFile"] - server["RssAnon"] for e in trained)

    def peak(of: list[dict[str, int]]) -> int:
        return max(each["VmHWM"] - trained[0]["RssShmem"] - base for each in of)

    return {
        "millions": millions,
        "blocks": blocks,
        "shard": shard,
        "malloc": "plain" if plain else "launcher's",
        "promise_mb": round(wanted / 1e6, 1),
        "base_mb": round(base / 1e6, 1),
        "training_mb": round(peak(trained) / 1e6, 1),
        "training_over_promise": round(peak(trained) / wanted, 3),
        "training_anonymous_over_promise": round(own / wanted, 3),
        "start_over_promise": round(peak(start) / wanted, 3),
        "host_copies_mb": round(trained[0]["RssShmem"] / 1e6, 1),
        "step_s": round(float(np.median(np.diff(begins))), 4),
        "steps": last - first,
        "load": round(os.getloadavg()[0], 1),
        "workers": [
            {n: each[n] for n in ("VmHWM", "Rss", "Pss", "USS", "RssAnon", "RssShmem", "RssFile")}
            for each in trained
        ],
    }


def wait_for(run: UnderInstep, step: int) -> int:
    """The last step, once it is no less than this one."""
    while (at := run.steps(NEWEST)[-1].number) < step:
        if not run.alive():
            raise SystemExit("the run has ended")
        time.sleep(0.1)
    return at


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    case = "MILLIONS,BLOCKS,SHARD"
    parser.add_argument("--case", nargs="+", metavar=case, default=[])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    cases = [tuple(map(int, text.split(","))) for text in args.case] or CASES
    results = []
    for millions, blocks, shard in cases:
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * args.rounds):
            plain = turn % 2 == 0
            found = measure(millions, blocks, shard, args.steps, plain=plain)
            results.append(found)
            if args.json:
                write(args.json, results)
            times[plain].append(found["step_s"])
            print(json.dumps({k: v for k, v in found.items() if k != "workers"}), flush=True)
        pairs = zip(times[False], times[True], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        print(f"  a step takes {ratio:.3f} times as long as with malloc's own thresholds")


if __name__ == "__main__":
    main()
