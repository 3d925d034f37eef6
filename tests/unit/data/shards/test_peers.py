"""Samples that lie on another host come from its door, and are the same."""

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_data_shards import KINDS, assert_same, numbered, written

from instep.comm.encryption.certificates import Authority, Identity
from instep.data.shards.columns import Column
from instep.data.shards.dataset import Shards
from instep.data.shards.hosts import peers, sent_rows
from instep.data.shards.hosts.board import Board, HeldShards, PeerDoor
from instep.data.shards.hosts.door import OpenDoor
from instep.data.shards.urls.remote import Remote
from instep.errors import DataError, PeerError

CUTS = [10, 20, 30]
SAMPLES = [
    {"n": i, "t": f"é{i}" * (i % 3), "r": list(range(i % 4)), "m": np.full((2, 3), i, np.float32)}
    for i in range(40)
]


@pytest.fixture(autouse=True)
def alone():
    yield
    if peers.present is not None:
        peers.present.close()
    peers.present = None


@pytest.fixture
def disks(tmp_path):
    """Two hosts, of which one has the first half of the shards, and the other the second."""
    for host, there in (("a", (0, 1)), ("b", (2, 3))):
        folder = tmp_path / host
        folder.mkdir()
        written(folder, SAMPLES, CUTS)
        for number in set(range(4)) - set(there):
            (folder / f"{number}.arrow").unlink()
    return tmp_path


def door_of(dataset, token="t", credentials=None):
    door = OpenDoor("127.0.0.1", {dataset.manifest.sha256: dataset}, token, credentials)
    holding = HeldShards(dataset.manifest.sha256, str(dataset.folder), dataset.held)
    return door, PeerDoor(1, "node-b", *door.address, [holding])


def use(*doors, token="t", credentials=None):
    board = Board()
    board.write(list(doors))
    if peers.present is not None:
        peers.present.close()
    peers.present = peers.Peers(board, token, credentials)
    return board


def test_every_sample_is_read_wherever_it_lies_and_only_what_is_asked_for_is_given(disks):
    here, there = Shards(disks / "a"), Shards(disks / "b")
    assert (here.held, there.held) == (b"\x03", b"\x0c")
    door, place = door_of(there)
    use(place)
    with closing(door):
        for indices in ([35, 3, 22, 22, 21, -1], [0], [39, 38], range(40)):
            for index, sample in zip(indices, here.__getitems__(list(indices)), strict=True):
                for name, value in SAMPLES[index].items():
                    assert_same(sample[name], value)
        assert here.column("n").tolist() == list(range(40))
        assert here.column("t") == [each["t"] for each in SAMPLES]
        before = door.samples
        here.__getitems__([1, 2, 38])
        assert door.samples - before == 1


def test_threads_ask_one_after_the_other_as_they_share_a_line(disks, monkeypatch):
    here, there = Shards(disks / "a"), Shards(disks / "b")
    door, place = door_of(there)
    use(place)
    inside, most, ask = [], [], peers.Peers._ask

    def counted(self, *arguments):
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.01)  # for the others to come in
        try:
            return ask(self, *arguments)
        finally:
            inside.pop()

    monkeypatch.setattr(peers.Peers, "_ask", counted)
    with closing(door), ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda index: here[index]["n"], [39, 25, 30, 22] * 3))
    assert found == [39, 25, 30, 22] * 3
    assert set(most) == {1}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_each_kind_of_column_comes_as_it_is_stored(tmp_path_factory, kind, data):
    values = data.draw(st.lists(KINDS[kind], min_size=6, max_size=6))
    folder = tmp_path_factory.mktemp("hosts")
    for host in ("a", "b"):
        (folder / host).mkdir()
        written(folder / host, [{"v": value} for value in values], [])
    (folder / "a" / "0.arrow").unlink()
    door, place = door_of(Shards(folder / "b"))
    use(place)
    with closing(door):
        found = Shards(folder / "a").__getitems__([5, 0, 3])
    for index, sample in zip([5, 0, 3], found, strict=True):
        assert_same(sample["v"], values[index])


def test_only_a_process_of_the_run_is_answered(disks, monkeypatch):
    monkeypatch.setattr(peers, "PAUSES_S", ())
    here, there, authority = Shards(disks / "a"), Shards(disks / "b"), Authority()
    shown = authority.issue(Identity("worker", 1))
    door, place = door_of(there, credentials=shown)
    with closing(door):
        use(place, credentials=authority.issue(Identity("worker", 2)))
        assert here[39]["n"] == 39
        strangers = [
            {"token": "u", "credentials": authority.issue(Identity("worker", 2))},
            {"credentials": Authority().issue(Identity("worker", 2))},
            {"credentials": authority.issue(Identity("client"))},
            {"credentials": None},
        ]
        for stranger in strangers:
            use(place, **stranger)
            with pytest.raises(DataError, match=r"3.arrow is not in .* no host of the run"):
                here[39]
        assert door.samples == 1
    with socket.create_server(("127.0.0.1", 0)) as other:  # another program
        use(place.__class__(1, "b", *other.getsockname(), place.holdings), credentials=shown)
        monkeypatch.setattr(peers, "CONNECT_S", 0.2)
        with pytest.raises(DataError, match=r"no host of the run that answers has it"):
            here[39]


@pytest.mark.parametrize("size", [1 << 62, -8])
def test_rows_that_no_memory_can_hold_are_refused_before_they_come(size):
    column = Column(name="t", kind="bytes")
    answer = sent_rows.RowsAnswer(sizes=[(size, 16)])
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PeerError, match=f"{size:,} bytes are announced, for which"):
        sent_rows.receive_views(ours, answer, [column], 1)


def test_a_copy_stands_in_for_a_lost_host_and_then_the_source(disks, monkeypatch):
    monkeypatch.setattr(peers, "PAUSES_S", ())
    monkeypatch.setenv("INSTEP_CACHE", str(disks / "cache"))
    here, there = Shards(disks / "a"), Shards(disks / "b")
    lost, gone = door_of(there)
    copy, place = door_of(there)
    use(gone, place)
    lost.close()
    assert here[30]["n"] == 30
    assert copy.samples == 1
    copy.close()
    peers.present.close()  # its connection was open
    with pytest.raises(DataError, match=r"3.arrow is not in .* source"):
        here[31]
    (disks / "all").mkdir()
    written(disks / "all", SAMPLES, CUTS)
    source = Remote((disks / "all").as_uri())
    assert Shards(disks / "a", source=source)[31]["n"] == 31


def test_a_file_of_another_size_is_refused_rather_than_read_elsewhere(disks):
    (disks / "a" / "0.arrow").write_bytes(b"short")
    with pytest.raises(DataError, match=r"0.arrow has 5 bytes, but"):
        _ = Shards(disks / "a").held


def test_a_board_is_read_whole():
    board, doors = Board(), [PeerDoor(n, "h", "127.0.0.1", n, []) for n in range(50)]
    assert board.read() == []
    board.write(doors)
    assert board.read() == doors
    board.write(doors[:1])
    assert board.read() == doors[:1]


def test_numbers_of_a_shard_stand_in_bits():
    holding = HeldShards("x", "f", b"\x01\x80")
    assert [n for n in range(20) if holding.has(n)] == [0, 15]
    assert len(numbered(3)) == 3
