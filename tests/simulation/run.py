"""Tell many stories of the control plane, and print the seeds of those that break a promise.

python tests/simulation/run.py --seeds 10000 --from 0 --jobs 2
python tests/simulation/run.py --seed 4711 --verbose       one again, line by line
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from simulation.engine import Violation
from simulation.world import tell


def verdict(seed: int) -> tuple[int, str, int]:
    """A seed, what was wrong in its story (empty if nothing), and how many messages it had."""
    try:
        world = tell(seed)
    except Violation as broken:
        return seed, str(broken), 0
    return seed, "", world.engine.messages


def verdicts(first: int, count: int, jobs: int) -> Iterator[tuple[int, str, int]]:
    """Of so many seeds, in any order."""
    seeds = range(first, first + count)
    if jobs < 2:
        yield from map(verdict, seeds)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(verdict, seeds, chunksize=20)


def main(argv: list[str] | None = None) -> int:
    """Parse, tell, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=10_000, help="how many")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--verbose", action="store_true", help="with --seed: print the story")
    asked = parser.parse_args(argv)
    if asked.seed is not None:
        return one(asked.seed, verbose=asked.verbose)
    began, failed, messages = time.perf_counter(), [], 0
    for seed, wrong, count in verdicts(asked.first, asked.seeds, asked.jobs):
        messages += count
        if wrong:
            failed.append(seed)
            print(f"seed {seed}: {wrong[:600]}", flush=True)
    seconds = time.perf_counter() - began
    print(
        f"{asked.seeds} seeds, {messages} messages, {seconds:.1f} s, "
        f"{asked.seeds / seconds:.0f} seeds per second; {len(failed)} failed"
    )
    if failed:
        print(f"again, line by line: python tests/simulation/run.py --seed {failed[0]} --verbose")
    return 1 if failed else 0


def one(seed: int, *, verbose: bool) -> int:
    """Tell one story."""
    wrong, world = "", None
    try:
        world = tell(seed, verbose=verbose)
    except Violation as broken:
        if verbose and broken.__cause__ is not None:
            traceback.print_exception(broken.__cause__)
        wrong, world = str(broken), broken.world  # type: ignore[attr-defined]
    print(world.plan)
    if world.engine.story:
        print("\n".join(world.engine.story))
    print(f"seed {seed}: {wrong or 'every promise held'}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
