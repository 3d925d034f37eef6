"""How much of a dataset in parts crosses the network, and does a lost host show in the result?

    python benchmarks/parts.py [--samples 3840] [--epochs 3] [--json FILE]

Four emulated hosts (`instep netlab`), a worker on each. Received bytes are those of the kernel's
counters of the hosts' interfaces, gradients and control messages included. The same job runs with

- all shards on every host: what crosses is not data;
- two of eight parts on each host;
- the same, dealt by speed (the default), so that slow hosts lend;
- two of eight parts on each host, and on the next one; in the middle a host is cut off for good.

What a set of data adds is what crosses beyond the first of these, over the bytes of the set and
epochs: with what is read before the first step, to try the model, which is so many samples however
large the set is. And from the doors' own counts: what crosses in the last epoch. On a busy machine
workers differ in speed from step to step, and lend; all but one of these runs deal evenly.

Needs Linux, iproute2 and root.
"""

import argparse
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from recipes.in_parts import SIZE
from rivals.contender import end_tree

from instep.data.shards.encode import encode
from instep.data.shards.manifest import Manifest, Shard, write_manifest
from instep.data.shards.writer import ShardWriter
from instep.lab.netlab import OUTSIDE, Network
from instep.store.run_folder import RunFolder

RECIPE = f"{Path(__file__).parent / 'recipes' / 'in_parts.py'}:recipe"
HOSTS, PARTS, SHARDS, BATCH = 4, 8, 32, 64


def make_set(folder: Path, samples: int) -> int:
    """A folder with all shards; its bytes."""
    folder.mkdir()
    rng, shards = np.random.default_rng(1), []
    each = samples // SHARDS
    for number in range(SHARDS):
        labels = rng.integers(0, 10, each)
        inputs = rng.normal(size=(each, SIZE)).astype(np.float32) + labels[:, None] / 10
        made = [
            {"x": x.astype(np.float32), "y": int(y)} for x, y in zip(inputs, labels, strict=True)
        ]
        found = encode(made, None)
        with ShardWriter(folder / f"{number}.arrow", found.columns) as writer:
            writer.write(found.views)
            writer.close()
        shards.append(Shard(f"{number}.arrow", each, writer.bytes))
    size = sum(shard.bytes for shard in shards)
    manifest = Manifest(
        columns=found.columns, samples=samples, bytes=size, sha256="made", bad=0, shards=shards
    )
    write_manifest(folder, manifest)
    return size


def lay_out(whole: Path, folder: Path, copies: int) -> None:
    """Disks of hosts, of which each has neighbouring shards, and so many have each."""
    for host in range(HOSTS):
        disk = folder / f"h{host + 1}"
        disk.mkdir(parents=True)
        shutil.copy(whole / "manifest.json", disk)
        for number in range(SHARDS):
            home = number * HOSTS // SHARDS
            if host in [(home + copy) % HOSTS for copy in range(copies)]:
                os.link(whole / f"{number}.arrow", disk / f"{number}.arrow")


def run(folder: Path, epochs: int, *, cut: bool = False, deal: str = "even") -> dict[str, Any]:
    """One run on the disks in a folder; perhaps with a host that is lost in the middle."""
    with Network(HOSTS) as network:
        hosts = [f"ip netns exec {network.name}-{h} env DISK={h}" for h in network.hosts]
        job = folder / "job.toml"
        job.write_text(
            f'name = "run"\nrecipe = "{RECIPE}"\nworkers = {HOSTS}\nseed = 7\n'
            f'network = "private"\n[train]\nepochs = {epochs}\nglobal_batch = {BATCH}\n'
            f'micro_batches = 8\ndeterminism = "bits"\nthreads = 1\ndeal = "{deal}"\n'
            f'[data]\norder = "windowed"\nwindow = 1024\nparts = {PARTS}\n'
            f'[arguments]\nfolder = "{folder}"\n'
            f'[launch]\nhosts = {json.dumps(hosts)}\naddress = "{network.address(OUTSIDE)}"\n'
        )
        command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(folder / "runs")]
        with (folder / "said").open("w") as said:
            process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None:
                found = folder / "runs" / "run"
                begun = cut and (found / "events.jsonl").exists()
                if begun and RunFolder(found).named("epoch_finished"):
                    network.partition([network.hosts[-1]])
                    cut = False
                time.sleep(0.1)
            received = sum(network.traffic(host).received_bytes for host in network.hosts)
        finally:
            end_tree(process.pid)
    if process.returncode:
        raise RuntimeError((folder / "said").read_text()[-2000:])
    ran = RunFolder(folder / "runs" / "run")
    summary = json.loads((ran.path / "summary.json").read_text())
    given: dict[int, list[int]] = {}
    for event in ran.named("samples_given"):
        given.setdefault(event["worker"], []).append(event["samples"])
    return {
        "received_bytes": received,
        "parameters_sha256": summary["parameters_sha256"],
        "repeated": summary["repeated_samples"],
        "missing": summary["missing_samples"],
        "generations": summary["generations"],
        "samples_given": given,
        "samples_given_in_the_last_epoch": sum(
            counts[-1] - counts[-2] for counts in given.values() if len(counts) == epochs
        ),
        "lost_hosts": len(ran.named("host_lost")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=3840)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        root = Path(text)
        size = make_set(root / "whole", args.samples)
        kinds = {"everywhere": HOSTS, "parts": 1, "by speed": 1, "copies": 2}
        for kind, copies in kinds.items():
            lay_out(root / "whole", root / kind, copies)
            deal = "speed" if kind == "by speed" else "even"
            found = run(root / kind, args.epochs, cut=kind == "copies", deal=deal)
            beyond = found["received_bytes"] - results.get("everywhere", found)["received_bytes"]
            found["share_of_the_set_per_epoch"] = round(beyond / (size * args.epochs), 4)
            found["same_bits"] = (
                found["parameters_sha256"] == results.get("everywhere", found)["parameters_sha256"]
            )
            results[kind] = found
            print(kind, json.dumps(found), flush=True)
    if args.json:
        told = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "load": [round(each) for each in os.getloadavg()[:2]],
            "set_bytes": size,
            "samples": args.samples,
            "epochs": args.epochs,
            "hosts": HOSTS,
            "parts": PARTS,
            "results": results,
        }
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
