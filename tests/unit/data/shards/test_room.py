"""Several processes bring files into one cache: with downloads it has one more than its limit."""

import fcntl
import multiprocessing
import os
import secrets
import signal
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import pytest

from instep.data.shards.urls.room import CacheRoom

pytestmark = pytest.mark.process

FORKS = multiprocessing.get_context("forkserver")
ONE = 1000


@pytest.fixture
def root(tmp_path):
    (tmp_path / "cache" / "set").mkdir(parents=True)
    return tmp_path / "cache"


def bytes_of(root):
    """Bytes of files and downloads, at most: what is renamed meanwhile is left out."""
    total = 0
    for name in os.listdir(root / "set"):
        with suppress(FileNotFoundError):
            total += os.stat(root / "set" / name).st_size
    return total


def bring(root, limit, number, size=ONE):
    """Bring a file; returns how many bytes all had meanwhile."""
    place = root / "set" / f"{number}.arrow"
    beside = place.with_name(f".{place.name}.{secrets.token_hex(4)}")
    with CacheRoom(root, limit).reserved(size) as put:
        beside.write_bytes(bytes(size))
        seen = bytes_of(root)
        put(beside, place)
    return seen


def bring_many(root, limit, seed):
    """The most bytes that were seen, in whatever process."""
    sizes = np.random.default_rng(seed).integers(ONE // 2, ONE, 60, endpoint=True).tolist()
    with ThreadPoolExecutor(3) as pool:
        numbers = [f"{seed}-{number}" for number in range(len(sizes))]
        return max(pool.map(partial(bring, root, limit), numbers, sizes))


@pytest.mark.parametrize("limit", [0, ONE // 2, 2 * ONE, 5 * ONE])
def test_downloads_of_several_processes_have_one_file_more_than_the_limit_and_all_end(root, limit):
    with ProcessPoolExecutor(4, mp_context=FORKS) as pool:
        most = max(pool.map(partial(bring_many, root, limit), range(4)))
    assert most <= limit + ONE
    assert bytes_of(root) <= max(limit, ONE)
    assert not list(root.glob(".room-*"))


def test_a_download_without_room_waits_for_nobody_and_further_ones_wait_for_it(root):
    with ExitStack() as held, ThreadPoolExecutor(1) as pool:
        for _ in range(2):
            held.enter_context(CacheRoom(root, 2 * ONE).reserved(ONE))
        with CacheRoom(root, 2 * ONE).reserved(ONE):  # beside, while others hold all room
            further = pool.submit(bring, root, 2 * ONE, 4)
            assert not further.done()
        assert further.result() <= 3 * ONE


def hold(root, ready):
    with CacheRoom(root, 2 * ONE).reserved(2 * ONE):
        ready.put(True)
        signal.pause()


def test_room_that_a_killed_process_held_is_free(root):
    ready = FORKS.SimpleQueue()
    holder = FORKS.Process(target=hold, args=(root, ready))
    holder.start()
    ready.get()
    with CacheRoom(root, 2 * ONE).reserved(ONE):
        assert len(list(root.glob(".room-*"))) == 1  # of the other: this one is beside
    holder.kill()
    holder.join()
    with CacheRoom(root, 2 * ONE).reserved(ONE), CacheRoom(root, 2 * ONE).reserved(ONE):
        assert len(list(root.glob(".room-*"))) == 2


@pytest.mark.parametrize("size", [ONE, 2 * ONE])
def test_a_forked_process_keeps_no_room_that_its_parent_has_given_back(root, size):
    with CacheRoom(root, ONE).reserved(size):  # the larger one beside
        pipe, told = os.pipe()
        if not (child := os.fork()):
            os.close(told)
            os.read(pipe, 1)  # until the parent is done
            os._exit(0)
    try:
        with CacheRoom(root, ONE).reserved(ONE), open(root / ".beside.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            assert len(list(root.glob(".room-*"))) == 1
    finally:
        os.close(told)
        os.close(pipe)
        os.waitpid(child, 0)


def test_what_was_not_used_for_longest_goes_first_and_only_as_much_as_is_needed(root):
    for number in range(3):
        bring(root, 3 * ONE, number)
        os.utime(root / "set" / f"{number}.arrow", ns=(number, 10**18))
    bring(root, 3 * ONE, 3)
    assert sorted(path.name for path in root.glob("*/*.arrow")) == ["1.arrow", "2.arrow", "3.arrow"]
