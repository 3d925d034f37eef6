"""How fast are codecs, on one core, beside a copy of memory?

    python benchmarks/encoders.py [--mb 64] [--turns 9]

Encoding with error feedback and without, decoding and adding, of so many megabytes of float32; each
takes its turn with a copy of as many bytes. Seconds of processor time, so that a busy machine
disturbs less. Prints JSON: GB of float32 a second, and ratios to the copy (medians and quartiles).
`torch`: the same by torch's operations, which run on CUDA.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from instep.comm.codecs import CODECS
from instep.comm.codecs.base import CUT
from instep.comm.codecs.blocks import Blocks
from instep.comm.codecs.top_k import TopK


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=64.0)
    parser.add_argument("--turns", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = int(arguments.mb * 1e6) // 4
    found = {
        name: measured(CODECS[name](), count, arguments.turns)
        for name in CODECS
        if name != "none" and hasattr(CODECS[name], "encode")
    }
    print(json.dumps({"mb": arguments.mb, "load": os.getloadavg()[0], "codecs": found}, indent=1))


def measured(codec: Any, count: int, turns: int) -> dict[str, Any]:
    values, copy, left, total = torch.randn(count), *(torch.zeros(count) for _ in range(3))
    payload = torch.zeros(codec.size(count), dtype=torch.uint8)
    works: dict[str, Callable[[], object]] = {
        "encode": lambda: codec.encode(values, payload, key=1),
        "encode, error feedback": lambda: codec.encode(values, payload, key=1, left=left),
        "decode and add": lambda: codec.add_into(total, payload),
    }
    if isinstance(codec, (Blocks, TopK)):
        width = codec.block if isinstance(codec, Blocks) else CUT
        rows = values[: count // width * width].view(-1, width)
        works["torch: encode, error feedback"] = lambda: codec.coded(rows)
    answer = {}
    for name, work in works.items():
        pairs = [(took(lambda: copy.copy_(values)), took(work)) for _ in range(turns + 1)][1:]
        ratios = sorted(one / other for one, other in pairs)
        answer[name] = {
            "gb_s": round(4e-9 * count / statistics.median(other for _, other in pairs), 2),
            "of_copy": round(statistics.median(ratios), 2),
            "quartiles": [round(q, 2) for q in statistics.quantiles(ratios, n=4)[::2]],
        }
    return answer


def took(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


if __name__ == "__main__":
    main()
