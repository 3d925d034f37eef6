"""Threads do not survive a fork: readers that wait for those of a library are replaced."""

import os
import select
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import psutil
import pytest
import torch
from datasets import Plain, load

from instep.data.loader import Loader, Slice
from instep.data.reading import stuck
from instep.data.reading.stuck import HUNG_S, IDLE_S, STUCK_S, StuckWatch, Threads, threads_of

LOCKED, SLEEPING = Threads(("1",), True), Threads(("1",), False)
SLICES = [Slice(0, first, first + 10) for first in range(0, 40, 10)]


class Pooled(Plain):
    """Reads in a pool of threads that is started where the dataset is made."""

    def __init__(self, samples=100):
        super().__init__(samples)
        self.pool = ThreadPoolExecutor(1)
        self.pool.submit(int).result()

    def __getitem__(self, index):
        return self.pool.submit(super().__getitem__, index).result()


class Pickled(Pooled):
    """Makes its pool anew where it is unpickled."""

    shift = 0.0

    def __getstate__(self):
        return {"samples": self.samples, "shift": self.shift}

    def __setstate__(self, state):
        self.__init__(state["samples"])
        self.shift = -state["shift"]  # as whatever another interpreter does not have

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + self.shift, target


def verdicts(*looks, cpu=0.0, reads=lambda second: 0):
    """Of each second: what the threads do, the share of a processor, the sample."""
    second = 0
    watch = StuckWatch(lambda pid: looks[min(second, len(looks) - 1)], lambda pid: cpu * second)
    said = []
    for second in range(int(HUNG_S) + 3):
        said.append(watch.turn(1, float(second), reads(second)))
    return said


def test_only_a_process_that_waits_for_itself_without_any_movement_is_stuck():
    assert verdicts(LOCKED).index("stuck") == STUCK_S
    assert "stuck" not in verdicts(SLEEPING)
    moving = [Threads((str(step),), True) for step in range(100)]
    assert "stuck" not in verdicts(*moving)
    once = [LOCKED, None, *[LOCKED] * 20]
    assert verdicts(*once).index("stuck") == 2 + STUCK_S


POLLING = [Threads((str(step),), False) for step in range(100)]


@pytest.mark.parametrize("looks", [[SLEEPING], [None], POLLING], ids=["sleeps", "runs", "polls"])
def test_a_process_at_one_read_is_named_and_then_given_up_unless_it_computes(looks):
    said = verdicts(*looks, cpu=0.02)
    assert said.index("idle") == IDLE_S
    assert said.count("idle") == 1
    assert said.index("hung") == HUNG_S
    assert set(verdicts(*looks, cpu=0.7)) == {""}
    assert set(verdicts(*looks, reads=lambda second: second // 4)) == {""}


class Polling(Pooled):
    """Waits for its pool by asking again and again."""

    def __getitem__(self, index):
        found = self.pool.submit(Plain.__getitem__, self, index)
        while not found.done():
            select.select([], [], [], 0.01)
        return found.result()


@pytest.mark.process
def test_a_reader_that_polls_is_named_with_its_line_and_the_worker_reads(monkeypatch):
    monkeypatch.setattr(stuck, "IDLE_S", 0.5)  # no matter how long: it never answers
    monkeypatch.setattr(stuck, "HUNG_S", 2.0)
    monkeypatch.setattr(stuck, "_COMPUTES", 2.0)
    said, _, pids = read(Polling(), 1)
    named = [text for text in said if "has waited" in text and "data.loaders = 0" in text]
    assert "test_stuck.py" in named[0]
    assert "in one read" in named[1]
    assert "The worker reads it" in said[-1]
    assert not pids


@pytest.mark.process
def test_a_lock_is_told_from_a_pipe_a_timeout_and_a_stop():
    def child(wait):
        pid = os.fork()
        if not pid:
            try:
                wait()
            finally:
                os._exit(0)
        return pid

    lock, (read, write) = threading.Lock(), os.pipe()
    lock.acquire()
    pids = [
        child(lock.acquire),
        child(lambda: lock.acquire(timeout=600.0)),
        child(lambda: os.read(read, 1)),
        child(lock.acquire),
    ]
    try:
        until(lambda: all(psutil.Process(pid).status() == "sleeping" for pid in pids))
        for number in (0, 3):
            until(lambda: (threads_of(pids[number]) or SLEEPING).locked)  # noqa: B023
        os.kill(pids[3], signal.SIGSTOP)
        until(lambda: psutil.Process(pids[3]).status() == "stopped")
        found = [threads_of(pid) for pid in pids]
        assert found[0].locked
        assert not found[1].locked
        assert not found[2].locked
        assert found[3] is None
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for end in (read, write):
            os.close(end)


def until(true):
    while not true():  # pytest's own limit ends it
        os.sched_yield()


def read(dataset, processes):
    said = []
    loader = Loader(dataset, seed=5, shuffle=False, processes=processes, say=said.append)
    with closing(loader):
        got = [inputs[0, 0].item() for inputs, _ in load(loader, SLICES)]
        fingerprint = loader.fingerprint()
        pids = loader.pids
    assert got == [0.0, 10.0, 20.0, 30.0]
    assert fingerprint.samples == 100
    return said, loader, pids


@pytest.mark.process
@pytest.mark.parametrize("processes", [2, "auto"])
def test_the_worker_reads_what_hangs_in_forks_and_cannot_be_pickled(processes):
    (first, last), loader, pids = read(Pooled(), processes)
    assert "a loader process could not continue: it waits for a lock that no thread" in first
    assert "test_stuck.py" in first
    assert "data.loaders = 0" in first
    assert "cannot be pickled" in last
    assert "The worker reads it" in last
    assert not pids
    assert "could not continue" in loader.why


@pytest.mark.process
@pytest.mark.tail
def test_processes_without_a_fork_read_what_hangs_in_forks():
    said, loader, pids = read(Pickled(), 2)
    assert len(said) == 1
    assert len(pids) == 2
    assert loader.mode == "processes"


@pytest.mark.process
@pytest.mark.tail
def test_processes_that_read_another_sample_than_the_worker_are_not_believed():
    dataset = Pickled()
    dataset.shift = 0.25
    said = []
    with closing(Loader(dataset, seed=5, shuffle=False, processes=1, say=said.append)) as loader:
        (inputs, _), *_ = load(loader, SLICES)
        assert torch.equal(inputs[3], torch.full((3,), 3.25))
    assert "another first sample" in said[-1]
