"""Processes that serve the page are killed: others take their place, and the page is the same."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from instep.report.figures.curves import charts
from instep.store.run_folder import RunFolder
from made_up_runs import make_run

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::ResourceWarning")]

KEEPS = """
import os, signal, sys, time
from instep.detached.kept import keep

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it

def serve(token, tell):
    tell(token + "+")
    print(os.getpid(), token, flush=True)
    while True:
        time.sleep(60)

sys.exit(keep(serve, "first", lambda: None))
"""


@contextmanager
def killed_at_the_end(process):
    try:
        yield
    finally:
        process.kill()


def is_gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def wait_until(reached):
    over = time.monotonic() + 60
    while not reached():
        assert time.monotonic() < over
        time.sleep(0.01)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_that_is_killed_has_a_successor_with_the_newest_token_and_none_outlives_its_keeper(
    end,
):
    words = [sys.executable, "-c", KEEPS]
    with (
        subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as keeper,
        killed_at_the_end(keeper),
    ):
        pid, token = keeper.stdout.readline().split()
        for known in ("first", "first+", "first++"):
            assert token == known
            os.kill(int(pid), signal.SIGKILL)
            before = pid
            pid, token = keeper.stdout.readline().split()
            assert pid != before
        keeper.send_signal(end)
        assert keeper.wait(60) == (0 if end == signal.SIGINT else -end)
        wait_until(lambda: is_gone(int(pid)))


def test_a_server_that_cannot_serve_ends_with_its_cause():
    code = KEEPS.replace("time.sleep(60)", "raise OSError('no room')")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "OSError: no room" in done.stderr


def children(pid):
    return [each.pid for each in psutil.Process(pid).children()]


BESIDE = """
import sys
from pathlib import Path
from instep.dashboard.serve import beside
with beside(Path(sys.argv[1]), lambda link: print(link, flush=True)):
    sys.stdin.read()
"""
KEEP_WHAT_IS_SHOWN = """() => {
  const show = Charts.Board.prototype.show;
  Charts.Board.prototype.show = function (charts) {
    window.shown = charts;
    show.call(this, charts);
  };
}"""


@pytest.mark.slow
def test_a_page_comes_back_after_each_of_fifty_kills_with_the_curve_of_the_report(
    tmp_path, browser, record_property
):
    """Of the server, and each fifth time of the process that keeps it."""
    api = pytest.importorskip("playwright.sync_api")
    folder = tmp_path / "runs"
    path = make_run(folder / "one", steps=20, outcome=None)
    (path / "run.id").write_text("one")
    words = [sys.executable, "-c", BESIDE, str(folder)]
    with (
        subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent,
        killed_at_the_end(parent),
    ):
        page = browser.new_page()
        page.goto(parent.stdout.readline().strip())
        page.wait_for_selector("td.name a")
        page.evaluate("location.hash = '#/run/one'")
        page.wait_for_selector("figure[data-drawn]")
        page.evaluate(KEEP_WHAT_IS_SHOWN)
        figure, took = page.locator("figure.chart").first, {"server": [], "keeper": []}
        for steps in range(21, 71):
            longer = make_run(tmp_path / str(steps), steps=steps, outcome=None)
            wait_until(lambda: children(parent.pid) and children(children(parent.pid)[0]))
            (keeper,) = children(parent.pid)
            who = "server" if steps % 5 else "keeper"
            os.kill(children(keeper)[0] if steps % 5 else keeper, signal.SIGKILL)
            killed = time.monotonic()
            for name in ("ledger.bin", "steps.bin"):
                os.replace(longer / name, path / name)
            drawn = re.compile(rf"^{steps} 16$")
            api.expect(figure).to_have_attribute("data-drawn", drawn, timeout=60_000)
            took[who].append(time.monotonic() - killed)
        for who, every in took.items():
            record_property(f"back_s after {who}", sorted(every))
            print(f"{who}: median {sorted(every)[len(every) // 2]:.2f} s, most {max(every):.2f} s")
        shown = page.evaluate("window.shown")[0]["lines"]
        whole = json.loads(json.dumps(charts([RunFolder(path)])[0]["lines"]))
        assert [{**line, "run": 0} for line in shown] == whole
        page.close()
        parent.stdin.close()
        parent.wait()
