"""The page in the browser: how late a commit is seen, what it costs, how a long run opens.

    python benchmarks/dashboard.py --to benchmarks/results/DATE-dashboard.json

Run folders are made up; a run that trains is one whose files grow as those of 16 workers at 20
steps a second. Where Chromium and Playwright are there, the delay is from the record in `steps.bin`
to the curve on the canvas; the event alone is measured too. CPU seconds are of the server.
`--steps` is the length of the long run, 112 bytes a step on disk.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from instep.events import LEDGER, STEPS, ledger_header, read_events
from instep.store.folder import held
from made_up_runs import BEGIN_S, make_run, write_events

WORKERS, RATE, BATCH = 16, 20.0, 64


class Served:
    """`instep dashboard` for a folder, and a session with it.

    Args:
        runs: the folder.
    """

    def __init__(self, runs: Path) -> None:
        words = [sys.executable, "-m", "instep", "dashboard", str(runs), "--json"]
        self.began = time.perf_counter()
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE)
        self.link = self._next_link()
        host = self.link.split("/")[2]
        self.host, token = host, self.link.partition("#")[2]
        answer = self._request(
            "POST",
            "/session",
            json.dumps({"token": token}),
            {"Origin": f"http://{host}", "Content-Type": "application/json"},
        )
        self.cookie = answer.headers["set-cookie"].partition(";")[0]
        self.link = self._next_link()

    def _next_link(self) -> str:
        if self.process.stdout is None:
            raise RuntimeError("the server has no output")
        return str(json.loads(self.process.stdout.readline())["link"])

    def _request(self, method: str, path: str, body: str | None = None, headers: Any = ()) -> Any:
        made = http.client.HTTPConnection(self.host, timeout=300)
        made.request(method, path, body, dict(headers))
        return made.getresponse()

    def stream(self, query: str = "") -> Iterator[tuple[float, int, dict[str, Any]]]:
        """When each message came, Unix seconds; its bytes; what it says."""
        answer = self._request("GET", f"/api/stream{query}", None, {"Cookie": self.cookie})
        while line := answer.readline():
            if line.startswith(b"data: "):
                yield time.time(), len(line), json.loads(line[6:])

    def get(self, path: str) -> bytes:
        """An answer."""
        return bytes(self._request("GET", path, None, {"Cookie": self.cookie}).read())

    def cpu_s(self) -> float:
        """CPU seconds so far, of the server and of the process that keeps it."""
        found = [each.cpu_times() for each in self._processes()]
        return float(sum(used.user + used.system for used in found))

    def resident_mb(self) -> float:
        """Memory of both, in MB; what they share counts once."""
        keeper, *servers = self._processes()
        resident = sum(each.memory_info().rss for each in servers)
        return float(resident + keeper.memory_full_info().uss) / 1e6

    def _processes(self) -> list[psutil.Process]:
        keeper = psutil.Process(self.process.pid)
        return [keeper, *keeper.children(recursive=True)]

    def close(self) -> None:
        """End it."""
        self.process.terminate()
        self.process.wait()


class Trains(threading.Thread):
    """Writes a run folder as a master does.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(daemon=True)
        make_run(
            path,
            workers=WORKERS,
            samples=1 << 30,
            train={"steps": 1_000_000, "micro_batches": WORKERS},
            steps=1,
            outcome=None,
        )
        (path / "run.id").write_text("trains")
        self.path, self.over = path, threading.Event()
        events = list(read_events(path / "events.jsonl"))
        shift = time.time() - 3 - BEGIN_S
        write_events(path, [{**event, "time": event["time"] + shift} for event in events])
        for name in ("steps.bin",):
            os.truncate(path / name, 0)
        (path / "ledger.bin").write_bytes(ledger_header())
        self.written: dict[int, float] = {}

    def run(self) -> None:
        """Append a step of each worker, at the rate."""
        with (
            open(self.path / "ledger.bin", "ab", buffering=0) as ledger,
            open(self.path / "steps.bin", "ab", buffering=0) as steps,
        ):
            step, due = 0, time.time()
            while not self.over.is_set():
                step += 1
                taken = np.zeros(WORKERS, LEDGER)
                taken["step"], taken["worker"], taken["generation"] = step, np.arange(WORKERS), 1
                taken["first"] = (step - 1) * BATCH + np.arange(WORKERS) * (BATCH // WORKERS)
                taken["stop"] = taken["first"] + BATCH // WORKERS
                made = np.zeros(WORKERS, STEPS)
                made["step"], made["worker"], made["samples"] = (
                    step,
                    np.arange(WORKERS),
                    BATCH // WORKERS,
                )
                made["loss"], made["begin"], made["gradient_norm"] = (
                    2 / step,
                    time.time() - 0.05,
                    1.0,
                )
                made["forward_s"] = 0.05
                ledger.write(taken.tobytes())
                steps.write(made.tobytes())
                self.written[step] = time.time()
                due += 1 / RATE
                time.sleep(max(0.0, due - time.time()))


def delays(seen: list[tuple[float, int]], written: dict[int, float]) -> dict[str, Any]:
    """How long after it was written each step was first seen."""
    found, reached = [], 0
    for at, step in seen:
        found += [
            at - written[number] for number in range(reached + 1, step + 1) if number in written
        ]
        reached = max(reached, step)
    late = np.array(found)
    return {
        "steps": len(late),
        "median_s": round(float(np.median(late)), 3),
        "p99_s": round(float(np.quantile(late, 0.99)), 3),
    }


def newest(message: dict[str, Any]) -> int:
    """The last step of the loss curve that a message has; 0 if it has none."""
    for chart in message.get("charts", ()):
        if chart["title"] == "loss":
            return int(chart["lines"][0]["step"][-1])
    of_loss = [p for p in message.get("points", ()) if (p["chart"], p["line"]) == (0, 0)]
    return max((int(p["step"][-1]) for p in of_loss if p["step"]), default=0)


@contextmanager
def training(runs: Path) -> Iterator[Trains]:
    """A run that trains."""
    run = Trains(runs / "trains")
    with held(run.path):
        run.start()
        try:
            yield run
        finally:
            run.over.set()
            run.join()


def watched(runs: Path, seconds: float, pages: int) -> dict[str, Any]:
    """Delay of the event, and what the server needs, with some pages open."""
    with training(runs) as run:
        server = Served(runs)
        seen: list[list[tuple[float, int]]] = [[] for _ in range(pages)]
        sizes: list[int] = []

        def read(mine: list[tuple[float, int]]) -> None:
            with suppress(OSError, http.client.HTTPException):
                for at, size, message in server.stream("?run=trains"):
                    mine.append((at, newest(message)))
                    sizes.append(size)

        readers = [threading.Thread(target=read, args=(mine,), daemon=True) for mine in seen]
        for reader in readers:
            reader.start()
        time.sleep(5.0)
        began, used, first = time.perf_counter(), server.cpu_s(), len(seen[0])
        reached = max(run.written)
        time.sleep(seconds)
        spent = (server.cpu_s() - used) / (time.perf_counter() - began)
        memory = server.resident_mb()
        late = {step: at for step, at in run.written.items() if step > reached}
        result = {
            "pages": pages,
            "event": delays([(at, step) for at, step in seen[0][first:]], late),
            "share_of_a_core": round(spent, 4),
            "memory_mb": round(memory, 1),
            "bytes_per_message": round(float(np.median(sizes))),
        }
        server.close()
        return result


def on_canvas(runs: Path, seconds: float) -> dict[str, Any] | None:
    """Delay until the curve has been drawn, in Chromium; None where that is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with training(runs) as run, sync_playwright() as tools:
        server = Served(runs)
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(server.link)
        page.wait_for_selector("td.name a")
        page.evaluate("location.hash = '#/run/trains'")
        page.wait_for_selector("figure[data-drawn]")
        script = """seconds => new Promise(done => {
          const seen = [], figure = document.querySelector("figure.chart");
          const last = () => +figure.dataset.drawn.split(" ")[0];
          const watch = new MutationObserver(() => seen.push([Date.now() / 1000, last()]));
          watch.observe(figure, { attributes: true, attributeFilter: ["data-drawn"] });
          setTimeout(() => done(seen), 1000 * seconds);
        })"""
        reached = max(run.written)
        seen = page.evaluate(script, seconds)
        late = {step: at for step, at in run.written.items() if step > reached}
        result = delays([(at, int(step)) for at, step in seen], late)
        browser.close()
        server.close()
        return result


def long_run(runs: Path, steps: int) -> dict[str, Any]:
    """How long it takes until the page of a long run has all its curves."""
    path = make_run(
        runs / "long",
        workers=1,
        samples=BATCH * steps,
        train={"steps": steps},
        steps=100,
        outcome=None,
    )
    (path / "run.id").write_text("long")
    draw = np.random.default_rng(0)
    with open(path / "steps.bin", "wb") as file, open(path / "ledger.bin", "wb") as ledger:
        ledger.write(ledger_header())
        for begin in range(0, steps, 500_000):
            number = np.arange(begin + 1, min(begin + 500_000, steps) + 1)
            made, taken = np.zeros(len(number), STEPS), np.zeros(len(number), LEDGER)
            made["step"], made["samples"] = number, BATCH
            made["loss"] = 2 / np.sqrt(number) + 0.01 * draw.normal(size=len(number))
            made["begin"], made["forward_s"] = BEGIN_S + 2.5 + number * 0.002, 0.001
            made["gradient_norm"] = 1.0
            taken["step"], taken["generation"] = number, 1
            taken["first"], taken["stop"] = (number - 1) * BATCH, number * BATCH
            file.write(made.tobytes())
            ledger.write(taken.tobytes())
    server = Served(runs)
    used, began = server.cpu_s(), time.perf_counter()
    _, size, message = next(iter(server.stream("?run=long")))
    result = {
        "steps": steps,
        "first_message_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(server.cpu_s() - used, 2),
        "bytes": size,
        "last_step_drawn": newest(message),
        "memory_mb": round(server.resident_mb(), 1),
    }
    server.close()
    return result


def many_runs(runs: Path, count: int, overlaid: int) -> dict[str, Any]:
    """How long it takes to list many runs, and to lay some over each other: the server's answer,
    and in a browser."""
    for number in range(count):
        path = make_run(runs / f"run-{number}", epochs=3)
        (path / "run.id").write_text(str(number))
    server = Served(runs)
    used, began = server.cpu_s(), time.perf_counter()
    _, size, message = next(iter(server.stream()))
    listed = time.perf_counter() - began
    rows = sum(name.startswith("row ") for name in message["sections"])
    listing = {"runs": rows, "s": round(listed, 2), "bytes": size}
    listing["cpu_s"] = round(server.cpu_s() - used, 2)
    began = time.perf_counter()
    next(iter(server.stream()))
    listing["again_s"] = round(time.perf_counter() - began, 3)
    used, began = server.cpu_s(), time.perf_counter()
    data = server.get("/api/compare?" + "&".join(f"run=run-{n}" for n in range(overlaid)))
    compared = {"runs": overlaid, "s": round(time.perf_counter() - began, 2), "bytes": len(data)}
    compared["cpu_s"] = round(server.cpu_s() - used, 2)
    server.close()
    return {"listed": listing, "overlaid": compared, "seen": many_seen(runs, overlaid)}


def many_seen(runs: Path, overlaid: int) -> dict[str, float] | None:
    """Seconds until the rows that fit the window are there, and until the curves are drawn, in
    Chromium; None where that is not installed."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return None
    with sync_playwright() as tools:
        server = Served(runs)
        browser = tools.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto("about:blank")
        began = time.perf_counter()
        page.goto(server.link)
        page.wait_for_selector("table.runs tbody tr:nth-child(100)", state="attached")
        listed = time.perf_counter() - began
        names = json.dumps("/".join(f"run-{n}" for n in range(overlaid)))
        began = time.perf_counter()
        page.evaluate(f"location.hash = '#/compare/' + {names}")
        page.wait_for_selector("figure[data-drawn]", timeout=300_000)
        drawn = time.perf_counter() - began
        browser.close()
        server.close()
        return {"listed_s": round(listed, 2), "overlaid_s": round(drawn, 2)}


def page_bytes(runs: Path) -> int:
    """Size of the page and all it is made of, compressed."""
    from instep.dashboard.app import page_files

    return sum(len(packed) for _, packed in page_files().values())


def main() -> None:
    """Measure, print, and with `--to` write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="of each watched run")
    parser.add_argument("--steps", type=int, default=10_000_000, help="of the long run")
    parser.add_argument("--runs", type=int, default=1000, help="that are listed")
    parser.add_argument("--to", type=Path, help="file to write")
    args = parser.parse_args()
    found: dict[str, Any] = {"cores": os.cpu_count(), "load_before": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base)
        for name, measure in (
            ("watched", lambda at: [watched(at / f"p{n}", args.seconds, n) for n in (1, 3)]),
            ("canvas", lambda at: on_canvas(at, args.seconds)),
            ("many", lambda at: many_runs(at, args.runs, min(250, args.runs))),
            ("long", lambda at: long_run(at, args.steps)),
            ("page_bytes_compressed", page_bytes),
        ):
            (folder / name).mkdir()
            found[name] = measure(folder / name)
            print(name, json.dumps(found[name]), flush=True)
    found["load_after"] = os.getloadavg()[0]
    if args.to:
        args.to.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
