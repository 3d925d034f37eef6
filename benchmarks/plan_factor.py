"""Is the factor of steps up to which another result pays what `instep compare` measures?

    python benchmarks/plan_factor.py [--only lstm gpt] [--rate 1gbit] [--turns 3] [--json FILE]

For two recipes on two emulated hosts (needs root) a plan, and then `instep compare` of two workers
that sum whole gradients with two that encode them, and with two that train in rounds. The plan says
"pays if it needs fewer than 1.55 times the steps": the time of a step over that of the other way,
both as planned. Compare measures the time of as many samples. Both ratios are of the same two ways.
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

from plan import LOADS, job_for
from turns import write

from instep.lab.alternatives import alternatives_of
from instep.lab.compare import Hosts, compare
from instep.lab.plan.plan import Question, plan_job

BASE = "2 all_reduce"
WAYS = {
    "2 all_reduce, bfloat16": "sync.codec=bfloat16",
    "2 all_reduce, int8": "sync.codec=int8",
    "2 averaging": "sync.name=averaging",
}


def quiet(text: str) -> None:
    """Say nothing."""


def cells_of(name: str, rate: str, steps: int, turns: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        job, began = job_for(LOADS[name], folder, steps), os.getloadavg()[0]
        asked = Question(hosts=2, rate=rate, emulated=True, most=2, seconds=120.0)
        table = plan_job(job, asked, quiet).as_table()
        planned = {each["way"]: each["step_s"] for each in table["ways"]}
        if BASE not in planned:
            raise SystemExit(f"{name}: {BASE} was not planned: {table['refused']}")
        ways = {way: change for way, change in WAYS.items() if way in planned}
        jobs = alternatives_of(folder / "job.toml", ["workers=2"], ways.values())
        judged = compare(jobs, folder, quiet, repeats=turns, hosts=Hosts(2, rate)).judged
        found = []
        for way, real in zip(ways, judged[1:], strict=True):
            assert real.of_seconds is not None, real.failed
            cell = {"recipe": name, "rate": rate, "way": way, "best": table["best"]}
            cell |= {"planned": planned[BASE] / planned[way], "real": 1 / real.of_seconds.value}
            cell |= {"low": 1 / real.of_seconds.high, "high": 1 / real.of_seconds.low}
            cell["error"] = cell["planned"] / cell["real"] - 1
            cell |= {"load": round(began, 1), "others_busy": table["machine"]["others_busy"]}
            print(json.dumps(cell), flush=True)
            found.append(cell)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=["lstm", "gpt"], choices=[*LOADS])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cells = [
        cell for name in args.only for cell in cells_of(name, args.rate, args.steps, args.turns)
    ]
    errors = [abs(cell["error"]) for cell in cells]
    total = {
        "factors": len(errors),
        "mean_error": statistics.mean(errors),
        "worst_error": max(errors),
        "within_10": statistics.mean(each <= 0.1 for each in errors),
    }
    print(json.dumps(total, indent=2))
    if args.json:
        write(args.json, [total, *cells])


if __name__ == "__main__":
    main()
