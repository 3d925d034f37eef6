"""Makes the folder of a search and that of a pool, as real ones leave them: made-up figures."""

from __future__ import annotations

from pathlib import Path

from instep.job.file import build, dump
from instep.pool.decide import decide
from instep.pool.jobs import ClientEnded, JobSubmitted, PoolJob, PoolSpec, RunSeen
from instep.pool.pool_file import PoolFolder
from instep.pool.pool_journal import PoolJournal
from instep.search.record import SearchRecord
from instep.search.results import Result, name_of
from made_up_runs import make_run

SPACE = {
    "arguments.lr": {"low": 1e-5, "high": 0.1, "log": True},
    "train.global_batch": [32, 64],
}
TOLD = [
    Result("completed", 0.5, ((1, 0.4), (3, 0.5)), 48, 2.0, "ab"),
    Result("pruned", 0.3, ((1, 0.3),), 16, 0.7),
    Result("completed", 0.9, ((1, 0.6), (3, 0.9)), 48, 2.1, "cd"),
    Result("failed", None, steps=9, seconds=0.2, why="the loss is nan"),
    Result("completed", 0.7, ((1, 0.5), (3, 0.7)), 48, 2.0, "ef"),
]
"""Results of trials, the larger the better."""


def make_search(folder: Path, *, trials: int = 8, **more: object) -> Path:
    """A folder of a search of which five trials are told and one more is chosen."""
    search = {"trials": trials, "space": SPACE, "prune": "median", "rungs": [1, 3]} | more
    stop = {"metric": "accuracy", "mode": "max"}
    job = build({"recipe": "a.py:b", "search": search, "stop": stop}, source="a test")
    folder.mkdir(parents=True)
    with SearchRecord(folder, write=True) as record:
        record.keep_about({"job": dump(job)})
        for number in range(len(TOLD) + 1):
            values = {"arguments.lr": 10.0 ** -(number + 1), "train.global_batch": 32 << number % 2}
            record.choose(number, values, ((1, 0.35),) if number == 1 else ())
            if number < len(TOLD):
                record.tell(number, TOLD[number])
                path = make_run(folder / name_of(number), steps=max(1, TOLD[number].steps))
                (path / "run.id").write_text(name_of(number))
    return folder


def make_pool(folder: Path, runs: str = "runs") -> Path:
    """A folder of a pool of four cores, with a job that runs, one that waits and one that ended."""
    pool = PoolFolder(folder)
    pool.make(PoolSpec(cores=4, runs=runs, shares={"alice": 2.0}))
    journal = PoolJournal(folder, write=True)
    state = pool.empty
    events = [
        JobSubmitted(PoolJob(id="done", share="bob", at_least=1, at_most=2)),
        RunSeen("done", 2, step=9),
        ClientEnded("done", "completed", step=10),
        JobSubmitted(PoolJob(id="busy", share="alice", at_least=3, at_most=4)),
        RunSeen("busy", 4, step=50, steps=100, left_s=60.0),
        JobSubmitted(PoolJob(id="late", share="bob", at_least=2, at_most=2)),
    ]
    for at, event in enumerate(events):
        after = decide(state, event, 1000.0 + at)
        journal.write(event, state, after)
        state = after
    journal.close()
    return folder
