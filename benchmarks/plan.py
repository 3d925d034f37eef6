"""How far are steps from what `instep plan` says, and is what it chooses the fastest?

    python benchmarks/plan.py [--only mlp ...] [--rates 100mbit 1gbit] [--steps 30]
                              [--json FILE [--join]]

For each recipe a plan for each rate, on emulated hosts (needs root), and then real runs of its
ways: one worker on this machine, and all-reduce on 2 and 4 hosts, a server for 2, and a codec for
2, at each rate. A cell is one of these runs. The time of a step is the mean of the central half of
a run's steps, without the first five; so it is in the plan. All workers have one thread. The first
six recipes were looked at while prices were written; those of `recipes/untuned.py` were not, and
with `--rates 30mbit 100mbit 300mbit 1gbit` they are 170 cells. `--join` keeps the cells of other
recipes that FILE has, so that parts can be run one by one. Plans are made before the runs. Where
the machine is busy, both say how busy, and the error has its changes in it. `from_other_rate` is
the error of a plan whose crews had links of another rate, so that these are simulated.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from turns import HERE, write

from instep.client.submit import run_job
from instep.data.cores import cores
from instep.events import STEPS, read_records
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.lab.emulated import emulated_hosts, on_hosts
from instep.lab.netlab import bits_per_s
from instep.lab.plan.answers import CrewRequest, far_apart
from instep.lab.plan.candidates import job_of
from instep.lab.plan.crews import plain_job, twice
from instep.lab.plan.probe import probe, visit_again
from instep.plan.machine import HostLink, Machines
from instep.plan.pricing import Measurements, price
from instep.plan.ways import TrainingWay

FIRST = 5
"""Steps that do not count."""


class Load(NamedTuple):
    """A recipe, and its batch."""

    recipe: str
    """File and function."""
    batch: int
    arguments: str = ""


SEEN = {
    "mlp": Load("mlp", 128),
    "wide mlp": Load("mlp", 128, "width = 1024"),
    "conv": Load("conv", 32, "width = 16"),
    "lstm": Load("lstm", 32, "width = 128"),
    "embedding": Load("embedding", 64, "words = 8000"),
    "gpt": Load("gpt", 8, "layers = 4\nwidth = 128\nheads = 4"),
}
"""Looked at while the prices were written."""

UNTUNED = {
    "logistic": 256, "deep": 128, "residual": 32, "depthwise": 32, "autoencoder": 64,
    "dilated": 32, "gru": 32, "encoder": 32, "mixer": 32, "factors": 256,
}  # fmt: skip
"""Batches of those of `recipes/untuned.py`."""

LOADS = SEEN | {name: Load(f"untuned:{name}", batch) for name, batch in UNTUNED.items()}

WAYS = (
    TrainingWay(2),
    TrainingWay(4),
    TrainingWay(2, "server_sync", servers=1),
    TrainingWay(2, codec="bfloat16", same=False),
)


def job_for(load: Load, folder: Path, steps: int) -> JobSpec:
    file = folder / "job.toml"
    name, _, function = load.recipe.partition(":")
    recipe = f"{HERE / 'recipes' / name}.py:{function or 'recipe'}"
    file.write_text(
        f'recipe = "{recipe}"\nname = "bench"\nseed = 7\n'
        f"[arguments]\n{load.arguments}\n[train]\nthreads = 1\nsteps = {steps}\n"
        f"global_batch = {load.batch}\nmicro_batches = 4\n"
    )
    return spec_file.load(file, [])


def planned(name: str, job: JobSpec, hosts: int, rate: str) -> Measurements:
    ways = (TrainingWay(1), *WAYS)
    crews = [
        CrewRequest(each, job_of(each, plain_job(job)), min(hosts, each.workers), rate)
        for each in ways
    ]
    probed = probe(job, twice(crews), cores(), 300.0, lambda text: None)
    if probed.failed:
        raise SystemExit(f"{name}: {probed.failed}")
    unsure = far_apart(probed.visits)
    if again := [each for each in crews if each.way.key in unsure]:
        probed = visit_again(job, probed, again, 300.0, lambda text: None)
    return Measurements(probed.job, probed.crews, probed.machine)


def real(job: JobSpec, way: TrainingWay, rate: str | None) -> dict[str, Any]:
    """Time of a step of a run, with what a worker sent in one, and its peak memory."""
    made = job_of(way, plain_job(job))
    train, steps = job.train, job.train.steps
    made = type(made)(**{**{f: getattr(made, f) for f in made.__struct_fields__}, "train": train})
    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder)
        began = os.getloadavg()[0]
        if rate is None:
            run_job(made, runs, named=True, quiet=True)
        else:
            with emulated_hosts(way.workers, rate) as network:
                run_job(on_hosts(made, network), runs, named=True, quiet=True)
        records = read_records(runs / "bench" / "steps.bin", STEPS)
        summary = json.loads((runs / "bench" / "summary.json").read_text())
    begins = np.sort(records["begin"][records["worker"] == 0])
    took = np.sort(np.diff(begins)[FIRST:])
    cut = len(took) // 4
    middle = took[cut : len(took) - cut]
    return {
        "real_s": float(middle.mean()),
        "quartiles_s": [float(middle[0]), float(middle[-1])],
        "sent_bytes": summary["wire_bytes"] / (steps or 1) / way.workers,  # of servers too
        "load_average": round(began, 1),
    }


def cells_of(name: str, rates: list[str], steps: int) -> list[dict[str, Any]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        job = job_for(LOADS[name], Path(folder), steps)
        plans = {rate: planned(name, job, 4, rate) for rate in rates}
        for way in (TrainingWay(1), *WAYS):
            for rate in rates[:1] if way.is_plain else rates:
                known, machines = plans[rate], on_links(way, rate)
                told = price(way, known, machines)
                assert told is not None, way
                cell: dict[str, Any] = {"recipe": name, "way": way.name}
                cell["rate"] = None if way.is_plain else rate
                cell["same"] = way.same
                cell |= {"planned_s": told.seconds, "low_s": told.low, "high_s": told.high}
                sent = told.sent_bytes + told.sent_by_server * way.servers / way.workers
                cell |= {"planned_bytes": sent, **real(job, way, cell["rate"])}
                cell["others_busy"] = round(known.probed.others_busy, 2)
                cell["error"] = cell["planned_s"] / cell["real_s"] - 1
                if other := [each for each in rates if each != rate and not way.is_plain]:
                    simulated = price(way, plans[other[0]], machines)
                    assert simulated is not None, way
                    cell["from_other_rate"] = simulated.seconds / cell["real_s"] - 1
                print(json.dumps(cell), flush=True)
                found.append(cell)
    return found


def on_links(way: TrainingWay, rate: str) -> Machines:
    if way.is_plain:
        return Machines(1, cores())
    return Machines(way.workers, cores(), HostLink(bits_per_s(rate)), emulated=True)


def summed(cells: list[dict[str, Any]]) -> dict[str, Any]:
    errors = [abs(cell["error"]) for cell in cells]
    inside = [cell["low_s"] <= cell["real_s"] <= cell["high_s"] for cell in cells]
    widths = [(cell["high_s"] - cell["low_s"]) / cell["planned_s"] for cell in cells]
    regrets, pays = choices(cells)
    off = factors(cells)
    return {
        "cells": len(cells),
        "mean_error": statistics.mean(errors),
        "median_error": statistics.median(errors),
        "worst_error": max(errors),
        "within_20": statistics.mean(each <= 0.2 for each in errors),
        "inside_interval": statistics.mean(inside),
        "median_width": statistics.median(widths),
        "choices": len(regrets),
        "mean_regret": statistics.mean(regrets),
        "worst_regret": max(regrets),
        "within_5_of_the_fastest": statistics.mean(each <= 0.05 for each in regrets),
        "pays": pays,
        "break_even_factors": len(off),
        "break_even_factor_mean_error": statistics.mean(off or [0.0]),
        "break_even_factor_within_10": statistics.mean([each <= 0.1 for each in off] or [1.0]),
        "mean_error_from_other_rate": statistics.mean(
            [abs(cell["from_other_rate"]) for cell in cells if "from_other_rate" in cell] or [0.0]
        ),
    }


def choices(cells: list[dict[str, Any]]) -> tuple[list[float], list[int]]:
    """For each recipe and rate, how much slower than the fastest the chosen way was; and how often
    it was right that several workers pay, outside a band of 5 %, of how many."""
    regrets, right, asked = [], 0, 0
    for name in dict.fromkeys(cell["recipe"] for cell in cells):
        mine = [cell for cell in cells if cell["recipe"] == name and cell["same"]]
        alone = next(cell for cell in mine if cell["rate"] is None)
        for rate in dict.fromkeys(cell["rate"] for cell in mine if cell["rate"]):
            several = [cell for cell in mine if cell["rate"] == rate]
            chosen = min([alone, *several], key=lambda cell: cell["planned_s"])
            fastest = min([alone, *several], key=lambda cell: cell["real_s"])
            regrets.append(chosen["real_s"] / fastest["real_s"] - 1)
            best = min(several, key=lambda cell: cell["real_s"])
            if abs(alone["real_s"] / best["real_s"] - 1) > 0.05:
                asked += 1
                right += (chosen is alone) == (fastest is alone)
    return regrets, [right, asked]


def factors(cells: list[dict[str, Any]]) -> list[float]:
    """How far each break-even factor of steps, of a way with another result beside the best one of
    the plan, is from the ratio of their real steps, as `instep compare` measures it."""
    off = []
    for cell in cells:
        if not cell["same"]:
            same = [
                each
                for each in cells
                if each["recipe"] == cell["recipe"]
                and each["same"]
                and each["rate"] in (None, cell["rate"])
            ]
            best = min(same, key=lambda each: each["planned_s"])
            planned = best["planned_s"] / cell["planned_s"]
            off.append(abs(planned / (best["real_s"] / cell["real_s"]) - 1))
    return off


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[*SEEN], choices=[*LOADS])
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--join", action="store_true", help="cells that FILE has of other recipes")
    args = parser.parse_args()
    begin, cells = time.time(), list[dict[str, Any]]()
    if args.join and args.json.exists():
        first, *before = json.loads(args.json.read_text())["results"]
        begin -= first["seconds"]
        cells += [cell for cell in before if cell["recipe"] not in args.only]
    for name in args.only:
        cells += cells_of(name, args.rates, args.steps)
        if args.json:
            write(args.json, [{**summed(cells), "seconds": time.time() - begin}, *cells])
    print(json.dumps(summed(cells), indent=2))


if __name__ == "__main__":
    main()
