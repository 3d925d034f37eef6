"""What does it cost to keep state in memory that outlives a process?

    python benchmarks/host_memory.py [--megabytes 64] [--rounds 40]

One process, one thread. Work on the memory of `HostMemory` and on ordinary memory of torch take
turns; each pair gives a ratio of thread CPU times. The work is a copy, and 8-bit quantization
with error feedback, which writes what it leaves out. Both alternate between two slots.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from instep.system.host_memory import HostMemory
from instep.system.slots import TensorSpec


def copy(gradient: torch.Tensor, _: torch.Tensor, left: torch.Tensor) -> None:
    left.copy_(gradient)


class Int8:
    """Plain torch: `left` = what 8 bits leave out of the gradient plus what was left before."""

    def __init__(self, count: int) -> None:
        self.whole, self.levels = torch.empty(count), torch.empty(count, dtype=torch.int8)

    def __call__(self, gradient: torch.Tensor, before: torch.Tensor, left: torch.Tensor) -> None:
        torch.add(gradient, before, out=self.whole)
        scale = float(self.whole.abs().max()) / 127
        self.levels.copy_(torch.div(self.whole, scale, out=left).round_())
        torch.sub(self.whole, left, alpha=scale, out=left)


def seconds(work: Callable[[], object]) -> float:
    before = time.thread_time()
    work()
    return time.thread_time() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    count = arguments.megabytes * (1 << 20) // 4
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(1))
    memory = HostMemory()
    memory.lay_out({"residual": TensorSpec((count,), torch.float32)})
    kept = []
    for number in (1, 2):
        kept.append(memory.stage(0, number, 0)["residual"].zero_())
        memory.staged(0, number, 0)
    plain = [torch.zeros(count) for _ in kept]
    for name, work in (("copy", copy), ("int8 with error feedback", Int8(count))):
        ratios, rates = [], []
        for turn in range(arguments.rounds + 2):
            times = {}
            for slots in (plain, kept) if turn % 2 else (kept, plain):
                before, left = slots[turn % 2], slots[1 - turn % 2]
                times[slots is kept] = seconds(lambda: work(gradient, before, left))  # noqa: B023
            if turn > 1:
                ratios.append(times[True] / times[False])
                rates.append(4 * count / times[False] / 1e9)
        low, middle, high = statistics.quantiles(ratios, n=4)
        print(
            f"{name}, {arguments.megabytes} MB: {middle:.3f} ({low:.3f} to {high:.3f}) times as "
            f"long as in ordinary memory, which takes {statistics.median(rates):.2f} GB/s"
        )
    memory = HostMemory()
    memory.lay_out({})
    turns = 20_000

    def stage_all() -> None:
        for number in range(1, turns):
            memory.stage(0, number, 0)
            memory.staged(0, number, 0)

    taken = seconds(stage_all)
    print(f"stage and staged of an empty layout: {1e6 * taken / turns:.1f} microseconds")
    found = seconds(lambda: [memory.at(0, turns - 1) for _ in range(turns)])
    print(f"at: {1e6 * found / turns:.1f} microseconds")


if __name__ == "__main__":
    main()
