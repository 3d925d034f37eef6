"""Is instep as fast as plain PyTorch DDP, with the same model, data and threads?

    python benchmarks/against_ddp.py [--model mlp|gpt|all] [--windows 16] [--json FILE]

Two workers on this machine, one thread each. A machine's speed drifts by more
than the difference that is looked for, so both programs are alive at once and
take turns: one is stopped (SIGSTOP) while the other trains for a few seconds.
Each turn is compared with the other program's turns before and after it, by
the steps that lie wholly inside; the figure is the median of these ratios.
"""

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
import torch

from instep.events import STEPS, read_records

HERE = Path(__file__).parent


class Case(NamedTuple):
    """What is trained, and how long a turn is."""

    recipe: str
    global_batch: int
    turn_s: float


CASES = {
    "mlp": Case("recipes/mlp.py:recipe", 128, 2.0),
    "gpt": Case("recipes/gpt.py:recipe", 16, 8.0),
}
ENDLESS = "1000000"


class Program:
    """One of the two, started, and stopped until it is its turn."""

    def __init__(self, command: list[str]) -> None:
        silent = subprocess.DEVNULL
        self._process = subprocess.Popen(command, stdout=silent, stderr=silent)
        self.turns: list[tuple[float, float]] = []

    def _everyone(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def hold(self) -> None:
        for process in self._everyone():
            process.suspend()

    def turn(self, seconds: float) -> None:
        begin = time.time()
        for process in self._everyone():
            process.resume()
        time.sleep(seconds)
        self.hold()
        self.turns.append((begin, time.time()))

    def end(self) -> None:
        everyone = self._everyone()
        for process in everyone:
            process.kill()
        psutil.wait_procs(everyone)
        self._process.wait()


def ddp(case: Case, folder: Path) -> Program:
    return Program(
        [sys.executable, str(HERE / "ddp_rival.py"), str(HERE / case.recipe), "--steps", ENDLESS,
         "--global-batch", str(case.global_batch), "--times", str(folder / "ddp.times")]
    )  # fmt: skip


def ours(case: Case, folder: Path) -> Program:
    job = folder / "job.toml"
    job.write_text(f'recipe = "{HERE / case.recipe}"\nname = "bench"\nseed = 7\n')
    settings = [f"train.steps={ENDLESS}", f"train.global_batch={case.global_batch}",
                "train.threads=1"]  # fmt: skip
    return Program(
        [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder), "--workers", "2",
         *(word for setting in settings for word in ("--set", setting))]
    )  # fmt: skip


def times_of(program: str, folder: Path) -> np.ndarray:
    """Unix seconds at which each step of one worker began."""
    if program == "ddp":
        return np.fromfile(folder / "ddp.times", "<f8")
    records = read_records(folder / "bench" / "steps.bin", STEPS)
    return np.sort(records["begin"][records["worker"] == 0])


def step_s(times: np.ndarray, turn: tuple[float, float]) -> float:
    """Seconds of a step inside a turn; its first step may have begun in the turn before."""
    inside = times[(times > turn[0]) & (times < turn[1])]
    return float((inside[-1] - inside[0]) / (len(inside) - 1))


def compare(name: str, windows: int) -> dict[str, object]:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        programs = {"ddp": ddp(case, folder), "instep": ours(case, folder)}
        try:
            time.sleep(25)  # both have started, and are past their first steps
            for program in programs.values():
                program.hold()
            for _ in range(windows):
                for program in programs.values():
                    program.turn(case.turn_s)
            programs["instep"].turn(1.0)  # records are sent a few times a second
        finally:
            for program in programs.values():
                program.end()
        speeds = {
            p: [case.global_batch / step_s(times_of(p, folder), t) for t in program.turns[:windows]]
            for p, program in programs.items()
        }
    ratios = [
        speeds["instep"][i] / ((speeds["ddp"][i] + speeds["ddp"][i + 1]) / 2)
        for i in range(windows - 1)
    ]
    median = statistics.median(ratios)
    low, high = np.quantile(ratios, [0.25, 0.75])
    print(
        f"{name}  instep {statistics.median(speeds['instep']):.1f}  "
        f"ddp {statistics.median(speeds['ddp']):.1f} samples/s  "
        f"ratio {median:.3f} (quartiles {low:.3f} to {high:.3f}, {len(ratios)} turns)",
        flush=True,
    )
    return {"case": name, "ratio": median, "ratios": ratios, "samples_per_second": speeds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=[*CASES, "all"], default="all")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    names = list(CASES) if args.model == "all" else [args.model]
    results = [compare(name, args.windows) for name in names]
    if args.json:
        where = {"date": str(datetime.date.today()), "torch": torch.__version__}
        where |= {"machine": platform.machine(), "python": platform.python_version()}
        args.json.write_text(json.dumps({**where, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
