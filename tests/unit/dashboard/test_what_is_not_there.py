"""A run that is not there, comes back, or is another one; and that who looks writes nothing."""

import asyncio
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from instep.dashboard.listing import RunList
from instep.dashboard.live import LiveRun
from instep.dashboard.pools import pool_sections
from instep.dashboard.watch import Feed, WatchedList, WatchedPool, WatchedRun, WatchedSearch
from instep.store.folder import held
from instep.store.run_folder import RunFolder
from made_up_runs import make_run
from made_up_searches import make_pool, make_search


@pytest.fixture
def runs(tmp_path):
    folder = tmp_path / "runs"
    for name, more in (("one", {}), ("cut", {"steps": 20, "outcome": None})):
        (make_run(folder / name, **more) / "run.id").write_text(name)
    return folder


def frames_of(source, between):
    """What a page is told at first, and after something was done."""

    async def watch():
        with ThreadPoolExecutor(1) as executor:
            messages = Feed(source, executor, look_s=0.01).messages()
            found = [await anext(messages)]
            for do in (lambda: None, *between):
                do()
                found.append(json.loads((await anext(messages))[6:]))
            await messages.aclose()
            return found[1:]

    return asyncio.run(watch())


def test_a_run_that_is_removed_is_said_and_shown_again_when_it_is_back(runs, tmp_path):
    away = tmp_path / "away"
    whole, gone, back = frames_of(
        WatchedRun(runs / "one"),
        [lambda: os.rename(runs / "one", away), lambda: os.rename(away, runs / "one")],
    )
    assert "was removed or renamed" in gone["sections"]["error"]["text"]
    assert back["gone"] == ["error"]
    assert back["sections"] == whole["sections"]
    assert back["charts"] == whole["charts"]


def test_a_run_whose_job_was_written_anew_is_read_with_the_new_one(runs):
    live = LiveRun(runs / "cut")
    live.look()
    assert live.spec.workers == 2
    text = (runs / "cut" / "job.toml").read_text()
    (runs / "cut" / "job.toml").write_text(text.replace("workers = 2", "workers = 3"))
    assert live.look()
    assert live.spec.workers == 3
    assert live.last_step == 20


def state_of(folder):
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in folder.rglob("*")
    }


def test_all_that_is_shown_is_read_without_writing_into_any_folder(runs, tmp_path):
    make_search(runs / "net-search")
    pool = make_pool(tmp_path / "pool")
    for database in (runs / "net-search" / "search.sqlite", pool / "pool.sqlite"):
        copy = tmp_path / "copy"
        copy.mkdir()
        shutil.copy(database, copy)
        (copy / database.name).rename(database)
        copy.rmdir()
    with held(runs / "cut"):
        before = state_of(tmp_path)
        listed = RunList(runs)
        assert listed.pool == pool
        for source in (
            WatchedList(listed),
            WatchedRun(runs / "one"),
            WatchedRun(runs / "cut"),
            WatchedSearch(listed, "net-search"),
            WatchedPool(pool),
        ):
            assert source.look() is not None
        pool_sections(pool)
        RunFolder(runs / "one")
        assert state_of(tmp_path) == before
