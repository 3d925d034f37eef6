"""How soon is the page back when its server, the master or the whole run is killed?

    python benchmarks/dashboard_kills.py [--kills 50] [--json FILE]

A run of two workers trains while Chromium shows its page. In turns these are killed (SIGKILL): the
server of the page (each fifth time the process that keeps it), the master, and all processes of the
run, which is resumed then. `back_s` is from the kill until the canvas shows a step that was not
written when it was killed; of the run, until the page says that nothing trains. `drawn_s` is from a
step in `steps.bin` to the canvas after the run was resumed. Each time the run lies still, and when
it has ended, the curves of the page are compared with those of its report, point for point.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from playwright.sync_api import Page, sync_playwright
from turns import HERE, write

from instep.dashboard.serve import beside
from instep.events import STEPS, read_events, read_records
from instep.report.figures.curves import charts
from instep.store.run_folder import RunFolder

NAME, LIMIT_S = "watched", 600.0
KEEP_WHAT_IS_SHOWN = """() => {
  const show = Charts.Board.prototype.show;
  Charts.Board.prototype.show = function (charts) {
    window.shown = charts;
    show.call(this, charts);
  };
}"""
PAST = """step => {
  const figure = document.querySelector("figure.chart");
  return !!figure && +(figure.dataset.drawn || "0").split(" ")[0] > step;
}"""
SAYS = "text => (document.querySelector('.verdict') || { innerText: '' }).innerText.includes(text)"


def until(reached: Callable[[], Any]) -> Any:
    """Wait for it; what it gave."""
    over = time.monotonic() + LIMIT_S
    while not (found := reached()):
        if time.monotonic() > over:
            raise SystemExit(f"not within {LIMIT_S:.0f} s")
        time.sleep(0.005)
    return found


def kill(processes: list[psutil.Process]) -> float:
    """Kill them all; when, by the monotonic clock, once they have ended.

    Whoever has adopted one may not ask for its end for seconds; it has ended all the same.
    """
    at = time.monotonic()
    for each in processes:
        each.kill()
    until(lambda: all(map(has_ended, processes)))
    return at


def has_ended(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True


class Watched:
    """A run that trains, and the page that shows it.

    Args:
        runs: its folder is made there.
        page: of a browser that has a session.
    """

    def __init__(self, runs: Path, page: Page) -> None:
        self.path, self._page, self._runs = runs / NAME, page, runs
        self._job = runs.parent / "job.toml"
        self._job.write_text(
            f'recipe = "{HERE / "recipes" / "sleeps.py"}:recipe"\nname = "{NAME}"\nworkers = 2\n'
            "[train]\nsteps = 1000000\nglobal_batch = 16\nthreads = 1\n[checkpoint]\nevery = 20\n"
            "[arguments]\nwidth = 32\nlayers = 2\nstep_s = 0.05\n"
        )
        self._start("run", str(self._job), "--runs", str(runs))

    def _start(self, *words: str) -> None:
        silent = subprocess.DEVNULL
        command = [sys.executable, "-m", "instep", *words]
        self._client = subprocess.Popen(command, stdout=silent, stderr=silent)

    @property
    def last_step(self) -> int:
        """The last one that is written; 0 if there is none."""
        file = self.path / "steps.bin"
        return int(read_records(file, STEPS)["step"].max(initial=0)) if file.exists() else 0

    def drawn_after(self, step: int) -> float:
        """Wait until the canvas has a later step; when, by the monotonic clock."""
        until(lambda: self._page.evaluate(PAST, step))
        return time.monotonic()

    def kill_the_master(self) -> dict[str, float]:
        """Kill it; the client starts another one."""
        events = list(read_events(self.path / "events.jsonl"))
        pid = [e["pid"] for e in events if e["event"] == "master_started"][-1]
        at = kill([psutil.Process(pid)])
        return {"back_s": self.drawn_after(self.last_step) - at}

    def kill_all(self) -> dict[str, float]:
        """Kill all of its processes, compare the page with the report, and resume it."""
        client = psutil.Process(self._client.pid)
        at = kill([client, *client.children(recursive=True)])
        self._client.wait()
        self._says("Cut short after")
        back_s = time.monotonic() - at
        self.compare()
        last = self.last_step
        self._start("resume", str(self.path))
        until(lambda: self.last_step > last + 1)
        written = time.monotonic()
        return {"back_s": back_s, "drawn_s": self.drawn_after(last) - written}

    def _says(self, text: str) -> None:
        until(lambda: self._page.evaluate(SAYS, text))

    def compare(self) -> None:
        """Wait until the curves of the page are those of the report."""
        whole = json.loads(json.dumps(charts([RunFolder(self.path)])))
        until(lambda: self._lines() == [chart["lines"] for chart in whole])

    def _lines(self) -> list[Any]:
        shown = self._page.evaluate("window.shown")
        return [[{**line, "run": 0} for line in chart["lines"]] for chart in shown]

    def end(self) -> None:
        """Stop it, and compare for the last time."""
        self._client.send_signal(signal.SIGTERM)  # a shell's background jobs ignore SIGINT
        self._client.wait()
        self._says("nterrupted")
        self.compare()


def kill_the_server(run: Watched, *, keeper: bool) -> dict[str, float]:
    """Kill the process that serves the page, or the one that keeps it."""
    me = psutil.Process()

    def there() -> list[psutil.Process]:
        keepers = [each for each in me.children() if "instep.dashboard.serve" in each.cmdline()]
        return [one for each in keepers for one in (each, *each.children())][:2]

    both = until(lambda: found if len(found := there()) == 2 else None)
    at = kill([both[0] if keeper else both[1]])
    return {"back_s": run.drawn_after(run.last_step) - at}


def take_turns(run: Watched, kills: int) -> dict[str, list[dict[str, float]]]:
    """Kill one after the other; what each took."""
    found: dict[str, list[dict[str, float]]] = {}
    for number in range(kills):
        run.drawn_after(run.last_step + 5)
        who = ("server", "master", "run")[number % 3]
        if who == "server":
            who = "keeper" if number // 3 % 5 == 4 else who
            took = kill_the_server(run, keeper=who == "keeper")
        else:
            took = run.kill_the_master() if who == "master" else run.kill_all()
        found.setdefault(who, []).append({name: round(s, 3) for name, s in took.items()})
        print(number + 1, who, took, flush=True)
    return found


def measure(kills: int) -> dict[str, object]:
    """Measured and printed."""
    load = os.getloadavg()[0]
    links: list[str] = []
    with tempfile.TemporaryDirectory() as text, sync_playwright() as tools:
        runs = Path(text) / "runs"
        runs.mkdir()
        with beside(runs, links.append):
            path, options = "/usr/bin/chromium", ["--no-sandbox"]
            browser = tools.chromium.launch(executable_path=path, args=options)
            page = browser.new_page()
            page.goto(links[0])
            page.wait_for_selector("#link:text-matches('^connected')")
            page.evaluate(KEEP_WHAT_IS_SHOWN)
            run = Watched(runs, page)
            until(lambda: run.last_step > 5)
            page.evaluate(f"location.hash = '#/run/{NAME}'")
            run.drawn_after(5)
            found = take_turns(run, kills)
            run.end()
            browser.close()
    every = sorted(each["back_s"] for took in found.values() for each in took)
    print(f"back after {statistics.median(every):.2f} s, at most {every[-1]:.2f} s")
    return {
        "kills": kills,
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "back_s": {"median": statistics.median(every), "most": every[-1]},
        "within_2_s": sum(each <= 2.0 for each in every),
        "curves": "those of the report, point for point",
        "each": found,
    }


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="all together")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    found = measure(args.kills)
    if args.json:
        write(args.json, [found])


if __name__ == "__main__":
    main()
