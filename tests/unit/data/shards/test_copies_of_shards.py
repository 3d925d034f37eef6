"""Copies of shards that hosts make for each other: who makes which, and what is on disk."""

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_data_shards import written
from test_peers import CUTS, SAMPLES, door_of

from instep.data.shards.dataset import Shards
from instep.data.shards.hosts import copies, peers
from instep.data.shards.hosts.board import Board, HeldShards, PeerDoor
from instep.data.shards.hosts.copies import Copier, to_copy
from instep.data.shards.manifest import read_manifest, write_manifest
from instep.plain_file import crc32_of


def door(worker: int, folder: str, shards: set[int]) -> PeerDoor:
    bits = sum(1 << shard for shard in shards).to_bytes(2, "little")
    return PeerDoor(worker, "node", "127.0.0.1", worker, [HeldShards("set", folder, bits)])


@given(
    lies=st.lists(st.sets(st.integers(0, 11)), min_size=1, max_size=5),
    wanted=st.integers(1, 6),
    lanes=st.permutations(range(12)),
)
def test_each_shard_comes_to_lie_on_so_many_hosts_and_each_host_has_one_that_copies(
    lies: list[set[int]], wanted: int, lanes: list[int]
) -> None:
    doors = [door(2 * n, f"h{n}", held) for n, held in enumerate(lies)]
    doors += [door(2 * n + 1, f"h{n}", held) for n, held in enumerate(lies)]  # two workers each
    lots = [lanes[:5], lanes[5:], lanes[3:7]]  # participants may share a shard
    found = to_copy(doors[::-1], "set", lots, wanted)
    assert set(found) == {2 * n for n in range(len(lies))}
    for shard in range(12):
        have = [shard in held for held in lies].count(True)
        made = [n for n, held in enumerate(lies) if shard in found[2 * n]]
        assert not any(shard in lies[n] for n in made)
        assert all(numbers.count(shard) <= 1 for numbers in found.values())
        more = min(wanted, len(lies)) - have
        assert len(made) == (max(more, 0) if have else 0)


def test_a_part_is_copied_whole_to_the_next_host() -> None:
    doors = [door(0, "a", {0, 1, 2, 3}), door(1, "b", {4, 5, 6, 7}), door(2, "c", set())]
    lots = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert to_copy(doors, "set", lots, 2) == {0: [], 1: [0, 1, 2, 3], 2: [4, 5, 6, 7]}


@pytest.fixture
def disks(tmp_path: Path) -> Path:
    """A host with all shards, whose checksums its manifest has, and one with the manifest alone."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    written(tmp_path / "a", SAMPLES, CUTS)
    made = read_manifest(tmp_path / "a")
    shards = [replace(each, crc32=crc32_of(tmp_path / "a" / each.file)) for each in made.shards]
    write_manifest(tmp_path / "a", replace(made, shards=shards))
    shutil.copy(tmp_path / "a" / "manifest.json", tmp_path / "b")
    return tmp_path


def copier_of(disks: Path, fetch: copies.Fetch) -> tuple[Copier, list[str]]:
    said: list[str] = []
    shards = read_manifest(disks / "b").shards
    return Copier(disks / "b", shards, fetch, lambda: None, said.append), said


def finish(copier: Copier) -> None:
    thread = copier._thread
    if thread is not None:
        thread.join(60)


def of_disk(disks: Path) -> copies.Fetch:
    def fetch(number: int, first: int, size: int) -> bytes:
        return (disks / "a" / f"{number}.arrow").read_bytes()[first : first + size]

    return fetch


def test_copies_come_through_the_door_of_a_holder_and_are_its_bytes(
    disks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "PART", 100)
    there, board = Shards(disks / "a"), Board()
    open_door, place = door_of(there)
    board.write([place])
    asked = peers.Peers(board, "t")
    copier, said = copier_of(disks, lambda *wanted: asked.bytes_of(there.manifest.sha256, *wanted))
    with closing(open_door), closing(asked), closing(copier):
        copier.want([2, 0])
        finish(copier)
        assert (said, copier.shards) == ([], 2)
        assert open_door.samples == 0  # as figures of lent samples
        for number in (0, 2):
            name = f"{number}.arrow"
            assert (disks / "b" / name).read_bytes() == (disks / "a" / name).read_bytes()
        assert sorted(path.name for path in (disks / "b").iterdir()) == [
            "0.arrow",
            "2.arrow",
            "manifest.json",
        ]
        assert Shards(disks / "b")[0]["n"] == 0


@pytest.mark.parametrize("fault", ["flipped", "short", "nobody", "full"])
def test_what_is_not_whole_is_no_file_of_the_dataset_and_is_said_once(
    fault: str, disks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = of_disk(disks)

    def fetch(number: int, first: int, size: int) -> bytes | None:
        data = good(number, first, size)
        if number == 3 or data is None:
            return data
        wrong = {"flipped": data[:-1] + b"x", "short": data[:-1], "nobody": None, "full": data}
        return wrong[fault]

    if fault == "full":
        monkeypatch.setattr(copies, "LEAST_FREE", 1 << 60)
    copier, said = copier_of(disks, fetch)
    with closing(copier):
        copier.want([0, 1, 3])
        finish(copier)
    assert len(said) == 1
    assert said[0].startswith("data.copies: ")
    left = sorted(path.name for path in (disks / "b").iterdir())
    assert left == (["manifest.json"] if fault == "full" else ["3.arrow", "manifest.json"])


def test_a_copy_is_on_the_disk_before_it_has_its_name(
    disks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, sync, rename = list[tuple[str, int]](), os.fsync, Path.replace

    def synced(file: int) -> None:
        done.append(("sync", os.fstat(file).st_size))
        sync(file)

    def renamed(self: Path, to: Path) -> Path:
        done.append(("rename", self.stat().st_size))
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", renamed)
    copier, said = copier_of(disks, of_disk(disks))
    with closing(copier):
        copier.want([1])
        finish(copier)
    size = (disks / "a" / "1.arrow").stat().st_size
    assert (said, done) == ([], [("sync", size), ("rename", size)])


def test_what_a_killed_copier_left_is_written_anew_and_two_copiers_make_one_file(
    disks: Path,
) -> None:
    (disks / "b" / ".0.arrow.copy").write_bytes(b"half of one that was killed" * 1000)
    first, said = copier_of(disks, of_disk(disks))
    second, also_said = copier_of(disks, of_disk(disks))
    with closing(first), closing(second):
        for copier in (first, second):
            copier.want([0, 1, 2, 3])
        for copier in (first, second):
            finish(copier)
    assert (said, also_said) == ([], [])
    for number in range(4):
        name = f"{number}.arrow"
        assert (disks / "b" / name).read_bytes() == (disks / "a" / name).read_bytes()
    assert not [*(disks / "b").glob(".*")]


def test_a_copier_that_is_closed_leaves_nothing_behind(disks: Path) -> None:
    good, held = of_disk(disks), list[Copier]()

    def fetch(number: int, first: int, size: int) -> bytes | None:
        held[0]._stop.set()  # closed while a part is on its way
        return good(number, first, size)

    copier, said = copier_of(disks, fetch)
    held.append(copier)
    copier.want([0, 1])
    finish(copier)
    copier.close()
    copier.want([2])
    assert said == []
    assert sorted(path.name for path in (disks / "b").iterdir()) == ["manifest.json"]
