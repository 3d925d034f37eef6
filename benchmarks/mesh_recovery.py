"""How long does a run whose replicas are meshes stand still when a rank is killed?

    python benchmarks/mesh_recovery.py [--millions 10 300] [--kills 8] [--json FILE]

Four ranks on this machine, gloo, one thread each, a GPT and AdamW; one replica of `shard = 4`, and
two of `shard = 2`. A rank drawn by chance gets SIGKILL 0.5 to 1.5 s after the last step that shows
all four; then the next one, when all are there again. A recovery is the time from the kill to the
end of the next step that any whole replica committed, and that of the next one of all four.

One replica copies each commit into memory of its host. What that costs is measured first, in the
same run: every other step goes without it. The model is not tried before the first step, which
is not repeated in a replica that starts again.
"""

import argparse
import os
import random
import signal
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from recovery import HERE, NEWEST, UnderInstep, disturb, full_again, percentiles
from rivals.contender import recovery
from turns import summed_up, write

from instep.events import STEPS, read_events, read_records

RECIPE = f"{HERE / 'recipes' / 'host_copies.py'}:recipe"
SIZES = {
    1: {"layers": 2, "width": 192, "heads": 4, "length": 16},
    10: {"layers": 8, "width": 320, "heads": 5, "length": 16},
    100: {"layers": 14, "width": 768, "heads": 12, "length": 16},
    300: {"layers": 24, "width": 1024, "heads": 16, "length": 16},
}
"""By millions of parameters."""
RANKS = 4
LIMIT_S = 600.0


def settings(millions: int, shard: int, compared: int) -> dict[str, object]:
    """Of a job whose first steps, so many, have copies every other time."""
    arguments = {**SIZES[millions], "until": compared, "samples": 400, "tried": 0}
    own = {"mesh.shard": shard, "train.micro_batches": RANKS, "train.determinism": '"order"'}
    return {**own, **{f"arguments.{name}": value for name, value in arguments.items()}}


def cost_of_copies(run: Path, until: int) -> dict[str, object]:
    """A step with copies over the mean of the steps before and after it, which have none."""
    records = read_records(run / "steps.bin", STEPS)
    records = np.sort(records[records["worker"] == 0], order="step")
    begins = {int(step): float(begin) for step, begin in records[["step", "begin"]].tolist()}
    took = {step: begins[step + 1] - at for step, at in begins.items() if step + 1 in begins}
    inner = [step for step in range(5, until, 2) if {step - 1, step, step + 1} <= took.keys()]
    around = [(took[step - 1] + took[step + 1]) / 2 for step in inner]
    with_copies = [took[step] for step in inner]
    ratios = [mine / other for mine, other in zip(with_copies, around, strict=True)]
    differences = [mine - other for mine, other in zip(with_copies, around, strict=True)]
    medians = {
        "step_without_s": statistics.median(around),
        "copies_s": statistics.median(differences),
    }
    return {**medians, "ratio": summed_up(ratios)}


def phases_of_restarts(run: Path) -> dict[str, float]:
    """Medians of what workers that were started again did before their first step, in seconds."""
    events = read_events(run / "events.jsonl")
    ready = [e["phases"] for e in events if e["event"] == "worker_ready"][RANKS:]
    names = dict.fromkeys(name for phases in ready for name in phases)
    return {
        name: round(statistics.median([p[name] for p in ready if name in p]), 3) for name in names
    }


def measure(millions: int, shard: int, kills: int, compared: int, seed: int) -> dict[str, object]:
    compared = compared if shard == RANKS else 0
    draw, found = random.Random(seed), dict[str, object]()
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        keys = settings(millions, shard, compared)
        run = UnderInstep(folder, RANKS, RANKS, RECIPE, keys)
        try:
            if not full_again(run, 0.0, LIMIT_S):
                print((folder / "said").read_text()[-3000:], file=sys.stderr)
                raise SystemExit("the run did not begin")
            while compared and run.alive() and run.steps(NEWEST)[-1].number <= compared + 1:
                full_again(run, run.steps(NEWEST)[-1].end)
            if compared:
                found["copies"] = cost_of_copies(run.run, compared)
            name = f"{millions} million, shard = {shard}"
            moments = disturb(run, kills, draw, name, LIMIT_S)
            steps = run.steps()
            each = [recovery(steps, moment, RANKS) for moment in moments]
            events = list(read_events(run.run / "events.jsonl"))
        finally:
            run.end()
        found["restarts"] = phases_of_restarts(run.run)
    known = [one for one in each if one is not None]
    lengths = np.diff([step.end for step in steps])
    how = [e["event"] for e in events if e["event"] in ("taken_from_host", "went_back")]
    return {
        "millions": millions,
        "shard": shard,
        "kills": len(known),
        "first_s": percentiles([one.first_s for one in known]),
        "full_s": percentiles([one.full_s for one in known]),
        "steps_redone": [one.redone for one in known],
        "restored": {name: how.count(name) for name in dict.fromkeys(how)},
        "usual_step_s": round(float(np.median(lengths)), 4),
        "load": round(os.getloadavg()[1], 1),
        **found,
        "all_first_s": [round(one.first_s, 3) for one in known],
        "all_full_s": [round(one.full_s, 3) for one in known],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--millions", type=int, nargs="+", choices=SIZES, default=[10, 300])
    parser.add_argument("--shard", type=int, nargs="+", choices=[4, 2], default=[4, 2])
    parser.add_argument("--kills", type=int, default=8)
    parser.add_argument("--compared", type=int, default=40, help="steps, with and without copies")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    one = partial(measure, kills=args.kills, compared=args.compared, seed=args.seed)
    results = []
    for millions in args.millions:
        for shard in args.shard:
            result = one(millions, shard)
            results.append(result)
            if args.json:
                write(args.json, results)
            print(
                f"{millions} million, {RANKS // shard} replicas of {shard}: first step "
                f"{result['first_s']}, all {result['full_s']}, usual step "
                f"{result['usual_step_s']} s, {result['restored']}, load {result['load']}\n"
                f"  started again: {result['restarts']}"
            )
            if "copies" in result:
                print(f"  copies: {result['copies']}")


if __name__ == "__main__":
    main()
