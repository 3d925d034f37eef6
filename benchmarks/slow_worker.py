"""One of four workers is slow: how near does training come to the sum of their speeds?

    python benchmarks/slow_worker.py [--steps 100] [--long 1000] [--json FILE]

Four workers, of which one is four times slower, with work dealt by speed and,
as the rival, evenly. At last one of four is five times slower for so many steps
as `--long` says. The time of a sample is slept, so that two cores are enough
for four workers.

Two ideals. What the four could sleep through, with nothing lost to loading,
exchange, update, calls or a late waking. And, in the same run, the sum of the
samples per second that each shows while it computes: medians of its steps. The
rates are of all steps (the first few are dealt evenly), of those after that, and
of their median, which other work on the machine moves less.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import instep
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder

HERE = Path(__file__).parent
RECIPE = f"{HERE / 'recipes' / 'one_is_slow.py'}:recipe"
WORKERS, PARTS, BATCH = 4, 32, 64


class Bench:
    """Trains in folders of its own.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def train(self, steps: int, sample_s: float, times: float, **train: object) -> RunFolder:
        """A run of which one worker is `times` slower."""
        self._number += 1
        mark = self._folder / f"mark-{self._number}"
        done = instep.train(
            RECIPE,
            name=f"run-{self._number}",
            runs=self._folder,
            workers=WORKERS,
            seed=7,
            quiet=True,
            arguments={"mark": str(mark), "sample_s": sample_s, "times": times},
            train={"steps": steps, "global_batch": BATCH, "micro_batches": PARTS, **train},
        )
        return RunFolder(done.path)


def rate(run: RunFolder, first: int) -> float:
    """Samples per second from the end of step `first` on."""
    steps = run.steps[run.steps["step"] >= first]
    ends = step_ends(steps)
    begin = float(ends[steps["step"] == first].max())
    return BATCH * (run.last_step - first) / (float(ends.max()) - begin)


def median_rate(run: RunFolder, first: int) -> float:
    """Samples per second of the median step from `first` on; epochs end with no smaller one."""
    steps = run.steps[run.steps["step"] >= first]
    ends = np.zeros(run.last_step + 1)
    np.maximum.at(ends, steps["step"], step_ends(steps))
    return BATCH / float(np.median(np.diff(ends[first:])))


def sum_of_speeds(run: RunFolder, first: int) -> float:
    """Samples per second of all workers, each while it computes, in its median step."""
    whole = 0.0
    for worker in range(WORKERS):
        steps = run.steps_of(worker)
        steps = steps[(steps["step"] >= first) & (steps["samples"] > 0)]
        busy_s = steps["load_s"] + steps["forward_s"] + steps["backward_s"]
        whole += float(np.median(steps["samples"] / busy_s))
    return whole


def share_of_slow(run: RunFolder) -> float:
    """The smallest part of all samples that a worker computed."""
    steps = run.steps
    parts = [int(steps["samples"][steps["worker"] == w].sum()) for w in range(WORKERS)]
    return min(parts) / sum(parts)


def told(run: RunFolder, sample_s: float, times: float) -> dict[str, Any]:
    """What a run that was dealt by speed has to tell."""
    ideal, dealt = (WORKERS - 1 + 1 / times) / sample_s, run.named("work_dealt")
    first = dealt[0]["step"]
    return {
        "determinism": run.spec.train.determinism,
        "slower": times,
        "steps": run.last_step,
        "sample_ms": 1000 * sample_s,
        "ideal_samples_per_s": round(ideal, 1),
        "of_ideal": round(rate(run, 1) / ideal, 3),
        "of_ideal_once_dealt": round(rate(run, first) / ideal, 3),
        "of_ideal_median_step": round(median_rate(run, first) / ideal, 3),
        "of_speeds_once_dealt": round(rate(run, first) / sum_of_speeds(run, first), 3),
        "of_speeds_median_step": round(median_rate(run, first) / sum_of_speeds(run, first), 3),
        "dealt": [[e["step"], e["reason"], *e["micro_batches"]] for e in dealt],
        "share_of_the_slow": round(share_of_slow(run), 3),
        "generations": len(run.members.generations),
        "repeated_samples": run.audit.repeated,
        "missing_samples": run.audit.missing,
        "load": round(os.getloadavg()[0], 1),
    }


def case(
    bench: Bench, steps: int, sample_s: float, times: float, mode: str, *, rival: int = 0
) -> dict[str, Any]:
    """Dealt by speed, against the sum of speeds and, for `rival` steps, against even deals."""
    settings = {"determinism": mode, "threads": 1}
    by_speed = bench.train(steps, sample_s, times, **settings)
    result = told(by_speed, sample_s, times)
    if rival:
        even = bench.train(rival, sample_s, times, deal="even", **settings)
        result["even_of_ideal"] = round(rate(even, 1) / float(result["ideal_samples_per_s"]), 3)
    print(json.dumps(result), file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--long", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        bench = Bench(Path(text))
        modes = ("order", "bits")
        results = [case(bench, args.steps, 0.016, 4.0, mode, rival=20) for mode in modes]
        results += [case(bench, args.long, 0.006, 5.0, mode) for mode in modes]
        result = {
            "date": datetime.date.today().isoformat(),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "torch": torch.__version__,
            "workers": WORKERS,
            "micro_batches": PARTS,
            "results": results,
        }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
