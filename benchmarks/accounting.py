"""Is epsilon what the accounting libraries say, at settings drawn at random, and how long is it?

    python benchmarks/accounting.py [--settings 200] [--limit-s 600] [--out FILE]

Each setting is drawn: 2 to 60 steps of an epoch, 1 to 5 epochs, noise from 0.8 to 3, delta from
1e-8 to 1e-4, and an epsilon of the whole from 0.5 to 10. `poisson` is beside dp-accounting, used
directly; of `allocation`, whose bounds are those of PLD_accounting, the gap is looked at, and the
upper one beside that of Poisson. Of both: a tenth more noise may not mean more epsilon. Prints the
worst of all, and seconds of processor time of one call: what `--limit-s` is too short for is left
out, and counted.
"""

import argparse
import importlib
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

from turns import write

from instep.privacy.accounting import Bounds, SampledSteps, bounds

LEAST, LARGEST = 0.5, 10.0
"""Epsilon by Poisson of a setting that is not drawn again."""


class Setting(NamedTuple):
    """Of a run."""

    in_epoch: int
    epochs: int
    noise: float
    delta: float

    def steps(self, sampling: str) -> SampledSteps:
        return SampledSteps(sampling, self.in_epoch, self.in_epoch * self.epochs)


def drawn(draw: random.Random) -> Setting:
    """A setting with an epsilon that somebody may want."""
    while True:
        found = Setting(
            int(math.exp(draw.uniform(math.log(2), math.log(60)))),
            draw.randint(1, 5),
            math.exp(draw.uniform(math.log(0.8), math.log(3.0))),
            10 ** -draw.uniform(4, 8),
        )
        if LEAST <= by_library(found) <= LARGEST:
            return found


def by_library(of: Setting, interval: float = 1e-3) -> float:
    """Epsilon by dp-accounting, used directly."""
    library = importlib.import_module("dp_accounting")
    pld = importlib.import_module("dp_accounting.pld")
    accountant = pld.PLDAccountant(value_discretization_interval=interval)
    event = library.PoissonSampledDpEvent(1 / of.in_epoch, library.GaussianDpEvent(of.noise))
    accountant.compose(event, of.in_epoch * of.epochs)
    return float(accountant.get_epsilon(of.delta))


def looked_at(of: Setting, sampling: str, theirs: float) -> dict[str, float]:
    """How far a setting is from what it should be, and from the library's figure for Poisson."""
    plan, since = of.steps(sampling), time.process_time()
    own: Bounds = bounds(plan, of.noise, of.delta)
    took_s = time.process_time() - since
    more = bounds(plan, of.noise * 1.1, of.delta)
    beside = abs(own.upper - theirs) / theirs if sampling == "poisson" else own.upper / theirs
    name = "off" if sampling == "poisson" else "over_poisson"
    gap, rises = (own.upper - own.lower) / own.upper, max(0.0, more.upper - own.upper)
    return {name: beside, "gap": gap, "rises": rises, "cpu_s": took_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--settings", type=int, default=200)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="of all")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    draw = random.Random(0)
    settings = [drawn(draw) for _ in range(args.settings)]
    figures: dict[str, list[dict[str, float]]] = {"poisson": [], "allocation": []}
    since = time.perf_counter()
    for setting in settings:
        if time.perf_counter() - since > args.limit_s:
            break
        theirs = by_library(setting, 1e-4)
        for sampling, each in figures.items():
            each.append(looked_at(setting, sampling, theirs))
    found: list[dict[str, Any]] = []
    for sampling, each in figures.items():
        worst = {key: float(f"{max(one[key] for one in each):.3g}") for key in each[0]}
        found.append(
            {
                "sampling": sampling,
                "settings": len(each),
                "left_out": len(settings) - len(each),
                "gaps_above_5_percent": sum(one["gap"] > 0.05 for one in each),
                "worst": worst,
                "median_cpu_s": round(statistics.median(one["cpu_s"] for one in each), 2),
                "load": round(os.getloadavg()[0], 1),
            }
        )
        print(json.dumps(found[-1]), flush=True)
    if args.out:
        write(args.out, found)


if __name__ == "__main__":
    main()
