"""Does the auditor find planted faults, pass right code, and prove much of a true epsilon?

    python benchmarks/auditor.py [--times 100] [--out FILE]

The faults are those of `tests/planted_faults.py`, each planted into a right private step that
`instep lab privacy` then attacks; right steps have other secrets each time. And of one step of a
linear model whose epsilon is known by a closed form (Balle and Wang 2018), the lower bound over it,
at 99 % confidence, seven times. Prints seconds of all.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from turns import write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from instep.lab.privacy.attack import PrivacyAttack, attack
from instep.lab.privacy.canaries import CanaryStep
from instep.privacy.accounting import Bounds
from planted_faults import DELTA, FAULTS, a_step, noise_of

TAKEN, CLAIMED = 20, Bounds(2.5, 2.4)
GUESSES, RUNS, AGAIN = 1000, 50, 7


def timed(call: Callable[[], PrivacyAttack]) -> tuple[PrivacyAttack, float]:
    since = time.perf_counter()
    found = call()
    return found, time.perf_counter() - since


def audited(step: CanaryStep) -> tuple[PrivacyAttack, float]:
    return timed(lambda: attack(step, TAKEN, TAKEN, CLAIMED, DELTA, 0.99))


def of_faults() -> dict[str, Any]:
    seconds, missed = [], []
    for plant in FAULTS:
        step = a_step()
        plant(step)
        found, took_s = audited(step)
        seconds.append(took_s)
        missed += [] if found.broken else [plant.__name__]
    return {"faults": len(FAULTS), "missed": missed, "longest_s": round(max(seconds), 2)}


def of_right_code(times: int) -> dict[str, Any]:
    kinds = "allocation", "poisson"
    found = [audited(a_step(seed, sampling=kinds[seed % 2])) for seed in range(times)]
    failed = [each.fault for each, _ in found if not each.exact]
    return {"steps": times, "failed": failed, "longest_s": round(max(s for _, s in found), 2)}


def of_bounds() -> list[dict[str, Any]]:
    answer = []
    for truth in (1.0, 2.0, 4.0):
        shares, seconds, claim = [], [], Bounds(truth, truth)
        for _ in range(AGAIN):
            step = CanaryStep(GUESSES, 1, "allocation", noise_of(truth), 1.0, os.urandom(32))
            found, took_s = timed(partial(attack, step, 1, 1, claim, DELTA, 0.99, runs=RUNS))
            shares.append(round(found.proved_of_gaussian / truth, 4))
            seconds.append(round(took_s, 1))
        answer.append({"epsilon": truth, "of_truth": sorted(shares), "longest_s": max(seconds)})
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--times", type=int, default=100, help="right steps that are attacked")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    found = [
        {"what": "planted", **of_faults()},
        {"what": "right", **of_right_code(args.times)},
        {"what": "bounds", "guesses": GUESSES * RUNS, "each": of_bounds()},
    ]
    for each in found:
        each["load"] = round(os.getloadavg()[0], 1)
        print(json.dumps(each), flush=True)
    if args.out:
        write(args.out, found)


if __name__ == "__main__":
    main()
