"""A preparation that dies at any call that changes its folder is finished by the next command."""

import json
import multiprocessing
import os
import random
import shutil
from collections import Counter
from contextlib import suppress
from functools import partial

import pytest
from test_prepare import ask, made

from instep.data.shards.manifest import read_manifest
from instep.data.shards.writer import ShardFile
from instep.errors import DataError
from instep.prepare import plan
from marks import slow, tail

pytestmark = pytest.mark.process

CALLS = ("replace", "rename", "link", "unlink", "rmdir", "mkdir", "fsync", "truncate")
"""Of the module `os`, which pathlib and shutil call too."""

RENAMES = ("replace", "rename", "link")
"""Those by which what was written gets its name."""

OPTIONS = {
    "plain": {},
    "shuffled": {"shuffle": True},
    "by key": {"key": "k", "reduce": "clean.py:one"},
    "nothing kept": {"shuffle": True, "keep": False},
}

DIED = 9

FUNCTIONS = """
def record(raw):
    if raw["k"] == 3:
        raise ValueError("a three")
    return raw

def one(samples):
    return {"k": samples[0]["k"], "n": len(samples)}
"""


def prepared(folder, options, number=0, names=CALLS):
    """Prepare, in a process of its own, which dies at a call: before it, or after it if below 0."""
    os.chdir(folder)
    plan.SMALLEST = 200
    calls = 0

    def counted(call, *args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == number:
            os._exit(DIED)
        try:
            return call(*args, **kwargs)
        finally:
            if calls == -number:
                os._exit(DIED)

    for name in names:
        setattr(os, name, partial(counted, getattr(os, name)))
    made(ask(sources=["*.jsonl"], map="clean.py:record", shard_bytes=900, **options))
    os._exit(0)


def ends(*args):
    """How a process ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["test_prepare", "instep.prepare.job", "torch"])
    child = context.Process(target=prepared, args=args)
    child.start()
    child.join()
    return child.exitcode


def of(folder):
    """What has been made, and how many files of each kind there are."""
    manifest = json.loads((folder / "out/manifest.json").read_text())
    kinds = Counter(path.name.partition("-")[0] for path in (folder / "out").iterdir())
    return [kinds, *(manifest[name] for name in ("sha256", "samples", "bad", "bytes"))]


def passes_for_whole(folder):
    """What a preparation has left that others would read: all of it has to be whole."""
    out = folder / "out"
    files = [path for path in out.rglob("*.arrow") if not path.name.startswith(".")]
    for path in files:
        shard = ShardFile(path)
        views = [*shard.between(0, len(shard))]
        assert sum(each[0].rows for each in views) == len(shard)
    for path in out.rglob("*.done"):
        json.loads(path.read_text())
    with suppress(DataError):
        read_manifest(out)
        return of(folder)
    return None


def raw(folder, rows=30):
    """Write raw files and functions."""
    (folder / "clean.py").write_text(FUNCTIONS)
    for file in "ab":
        lines = [json.dumps({"k": number % 5, "x": number}) + "\n" for number in range(rows)]
        (folder / f"{file}.jsonl").write_text("".join(lines))


def dies_at_each(tmp_path, options, every, signs):
    """Prepare again and again, dying at another call each time; how often it died.

    What is left is whole, and the next command makes what an undisturbed one did.
    """
    assert ends(tmp_path, options) == 0
    wanted = of(tmp_path)
    deaths, number = 0, 1
    while True:
        again = tmp_path / f"{number}"
        again.mkdir()
        for path in [*tmp_path.glob("*.jsonl"), tmp_path / "clean.py"]:
            os.link(path, again / path.name)
        sign = signs[number % len(signs)]
        if ends(again, options, sign * number) == 0:
            return deaths
        deaths += 1
        left = passes_for_whole(again)
        assert left is None or left[1:] == wanted[1:], f"died at call {number}"
        assert ends(again, options) == 0
        assert of(again) == wanted, f"died at call {number}"
        shutil.rmtree(again)
        number += every


@pytest.mark.parametrize(
    ("name", "every", "signs"),
    [
        ("plain", 25, (1, -1)),
        tail("shuffled", 25, (1, -1)),
        tail("by key", 25, (1, -1)),
        *(slow(name, 1, (sign,)) for name in OPTIONS for sign in (1, -1)),
    ],
)
def test_whatever_call_a_preparation_dies_at_the_next_one_makes_the_same(
    tmp_path, name, every, signs
):
    """Before the call where the sign is 1, after it where it is -1."""
    raw(tmp_path)
    deaths = dies_at_each(tmp_path, OPTIONS[name], every, signs)
    assert deaths > 100 // every - 1
    print(f"{name}: {deaths} deaths")


@pytest.mark.slow
def test_a_thousand_deaths_between_write_and_rename_leave_nothing_that_passes_for_whole(tmp_path):
    draw, deaths, rows = random.Random(3), 0, 60
    while deaths < 1000:
        for name, options in OPTIONS.items():
            calm, again = tmp_path / f"{rows}-{name}", tmp_path / f"{rows}-{name}-again"
            for folder in (calm, again):
                folder.mkdir()
                raw(folder, rows)
            assert ends(calm, options) == 0
            deaths += dies_on_its_way(again, options, draw, of(calm))
            print(f"{rows} rows, {name}: {deaths} deaths", flush=True)
        rows += 7


def dies_on_its_way(folder, options, draw, wanted):
    """Give a command that dies at one of its next renames until it ends; how often it died."""
    deaths = 0
    while code := ends(folder, options, draw.randint(1, 4 + deaths // 10), RENAMES):
        deaths += 1
        left = passes_for_whole(folder)
        assert code == DIED
        assert left is None or left[1:] == wanted[1:]
    assert of(folder) == wanted
    return deaths
