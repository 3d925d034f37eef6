"""Does training get slower when three pages in a browser watch it?

    python benchmarks/dashboard_beside.py [--rounds 60] [--turn 1.5] [--json FILE]

One run of two workers on this machine, one thread each, is watched and not watched in turns: the
server of `instep dashboard`, with three readers of its stream, is stopped and continued, in the
order watched, not, not, watched, and the other way round, so that what drifts falls out. A round is
four turns; its figure is the time of a step while it is watched over that while it is not. When the
server is continued it reads what the run has written meanwhile too, so it works more than it would
if it had never been stopped.
"""

import argparse
import http.client
import os
import statistics
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
from dashboard import Served
from turns import Program, ended, times_of, wait_for_steps, write
from turns import instep as program

PAGES = 3
SETTINGS: dict[str, object] = {"train.global_batch": 128}
ORDER = (True, False, False, True)


class Page(threading.Thread):
    """A reader of the run's stream, which counts its messages."""

    def __init__(self, server: Served) -> None:
        super().__init__(daemon=True)
        self._server, self.messages = server, 0

    def run(self) -> None:
        """Read until the server ends."""
        with suppress(OSError, http.client.HTTPException):
            for _ in self._server.stream("?run=bench"):
                self.messages += 1


def take_turns(server: Served, rounds: int, turn_s: float) -> list[tuple[bool, float, float]]:
    """Of each turn, whether it was watched, when it began and when it ended, Unix seconds."""
    process = psutil.Process(server.process.pid)
    everyone = [process, *process.children(recursive=True)]
    turns = []
    for number in range(rounds):
        for watched in ORDER if number % 2 == 0 else [not each for each in ORDER]:
            for each in everyone:
                each.resume() if watched else each.suspend()
            begin = time.time()
            time.sleep(turn_s)
            turns.append((watched, begin, time.time()))
    for each in everyone:
        each.resume()
    return turns


def step_s(times: np.ndarray, begin: float, end: float) -> float:
    """Seconds of a step that begins in a turn."""
    inside = times[(times > begin) & (times < end)]
    return float((inside[-1] - inside[0]) / (len(inside) - 1))


def ratios_of(times: np.ndarray, turns: list[tuple[bool, float, float]]) -> list[float]:
    """Of each round, time of a step while watched over that while not."""
    found = []
    for at in range(0, len(turns), 4):
        sums = {True: 0.0, False: 0.0}
        for watched, begin, end in turns[at : at + 4]:
            sums[watched] += step_s(times, begin, end)
        found.append(sums[True] / sums[False])
    return found


def mean_of(ratios: list[float]) -> dict[str, float]:
    """Their mean without the outer tenths, and an interval that has it with 95 % (bootstrap)."""
    draw = np.random.default_rng(0)
    picks = draw.integers(0, len(ratios), (10_000, len(ratios)))
    values = np.sort(np.array(ratios)[picks], axis=1)
    cut = len(ratios) // 10
    means = values[:, cut : len(ratios) - cut].mean(axis=1)
    mine = np.sort(np.array(ratios))[cut : len(ratios) - cut].mean()
    low, high = np.quantile(means, [0.025, 0.975])
    return {
        "mean": round(float(mine), 5),
        "low": round(float(low), 5),
        "high": round(float(high), 5),
    }


def measure(rounds: int, turn_s: float) -> dict[str, object]:
    """Measured and printed."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text) / "runs"
        programs: dict[str, Program] = {}
        with ended(programs):
            programs["bench"] = program("recipes/mlp.py:recipe", SETTINGS, folder)
            wait_for_steps(lambda: len(times_of(folder)), 20, 600.0)
            server = Served(folder)
            pages = [Page(server) for _ in range(PAGES)]
            for page in pages:
                page.start()
            time.sleep(3.0)
            used = server.cpu_s()
            turns = take_turns(server, rounds, turn_s)
            share = (server.cpu_s() - used) / (2 * rounds * turn_s)
            time.sleep(1.0)  # records are sent a few times a second
            times = times_of(folder)
            messages = [page.messages for page in pages]
            server.close()
    if min(messages) < rounds * turn_s:
        raise SystemExit(f"the pages did not watch: they got {messages} messages")
    ratios = ratios_of(times, turns)
    mean = mean_of(ratios)
    print(f"watched over not: {mean['mean']:.4f} ({mean['low']:.4f} to {mean['high']:.4f})")
    print(f"the server: {100 * share:.2f} % of a core")
    step = statistics.median(step_s(times, begin, end) for _, begin, end in turns)
    return {
        "pages": PAGES,
        "messages": messages,
        "load_before": load,
        "rounds": rounds,
        "turn_s": turn_s,
        "step_s": round(step, 5),
        "watched over not": mean,
        "server_share_of_a_core": round(share, 4),
        "ratios": [round(each, 5) for each in ratios],
    }


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of four turns")
    parser.add_argument("--turn", type=float, default=1.5, help="seconds of a turn")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    found = measure(args.rounds, args.turn)
    if args.json:
        write(args.json, [found])


if __name__ == "__main__":
    main()
