"""Histories of private runs, simulated around the code that chooses keys and records sums: kills,
courses, returns to checkpoints, resumes with other settings, copies of a run that go on too."""

from __future__ import annotations

import copy
import hashlib
import os
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

from instep.privacy import secret_files
from instep.privacy.grid import Grid
from instep.privacy.released import FILE, RELEASE, Releases, contents_by_commit
from instep.privacy.sums import PrivateSums
from marks import slow

SHAPES = (3, 2), (2,)
NUMBERS, MOST = 8, 60
EVERY = 3
"""Steps between checkpoints."""


@dataclass
class Run:
    """A run's folder, and what its processes hold."""

    folder: Path
    secret: bytes
    """Those of runs with one id are the same."""
    step: int = 0
    state: bytes = b"start"
    noise: float = 1.0
    clip: float = 1.0
    processor: int = 0
    """Whose last bits are others."""
    checkpoints: dict[int, bytes] = field(default_factory=dict)

    @property
    def run_id(self) -> str:
        return self.secret.hex()[:16]

    def sums(self) -> PrivateSums:
        """Sums as a worker of this run makes them when a group forms."""
        slots = [torch.zeros(shape) for shape in SHAPES]
        return PrivateSums(slots, Grid(self.clip, NUMBERS, MOST), self.noise, 40.0, self.secret)


@dataclass
class World:
    """Everything that was ever published, beside what the code says of it."""

    keys: dict[bytes, tuple[object, ...]] = field(default_factory=dict)
    contents: dict[bytes, dict[int, set[tuple[object, ...]]]] = field(default_factory=dict)
    """By secret and commit."""
    done: Counter[str] = field(default_factory=Counter)

    def publishes(self, run: Run, commit: int, whole: list[torch.Tensor]) -> bytes:
        """A worker of a run seals a sum, records it, and uses it."""
        made = run.sums()
        tag = made.seal(commit, whole)
        content = b"".join(each.numpy().tobytes() for each in whole)
        what = (run.secret, commit, content, run.noise, run.clip)
        assert self.keys.setdefault(made._key, what) == what, "a key for two contents"
        Releases(run.folder, run.run_id).write(commit, tag)
        self.contents.setdefault(run.secret, {}).setdefault(commit, set()).add(what)
        self.done["sums"] += 1
        released = [made.gradient(n, each) for n, each in enumerate(whole)]
        return b"".join(each.numpy().tobytes() for each in released)


def summed(run: Run, commit: int) -> list[torch.Tensor]:
    """What workers sum in a step: it follows from the state, and a step may have no sample."""
    digest = hashlib.sha256(run.state + repr((commit, run.processor)).encode()).digest()
    if digest[0] < 40:
        return [torch.zeros(shape, dtype=torch.int32) for shape in SHAPES]
    numbers = torch.from_numpy(np.frombuffer(digest[:NUMBERS], np.int8).astype(np.int32))
    return [each.view(shape) for each, shape in zip(numbers.split([6, 2]), SHAPES, strict=True)]


def takes_a_step(world: World, run: Run, draw: random.Random) -> None:
    """Workers compute a sum, and some may be killed before it is committed: all seal the same."""
    commit = run.step + 1
    for _ in range(draw.randrange(3)):  # attempts that were broken, by workers of any number
        for _ in range(draw.randrange(3)):
            world.publishes(run, commit, summed(run, commit))
        if draw.random() < 0.1:  # the successor is on another machine
            run.processor = draw.randrange(3)
            world.done["other bits"] += 1
    workers = draw.choice((1, 2, 7))
    published = {world.publishes(run, commit, summed(run, commit)) for _ in range(workers)}
    assert len(published) == 1, "workers move by the same"
    run.state = hashlib.sha256(run.state + published.pop()).digest()
    run.step = commit
    if run.step % EVERY == 0:
        run.checkpoints[run.step] = run.state


def goes_back(world: World, run: Run, draw: random.Random) -> None:
    """All workers are lost: a new course, from a checkpoint or the start."""
    run.step, run.state = draw.choice([(0, b"start"), *run.checkpoints.items()])
    world.done["went back"] += 1


def is_resumed(world: World, run: Run, draw: random.Random) -> None:
    """All processes begin anew, the last record was torn, and the job may have been edited."""
    torn = draw.randrange(RELEASE.itemsize)
    for path in run.folder / FILE, secret_files.folder() / f"{run.run_id}.{FILE}":
        with path.open("ab") as file:
            file.write(os.urandom(torn))
    goes_back(world, run, draw)
    if draw.random() < 0.4:
        run.noise = draw.choice((0.5, 1.0, 2.0))
    if draw.random() < 0.2:
        run.clip = draw.choice((1.0, 2.0))
    Releases(run.folder, run.run_id).begin(run.secret)
    world.done["resumed"] += 1


def is_copied(world: World, run: Run, draw: random.Random) -> Run:
    """A copy of the folder, which goes on with the same secret."""
    other = copy.deepcopy(run)
    other.folder = run.folder.with_name(f"{run.folder.name}-{world.done['copied']}")
    other.folder.mkdir()
    (other.folder / FILE).write_bytes((run.folder / FILE).read_bytes())
    world.done["copied"] += 1
    return other


def lives(world: World, folder: Path, draw: random.Random) -> None:
    """One history: what happens to a run and to its copies."""
    folder.mkdir()
    first = Run(folder / "run", draw.randbytes(32))
    first.folder.mkdir()
    Releases(first.folder, first.run_id).begin(first.secret)
    runs = [first]
    for _ in range(draw.randrange(4, 12)):
        run = draw.choice(runs)
        what = draw.random()
        if what < 0.6:
            takes_a_step(world, run, draw)
        elif what < 0.75:
            goes_back(world, run, draw)
        elif what < 0.9:
            is_resumed(world, run, draw)
        elif len(runs) < 3:
            runs.append(is_copied(world, run, draw))
    truth = {commit: len(each) for commit, each in world.contents.get(first.secret, {}).items()}
    for run in runs:  # whoever looks finds what any of them has published
        assert contents_by_commit(run.folder, run.run_id) == truth


@pytest.mark.parametrize("histories", [200, slow(10_000)])
def test_no_history_uses_a_key_for_two_contents_and_records_know_of_each(
    histories: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(secret_files.ENVIRONMENT, str(tmp_path / "secrets"))
    (tmp_path / "secrets").mkdir()
    draw, world = random.Random(4), World()
    for number in range(histories):
        lives(world, tmp_path / str(number), draw)
    again = sum(len(each) > 1 for of in world.contents.values() for each in of.values())
    assert again > histories / 20  # so that a key without the content would be used twice
    assert world.done["sums"] > 2 * len(world.keys)
    assert min(world.done.values()) > histories / 20, world.done
