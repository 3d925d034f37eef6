"""What happens to a job of a pool whose hosts are drained, cut off and killed?

    python benchmarks/pool_hosts.py --rounds 5 --to rounds

In each round a job has its three workers on three emulated hosts of this machine, each with its own
`instep host --stay` and certificate. In turn: a host is drained, and taken back; the agent of
another is stopped for longer than it may be silent, then killed and started again; the scheduler is
stopped as long, then killed and started again; a whole host is killed, with its agent and workers.
The parameters are compared with those of `instep run` on one worker, and the ledger is audited. The
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from pooling import JOB, RECIPE, instep, wait_for

from instep.detached import pid_of
from instep.events import read_events
from instep.pool.hosts.free_places import places_taken
from instep.pool.pool_file import PoolFolder
from instep.store.run_folder import RunFolder

HOSTS = ("one", "two", "three")


class Hosts:
    """A pool over three hosts, and what a job has on them."""

    def __init__(self, folder: Path) -> None:
        self.pool, self._folder = PoolFolder(folder / "pool"), folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        tables = "".join(f"[hosts.{name}]\ncores = 1\n" for name in HOSTS)
        (folder / "pool.toml").write_text(f'listen = "127.0.0.1:{port}"\n{tables}')
        instep("pool", "--pool", self.pool.folder, "start", folder / "pool.toml")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        for name in HOSTS:
            self.start_agent(name)

    def start_agent(self, name: str) -> None:
        words = self.pool.joining()[name].split()[1:]
        with open(self._folder / f"{name}.said", "ab") as log:
            self.agents[name] = subprocess.Popen(
                [sys.executable, "-m", "instep", *words], stdout=log, stderr=log
            )

    def away(self, name: str) -> bool:
        return self.pool.state().hosts[name].away is not None

    def taken(self) -> dict[str, int]:
        return places_taken(self.pool.state()).get("net", {})

    def steps(self) -> int:
        with suppress(Exception):
            return int(RunFolder(self.pool.runs / "net").last_step)
        return 0

    def goes_on(self, what: str) -> None:
        before = self.steps()
        wait_for(f"steps while {what}", lambda: self.steps() > before + 3)

    def signal(self, pid: int | None, number: int) -> None:
        if pid is not None:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill_host(self, name: str) -> None:
        """Kill its agent and the process that has started its workers, which end with it."""
        self.agents[name].kill()
        self.agents[name].wait()
        number = HOSTS.index(name)
        lock = self.pool.certificates / f"host-{number}.token.runs" / "net.lock"
        self.signal(pid_of(lock), signal.SIGKILL)

    def close(self) -> None:
        for lock in [self.pool.lock, *self.pool.jobs.glob("*.lock")]:
            self.signal(pid_of(lock), signal.SIGKILL)
        for name in HOSTS:
            self.kill_host(name)


def drained_s(pool: PoolFolder, name: str) -> float:
    """From the request to drain a host until it had no worker, by the pool's journal."""
    rows = sqlite3.connect(pool.folder / "pool.sqlite")
    asked = 0.0
    for at, text in rows.execute("SELECT time, event FROM events ORDER BY number"):
        event = json.loads(text[:-9])  # without its checksum
        kind = event["type"] if event.get("host") == name else ""
        if kind == "DrainAsked":
            asked = at
        if kind == "HostSeen" and asked and not event["workers"]:
            rows.close()
            return float(at - asked)
    raise SystemExit(f"{name} was not drained")


def one_round(folder: Path) -> dict[str, Any]:
    hosts = Hosts(folder)
    try:
        instep("submit", folder / "net.toml", "--pool", hosts.pool.folder, "--at-least", 2)
        wait_for("three workers train", lambda: len(hosts.taken()) == 3 and hosts.steps() > 3)
        instep("pool", "--pool", hosts.pool.folder, "drain", "three")
        wait_for("a drained host", lambda: "three" not in hosts.taken())
        hosts.goes_on("a host is drained")
        instep("pool", "--pool", hosts.pool.folder, "drain", "three", "--undo")
        agent = hosts.agents["one"]
        agent.send_signal(signal.SIGSTOP)
        wait_for("a host out of reach", lambda: hosts.away("one"))
        hosts.goes_on("an agent is stopped")
        agent.kill()
        agent.wait()
        hosts.start_agent("one")
        wait_for("a host that is back", lambda: not hosts.away("one"))
        hosts.signal(scheduler := pid_of(hosts.pool.lock), signal.SIGSTOP)
        time.sleep(5.0)
        hosts.goes_on("the scheduler is stopped")
        hosts.signal(scheduler, signal.SIGKILL)
        instep("pool", "--pool", hosts.pool.folder, "start")
        wait_for("all hosts again", lambda: not any(map(hosts.away, HOSTS)))
        wait_for("three workers again", lambda: len(hosts.taken()) == 3)
        hosts.kill_host("two")
        hosts.goes_on("a host is dead")
        hosts.start_agent("two")
        wait_for("the end", lambda: bool(hosts.pool.state().jobs["net"].outcome))
        wait_for("free hosts", lambda: not hosts.taken())
        return figures(hosts.pool)
    finally:
        hosts.close()


def figures(pool: PoolFolder) -> dict[str, Any]:
    """What came of a round."""
    run = RunFolder(pool.runs / "net")
    events = [*read_events(run.path / "events.jsonl")]
    return {
        "outcome": run.outcome,
        "sha256": run.last("model_saved").get("parameters_sha256"),
        "sessions": len(run.times.sessions),
        "repeated": run.audit.repeated + run.audit.stray,
        "missing": run.audit.missing,
        "hosts_lost": sum(e["event"] == "host_lost" for e in events),
        "sizes": [e["workers"] for e in events if e["event"] == "scaled"],
        "drained_s": round(drained_s(pool, "three"), 2),
        "steps": run.last_step,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--to", type=Path, help="a folder that is not there yet")
    args = parser.parse_args()
    folder = args.to.resolve() if args.to else Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    (folder / "recipe.py").write_text(RECIPE)
    (folder / "net.toml").write_text(JOB.format(name="net", steps=args.steps))
    alone = ("--runs", folder / "alone", "--workers", 1, "--json")
    done = instep("run", folder / "net.toml", *alone)
    truth, rounds = json.loads(done.splitlines()[-1])["parameters_sha256"], []
    for number in range(args.rounds):
        inside = folder / f"round-{number}"
        inside.mkdir()
        for name in ("net.toml", "recipe.py"):
            (inside / name).write_text((folder / name).read_text())
        rounds.append(one_round(inside) | {"load": round(os.getloadavg()[0], 1)})
        print(json.dumps(rounds[-1]), file=sys.stderr, flush=True)
    found = {
        "rounds": rounds,
        "same_parameters": f"{sum(r['sha256'] == truth for r in rounds)} of {len(rounds)}",
        "sessions": sum(r["sessions"] for r in rounds),
        "repeated_samples": sum(r["repeated"] for r in rounds),
        "missing_samples": sum(r["missing"] for r in rounds),
        "drained_s": statistics.median(r["drained_s"] for r in rounds),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
