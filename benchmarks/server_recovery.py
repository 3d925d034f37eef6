"""How long does training stand still when a server is killed, and is any update lost?

    python benchmarks/server_recovery.py [--kills 10] [--copies 4096] [--only NAME ...]

Two workers on this machine; `server_sync` with two servers, with and without copies on the other
one, and the strategies without lockstep with one server and with two. A server gets SIGKILL at a
moment drawn by chance.
`lost_s` is from the kill until the master knows; `going_s` until the end of the first step that
begins after it. The aim is 2 s more than `lost_s`. At the end no worker may have been started
again, and the parameters have to be the sum of what the ledger says was trained on:
`recipes/adds_up.py`. With a codec nothing is exact: with what is still to be sent they have to be
that sum, to rounding.
"""

import argparse
import datetime
import json
import os
import platform
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from recipes import adds_up
from recovery import UnderInstep
from rivals.contender import tail

from instep.data.order import Order
from instep.events import STEPS, read_events
from instep.state.files.manifest import published
from instep.state.load import load
from instep.store.run_files import step_ends
from instep.store.run_folder import RunFolder

RECIPE = f"{Path(__file__).parent / 'recipes' / 'adds_up.py'}:recipe"
WORKERS, BATCH, PARTS, SEED = 2, 32, 4, 7
CASES: dict[str, dict[str, object]] = {
    "server_sync": {"sync.name": "server_sync", "sync.servers": 2},
    "server_sync, copies": {
        "sync.name": "server_sync",
        "sync.servers": 2,
        "sync.options": "{copy = true}",
    },
    "server_sync, int8": {"sync.name": "server_sync", "sync.servers": 2, "sync.codec": "int8"},
    "server_async": {"sync.name": "server_async"},
    "bounded_stale": {"sync.name": "bounded_stale"},
    "server_async, two servers": {"sync.name": "server_async", "sync.servers": 2},
    "bounded_stale, two servers": {"sync.name": "bounded_stale", "sync.servers": 2},
}
LIMIT_S = 60.0


def joined(run: Path) -> list[dict[str, Any]]:
    return [e for e in read_events(run / "events.jsonl") if e["event"] == "worker_joined"]


def going(run: Path, moment: float) -> float | None:
    """When the first step that began after a moment was over."""
    rows = tail(run / "steps.bin", STEPS, 2000)
    ends = step_ends(rows)[rows["begin"] > moment]
    return float(ends.min()) if len(ends) else None


def wait_for(found: Any) -> Any:
    until = time.monotonic() + LIMIT_S
    while (value := found()) is None:
        if time.monotonic() > until:
            raise SystemExit(f"nothing within {LIMIT_S:.0f} s")
        time.sleep(0.05)
    return value


def lost(run: Path, moment: float) -> float | None:
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "worker_lost" and event["time"] > moment:
            return float(event["time"])
    return None


def off_by(run: RunFolder, sync: bool) -> float:
    """How far the parameters are from minus the sum of what the ledger has."""
    order, samples = Order(adds_up.SAMPLES, SEED), adds_up.inputs()
    wanted = torch.zeros(adds_up.WIDTH, dtype=torch.float64)
    for row in run.ledger:
        indices = order.indices(int(row["epoch"]), int(row["first"]), int(row["stop"]))
        size = BATCH if sync else len(indices)
        wanted -= samples[indices].double().sum(0) / size
    return float((taken(run) - wanted).abs().max())


def taken(run: RunFolder) -> torch.Tensor:
    """The parameters, [copies, WIDTH]. With a codec as servers have them, less what workers are
    still to send."""
    groups = load(dict(published(run.path / "checkpoints"))[run.last_step]).tensors
    (whole,) = (each.double() for each in groups["model"].values())
    for group, named in groups.items():
        for name, part in named.items() if group.startswith("shard-") else ():
            begin, end = map(int, name.rsplit("/", 1)[1].split(":"))
            whole.view(-1)[begin:end] = part.double()
    for left in groups.get("own", {}).values():
        whole -= left.double()
    return whole


def case(settings: dict[str, object], args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One run, whose servers are killed."""
    draw, found = random.Random(SEED), list[tuple[float, float]]()
    settings = settings | {
        "train.micro_batches": PARTS,
        "train.determinism": "order",
        "arguments.copies": args.copies,
    }
    program = UnderInstep(folder, WORKERS, BATCH, RECIPE, settings)
    run = program.run
    try:
        wait_for(lambda: going(run, 0.0) if (run / "steps.bin").exists() else None)
        for _ in range(args.kills):
            time.sleep(draw.uniform(0.5, 1.5))
            pids = {int(e["worker"]): int(e["pid"]) for e in joined(run)}
            server = draw.choice([number for number in pids if number >= WORKERS])
            moment = time.time()
            os.kill(pids[server], signal.SIGKILL)
            ended = wait_for(lambda: going(run, moment))  # noqa: B023
            found.append((wait_for(lambda: lost(run, moment)) - moment, ended - moment))  # noqa: B023
        program.stop()
    finally:
        program.end()
    done = RunFolder(run)
    starts = [int(e["worker"]) for e in joined(run)]
    after = [ended - known for known, ended in found]
    return {
        "kills": len(found),
        "after_detection_s": {"median": statistics.median(after), "worst": max(after)},
        "lost_s": [round(known, 3) for known, _ in found],
        "going_s": [round(ended, 3) for _, ended in found],
        "workers_started_again": sum(starts.count(number) - 1 for number in range(WORKERS)),
        "parameters_off_by": off_by(done, "server_sync" in str(settings["sync.name"])),
        "samples_repeated": done.audit.repeated,
        "samples_missing": done.audit.missing,
        "steps": done.last_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=10, help="of each strategy's servers")
    parser.add_argument("--copies", type=int, default=4096, help="256 bytes of parameters each")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "parameter_bytes": args.copies * adds_up.WIDTH * 4,
    }
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            before = os.getloadavg()[0]
            found = case(CASES[name], args, Path(folder))
            found["load"] = [round(before, 1), round(os.getloadavg()[0], 1)]
        after = found["after_detection_s"]
        print(
            f"{name:20} {found['kills']} kills: goes on {after['median']:.2f} s after the loss is "
            f"known (worst {after['worst']:.2f}), {found['workers_started_again']} workers started "
            f"again, parameters off by {found['parameters_off_by']:g}",
            flush=True,
        )
        result[name] = found
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
