"""The page's server, the master or the whole run is killed while a page watches: when is it back?

    python benchmarks/dashboard_kills.py [--kills 50] [--json FILE]

A run of two workers trains, `instep dashboard` shows it in Chromium, and in turns one of these gets
SIGKILL: the server of the page; the run's master; and the client, with which all processes of the
run end, whereupon `instep resume` continues it. The page is back when its canvas shows a step that
was committed after the kill. The time from the kill has the run's own recovery in it; the time from
the first record after the kill is the page's own. At the end the curve that was drawn is compared
with that of the report, point for point.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from dashboard import Served
from turns import write

from instep.events import STEPS, read_events, read_records
from instep.report.figures.curves import charts
from instep.store.run_folder import RunFolder

HERE = Path(__file__).parent
VICTIMS = ("server", "master", "server", "run")
WATCH = """() => {
  window.seen = [];
  const show = Charts.Board.prototype.show;
  Charts.Board.prototype.show = function (charts) {
    window.shown = charts;
    show.call(this, charts);
  };
  const look = () => {
    const figure = document.querySelector("figure.chart");
    const last = figure && +(figure.dataset.drawn || "0").split(" ")[0];
    const before = seen.length ? seen[seen.length - 1][1] : 0;
    if (last && last !== before) seen.push([Date.now() / 1000, last]);
    requestAnimationFrame(look);
  };
  look();
}"""


class Trained:
    """A run of two workers, which is resumed after it was killed.

    Args:
        runs: folder of run folders.
    """

    def __init__(self, runs: Path) -> None:
        self.path = runs / "bench"
        job = runs.parent / "job.toml"
        job.write_text(
            f'recipe = "{HERE / "recipes/sleeps.py"}:recipe"\nname = "bench"\nseed = 7\n'
        )
        settings = ("train.steps=1000000", "train.threads=1", "train.global_batch=8")
        sets = [word for each in settings for word in ("--set", each)]
        self._start("run", str(job), "--runs", str(runs), "--workers", "2", *sets)

    def _start(self, *words: str) -> None:
        silent = subprocess.DEVNULL
        command = [sys.executable, "-m", "instep", *words]
        self._process = subprocess.Popen(command, stdout=silent, stderr=silent)

    def resume(self) -> None:
        """Continue it."""
        self._start("resume", str(self.path))

    def kill(self) -> None:
        """End the client at once; all others end with it."""
        others = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(others, 60)

    def stop(self) -> None:
        """Let it end as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(120)

    def kill_master(self) -> None:
        """Kill the newest master."""
        pids = [
            e["pid"]
            for e in read_events(self.path / "events.jsonl")
            if e["event"] == "master_started"
        ]
        os.kill(pids[-1], signal.SIGKILL)

    def last_step(self) -> int:
        """The last step with a record."""
        path = self.path / "steps.bin"
        return int(read_records(path, STEPS)["step"].max(initial=0)) if path.exists() else 0


def until(reached: Callable[[], bool], limit_s: float = 120.0) -> float:
    """Wait; returns when it was, Unix seconds."""
    over = time.time() + limit_s
    while not reached():
        if time.time() > over:
            raise SystemExit(f"nothing came within {limit_s:.0f} s")
        time.sleep(0.01)
    return time.time()


def one_kill(victim: str, run: Trained, server: Served, page: Any) -> tuple[float, float]:
    """Seconds from the kill, and from the first record after it, until the canvas shows that."""
    killed, before = time.time(), run.last_step()
    if victim == "server":
        (pid,) = [each.pid for each in psutil.Process(server.process.pid).children()]
        os.kill(pid, signal.SIGKILL)
    elif victim == "master":
        run.kill_master()
    else:
        run.kill()
        before = run.last_step()
        run.resume()
    recorded = until(lambda: run.last_step() > before)
    script = "before => (seen.find(([, step]) => step > before) || [0])[0]"
    found: list[float] = []

    def drawn() -> bool:
        page.wait_for_timeout(50)
        at = page.evaluate(script, before)
        found[:] = [at] if at else []
        return bool(found)

    until(drawn)
    page.evaluate("seen.length = 0")
    return found[0] - killed, max(0.0, found[0] - recorded)


def measure(kills: int) -> dict[str, Any]:
    """Kill, and compare at the end."""
    from playwright.sync_api import sync_playwright

    load = os.getloadavg()[0]
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as text, sync_playwright() as tools:
        runs = Path(text) / "runs"
        runs.mkdir()
        run = Trained(runs)
        until(lambda: run.last_step() > 5)
        server = Served(runs)
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(server.link)
        page.wait_for_selector("td.name a")
        page.evaluate("location.hash = '#/run/bench'")
        page.wait_for_selector("figure[data-drawn]")
        page.evaluate(WATCH)
        for number in range(kills):
            victim = VICTIMS[number % len(VICTIMS)]
            page.wait_for_timeout(1000)
            took = one_kill(victim, run, server, page)
            times.setdefault(victim, []).append(took)
            print(
                number,
                victim,
                f"{took[0]:.2f} s, {took[1]:.2f} s after the first record",
                flush=True,
            )
        run.stop()
        page.wait_for_function("document.querySelector('.verdict .dot.live') === null")
        page.wait_for_timeout(2000)
        shown = page.evaluate("window.shown")[0]["lines"]
        whole = charts([RunFolder(run.path)])[0]["lines"]
        equal = [{**line, "run": 0} for line in shown] == json.loads(json.dumps(whole))
        browser.close()
        server.close()
    both = [np.round(np.array(each), 3) for each in times.values()]
    return {
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "kills": kills,
        "curve_equals_report": equal,
        "points": len(whole[0]["step"]),
        "from_kill_s": {who: each[:, 0].tolist() for who, each in zip(times, both, strict=True)},
        "from_record_s": {who: each[:, 1].tolist() for who, each in zip(times, both, strict=True)},
    }


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    found = measure(args.kills)
    for name in ("from_kill_s", "from_record_s"):
        for who, every in found[name].items():
            print(f"{name} {who}: median {np.median(every):.2f}, at most {max(every):.2f}")
    print("the curve equals the report's:", found["curve_equals_report"])
    if args.json:
        write(args.json, [found])


if __name__ == "__main__":
    main()
