"""One of four workers is slow: how near does training come to the sum of their speeds?

    python benchmarks/slow_worker.py [--steps 120] [--long 1000] [--json FILE]

Four workers, of which one is four times slower, with work dealt by speed and,
as the rival, evenly. The ideal is the sum of the samples per second that each
trains alone, measured in the same run. The time of a sample is slept, so that
two cores are enough for four workers. Two figures of each run: of all its steps
(the deal is even until speeds are known), and of those after that. At last one
of four is five times slower for so many steps as `--long` says.
"""

import argparse
import datetime
import json
import os
import platform
import sys
import tempfile
from pathlib import Path

import torch

import instep
from instep.report.run_folder import RunFolder, step_ends

HERE = Path(__file__).parent
RECIPE = f"{HERE / 'recipes' / 'one_is_slow.py'}:recipe"
WORKERS, PARTS, BATCH = 4, 32, 64
WARM = 5
"""Steps that never count: processes and files are new."""
ALONE = 15
"""Steps in which a worker shows how fast it is alone."""


class Bench:
    """Trains in folders of its own.

    Args:
        folder: empty.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0

    def train(
        self, workers: int, steps: int, sample_s: float, times: float, *, slow: bool = True, **train
    ) -> RunFolder:
        """A run of so many workers; the first of them is `times` slower, unless `slow` is off."""
        self._number += 1
        mark = self._folder / f"mark-{self._number}"
        if not slow:
            mark.write_text("nobody")
        done = instep.train(
            RECIPE,
            name=f"run-{self._number}",
            runs=self._folder,
            workers=workers,
            seed=7,
            quiet=True,
            arguments={"mark": str(mark), "sample_s": sample_s, "times": times},
            train={"steps": steps, "global_batch": BATCH, "micro_batches": PARTS, **train},
        )
        return RunFolder(done.path)


def rate(run: RunFolder, first: int = WARM) -> float:
    """Samples per second from the end of step `first` on."""
    steps = run.steps[run.steps["step"] >= first]
    ends = step_ends(steps)
    begin = float(ends[steps["step"] == first].max())
    return BATCH * (run.last_step - first) / (float(ends.max()) - begin)


def share_of_slow(run: RunFolder) -> float:
    """The smallest part of all samples that a worker computed."""
    steps = run.steps
    parts = [int(steps["samples"][steps["worker"] == w].sum()) for w in range(WORKERS)]
    return min(parts) / sum(parts)


def case(
    bench: Bench, steps: int, sample_s: float, times: float, mode: str, *, rival: bool
) -> dict[str, object]:
    """Dealt by speed, against the sum of speeds and against even deals."""
    settings = {"determinism": mode, "threads": 1}
    alone = {
        slow: rate(bench.train(1, ALONE, sample_s, times, slow=slow, **settings))
        for slow in (False, True)
    }
    ideal = (WORKERS - 1) * alone[False] + alone[True]
    by_speed = bench.train(WORKERS, steps, sample_s, times, **settings)
    even = bench.train(WORKERS, steps, sample_s, times, deal="even", **settings) if rival else None
    dealt = by_speed.named("work_dealt")
    result: dict[str, object] = {
        "determinism": mode,
        "slower": times,
        "steps": steps,
        "sample_ms": 1000 * sample_s,
        "ideal_samples_per_s": round(ideal, 1),
        "of_ideal": round(rate(by_speed) / ideal, 3),
        "of_ideal_once_dealt": round(rate(by_speed, dealt[0]["step"]) / ideal, 3),
        "dealt": [[e["step"], e["reason"], e["micro_batches"]] for e in dealt],
        "share_of_the_slow": round(share_of_slow(by_speed), 3),
        "generations": len(by_speed.generations),
        "load": round(os.getloadavg()[1], 1),
    }
    if even is not None:
        result["even_of_ideal"] = round(rate(even) / ideal, 3)
        one, other = (run.last("model_saved")["parameters_sha256"] for run in (by_speed, even))
        result["same_bits_as_even"] = one == other
    print(json.dumps(result), file=sys.stderr)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--long", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        bench = Bench(Path(text))
        modes = ("order", "bits")
        results = [case(bench, args.steps, 0.008, 4.0, mode, rival=True) for mode in modes]
        results += [case(bench, args.long, 0.002, 5.0, mode, rival=False) for mode in modes]
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
