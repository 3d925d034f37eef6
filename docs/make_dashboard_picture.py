"""Take `docs/pictures/dashboard.png`: the page of a run that trains, of which a worker was killed.

    python docs/make_dashboard_picture.py      train the digits, kill a worker, look (half a minute)

Needs Chromium and Playwright.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from instep.events import LEDGER, read_events, read_records

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "pictures" / "dashboard.png"
JOB = ROOT / "examples" / "01_digits" / "job.toml"
KILLED_AT, TAKEN_AT = 200, 500
HIDDEN = ("Last lines of the logs", "Next commands", "Settings")
HIDE = """titles => {
  for (const each of document.querySelectorAll("section"))
    if (titles.includes(each.querySelector("h2").textContent)) each.hidden = true;
}"""


def until(reached: Callable[[], bool]) -> None:
    """Wait, at most two minutes."""
    over = time.monotonic() + 120
    while not reached():
        if time.monotonic() > over:
            raise SystemExit("the run does not come so far")
        time.sleep(0.05)


def last_step(run: Path) -> int:
    """The last step that was committed; 0 before the first."""
    file = run / "ledger.bin"
    return int(read_records(file, LEDGER)["step"].max(initial=0)) if file.exists() else 0


def kill_a_worker(run: Path) -> None:
    """Kill the newest process of worker 1."""
    joined = [e for e in read_events(run / "events.jsonl") if e["event"] == "worker_joined"]
    os.kill([e["pid"] for e in joined if e["worker"] == 1][-1], signal.SIGKILL)


def shot(link: str, run: Path) -> bytes:
    """The page, once the run is far enough."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as tools:
        chromium = shutil.which("chromium")
        browser = tools.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.goto(link)
        page.wait_for_selector("td.name a")
        page.evaluate("location.hash = '#/run/digits'")
        page.wait_for_selector("figure[data-drawn]")
        until(lambda: last_step(run) > TAKEN_AT)
        page.wait_for_timeout(1500)
        page.evaluate(HIDE, HIDDEN)
        taken: bytes = page.screenshot(full_page=True)
        browser.close()
    return taken


def main() -> int:
    """Train, look, and write the picture with few colours."""
    from PIL import Image

    with tempfile.TemporaryDirectory() as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        instep = [sys.executable, "-m", "instep"]
        words = [
            "run",
            str(JOB),
            "--workers",
            "3",
            "--runs",
            str(runs),
            "--set",
            "train.epochs=100",
        ]
        silent = subprocess.DEVNULL
        trains = subprocess.Popen([*instep, *words], stdout=silent, stderr=silent)
        shows = subprocess.Popen(
            [*instep, "dashboard", str(runs), "--json"], stdout=subprocess.PIPE, text=True
        )
        try:
            link = json.loads(shows.stdout.readline())["link"] if shows.stdout else ""
            until(lambda: last_step(runs / "digits") > KILLED_AT)
            kill_a_worker(runs / "digits")
            image = Image.open(io.BytesIO(shot(link, runs / "digits"))).convert("RGB")
        finally:
            shows.terminate()
            trains.send_signal(signal.SIGINT)
            trains.wait()
            shows.wait()
    image.quantize(128, dither=Image.Dither.NONE).save(PICTURE, optimize=True)
    print(f"wrote {PICTURE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
