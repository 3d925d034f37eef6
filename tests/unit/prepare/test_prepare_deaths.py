"""A preparation that dies at any call that changes its folder is finished by the next command."""

import json
import multiprocessing
import os
from collections import Counter
from functools import partial

import pytest
from test_prepare import ask, made

from instep.prepare import plan
from marks import slow, tail

pytestmark = pytest.mark.process

CALLS = ("replace", "rename", "link", "unlink", "rmdir", "mkdir", "fsync", "truncate")
"""Of the module `os`, which pathlib and shutil call too."""

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


def prepared(folder, options, number=0):
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

    for name in CALLS:
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
    (tmp_path / "clean.py").write_text(FUNCTIONS)
    for file in "ab":
        rows = [json.dumps({"k": number % 5, "x": number}) + "\n" for number in range(30)]
        (tmp_path / f"{file}.jsonl").write_text("".join(rows))
    assert ends(tmp_path, OPTIONS[name]) == 0
    wanted = of(tmp_path)
    deaths, number = 0, 1
    while True:
        again = tmp_path / f"{number}"
        again.mkdir()
        for path in [*tmp_path.glob("*.jsonl"), tmp_path / "clean.py"]:
            os.link(path, again / path.name)
        sign = signs[number % len(signs)]
        if ends(again, OPTIONS[name], sign * number) == 0:
            break
        deaths += 1
        assert ends(again, OPTIONS[name]) == 0
        assert of(again) == wanted, f"died at call {number}"
        number += every
    assert deaths > 100 // every - 1
    print(f"{name}: {deaths} deaths")
