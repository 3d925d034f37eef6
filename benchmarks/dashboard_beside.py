"""Does training get slower when three pages in a browser watch it?

    python benchmarks/dashboard_beside.py [--windows 12] [--turn 4] [--json FILE]

Two workers on this machine, one thread each, watched and not, in turns (see turns.py). `instep
dashboard` serves the run to three readers of its stream, and is stopped with the run it watches
while it is not that one's turn. Figures are times of a step over those without; CPU times are of
the workers and the master, so that they say what the reading of files costs them.
"""

import argparse
import http.client
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import psutil
from dashboard import Served
from turns import (
    Program,
    cpu_steps_s,
    ended,
    in_words,
    over,
    steps_s,
    summed_up,
    take_turns,
    times_of,
    wait_for_steps,
    write,
)
from turns import instep as program

PAGES = 3
SETTINGS: dict[str, object] = {"train.global_batch": 128}


class Watched:
    """A program whose server is held with it.

    Args:
        alone: the program.
        server: that shows its run.
    """

    def __init__(self, alone: Program, server: Served) -> None:
        self._alone, self._server = alone, psutil.Process(server.process.pid)

    @property
    def turns(self) -> list[tuple[float, float]]:
        return self._alone.turns

    @property
    def cpu_s(self) -> list[float]:
        return self._alone.cpu_s

    def hold(self) -> None:
        self._alone.hold()
        self._server.suspend()

    def turn(self, seconds: float) -> None:
        self._server.resume()
        self._alone.turn(seconds)
        self._server.suspend()

    def end(self) -> None:
        self._alone.end()
        self._server.resume()


def read(server: Served) -> None:
    """Be a page."""
    with suppress(OSError, http.client.HTTPException):
        for _ in server.stream("?run=bench"):
            pass


def measure(windows: int, turn_s: float) -> dict[str, object]:
    """Both, measured and printed."""
    with tempfile.TemporaryDirectory() as text:
        folders = {which: Path(text) / which for which in ("watched", "alone")}
        programs: dict[str, Program] = {}
        with ended(programs):
            for which, folder in folders.items():
                programs[which] = program("recipes/mlp.py:recipe", SETTINGS, folder)
                wait_for_steps(lambda: len(times_of(folder)))  # noqa: B023
                programs[which].hold()
            server = Served(folders["watched"])
            for _ in range(PAGES):
                threading.Thread(target=read, args=(server,), daemon=True).start()
            used = server.cpu_s()
            both = {**programs, "watched": Watched(programs["watched"], server)}
            take_turns(both, turn_s, windows)  # type: ignore[arg-type]
            used = server.cpu_s() - used
            psutil.Process(server.process.pid).resume()
            server.close()
        steps = {p: steps_s(times_of(folders[p]), programs[p].turns[:windows]) for p in programs}
        cpu = {p: cpu_steps_s(steps[p], programs[p]) for p in programs}
    ratios, cpu_ratios = (over(times["watched"], times["alone"]) for times in (steps, cpu))
    share = used / (windows * turn_s)
    print(f"watched over alone {in_words(ratios)}  CPU time {in_words(cpu_ratios)}", flush=True)
    print(f"the server: {100 * share:.1f} % of a core", flush=True)
    return {
        "pages": PAGES,
        "load": os.getloadavg()[0],
        "watched over alone": summed_up(ratios),
        "cpu, watched over alone": summed_up(cpu_ratios),
        "server_share_of_a_core": round(share, 4),
        "step_s": steps,
        "cpu_s": cpu,
    }


def main() -> None:
    """Measure, print, and with `--json` write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=12, help="turns of each")
    parser.add_argument("--turn", type=float, default=4.0, help="seconds of a turn")
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    found = measure(args.windows, args.turn)
    if args.json:
        write(args.json, [found])


if __name__ == "__main__":
    main()
