"""How much memory do workers and servers take, beside what `instep plan` says?

    python benchmarks/plan_memory.py [--only mlp ...] [--json FILE]

For each recipe a plan, and then real runs of one and two workers, of two with a server, and of two
with a codec. What is compared is the most resident memory that the kernel noted for a process
(VmHWM), of the worker or server that had most, from its start to its end. It does not depend on
how busy the machine is.
"""

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from plan import LOADS, SEEN, job_for
from turns import write

from instep.client.submit import run_job
from instep.data.cores import cores
from instep.lab.plan.answers import CrewRequest
from instep.lab.plan.candidates import job_of
from instep.lab.plan.crews import plain_job
from instep.lab.plan.own_loop import PeakMemory
from instep.lab.plan.probe import probe
from instep.plan.ways import TrainingWay

WAYS = (
    TrainingWay(1),
    TrainingWay(2),
    TrainingWay(2, "server_sync", servers=1),
    TrainingWay(2, codec="int8", same=False),
)


def of_run(job: Any, way: TrainingWay) -> dict[str, int]:
    peaks = PeakMemory()
    with tempfile.TemporaryDirectory() as folder:
        run_job(job_of(way, job), Path(folder), named=True, quiet=True, watch=peaks)
    return peaks.bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[*SEEN], choices=[*LOADS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for name in args.only:
        with tempfile.TemporaryDirectory() as folder:
            job = job_for(LOADS[name], Path(folder), 40)
            crews = [CrewRequest(each, job_of(each, plain_job(job))) for each in WAYS]
            probed = probe(job, crews, cores(), 600.0, lambda text: None)
            for way, crew in zip(WAYS, probed.crews, strict=False):
                real = of_run(job, way)
                for role, told in (("worker", crew.worker_bytes), ("server", crew.server_bytes)):
                    if role in real and told:
                        cell = {"recipe": name, "way": way.name, "role": role, "planned": told}
                        cell |= {"real": real[role], "error": told / real[role] - 1}
                        found.append(cell)
                        print(json.dumps(cell), flush=True)
    errors = [each["error"] for each in found]
    total = {
        "roles": len(errors),
        "mean_error": statistics.mean(map(abs, errors)),
        "worst_low": min(errors),
        "worst_high": max(errors),
        "no_more_than_5_low": statistics.mean(each >= -0.05 for each in errors),
    }
    print(json.dumps(total, indent=2))
    if args.json:
        write(args.json, [total, *found])


if __name__ == "__main__":
    main()
