"""Workers on hosts make the same shards, wherever files lie, and whatever is killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from instep.errors import PeerError
from instep.prepare.messages import Done, Get, Got, Look, Part, Sent
from instep.prepare.workers.files import PART, Arrivals, RawFiles, Shelf, parts_of
from unit.prepare.test_prepare_processes import FUNCTIONS, SLOW, assert_undisturbed, until

KEY = "0" * 24


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """Raw files and functions, in folders of their own."""
    monkeypatch.chdir(tmp_path)
    Path("clean.py").write_text(FUNCTIONS)
    Path("slow.py").write_text(SLOW)
    lines = [json.dumps({"id": i, "name": "x" * 40}) for i in range(60_000)]
    Path("a.jsonl").write_text("\n".join(lines))
    return tmp_path


def apart(folder: Path, number: int) -> str:
    """Runs a command on a machine that has neither the raw file nor the folder of shards."""
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("other disks need root and unshare")
    script = folder / f"host-{number}.sh"
    script.write_text(
        "#!/bin/sh\nexec unshare -m sh -c 'mount --make-rprivate /; "
        f"mount -t tmpfs none {folder}/out; mount --bind /dev/null {folder}/a.jsonl; "
        'exec "$@"\' sh "$@"\n'
    )
    script.chmod(0o755)
    return str(script)


def start(hosts: list[str], address: str = "127.0.0.1") -> subprocess.Popen:
    """The command, with a worker on each host."""
    words = ["prepare", "a.jsonl", "--to", "out", "--map", "slow.py:record", "--on", "hosts"]
    changes = [f"launch.hosts={json.dumps(hosts)}", f"launch.address={address}"]
    options = [word for change in changes for word in ("--set", change)]
    command = [sys.executable, "-m", "instep", *words, "--workers", str(len(hosts)), "--json"]
    return subprocess.Popen(command + options, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def hosts_of(command: subprocess.Popen) -> list[psutil.Process]:
    """Its hosts; a worker that a host has just forked has its name, and its words."""
    found = []
    for child in psutil.Process(command.pid).children():
        try:
            if (
                "instep.prepare.workers.host" in child.cmdline()
                and child.name() == "instep-prep-hos"
            ):
                found.append(child)
        except psutil.Error:
            pass
    return found


def finished(command: subprocess.Popen) -> dict:
    out, err = command.communicate()
    assert command.returncode == 0, err.decode()
    return json.loads(out.splitlines()[-1])


@pytest.mark.process
@pytest.mark.parametrize("disks", ["shared", pytest.param("apart", marks=pytest.mark.tail)])
def test_hosts_and_workers_that_are_killed_or_stopped_come_back(raw, disks):
    hosts = ["env HOST=1", "env HOST=2"] if disks == "shared" else [apart(raw, n) for n in (1, 2)]
    Path("gate").touch()  # somebody waits at the record in the middle
    Path("out").mkdir()
    command = start(hosts)
    until(lambda: len(list(Path("out/.preparing").glob("*.done"))) >= 2)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        until(lambda: len(hosts_of(command)) == 2)
        before = {host.pid for host in hosts_of(command)}
        for pid in before:
            os.kill(pid, number)
        until(lambda before=before: not before & {host.pid for host in hosts_of(command)})
    until(lambda: any(host.children() for host in hosts_of(command)))
    next(c for host in hosts_of(command) for c in host.children()).kill()
    Path("gate").unlink()
    summary = finished(command)
    assert summary["workers_lost"] >= 3
    assert_undisturbed(summary["sha256"])


def elsewhere(away: Path):
    """What a host asks of a master that has another file at each path: that in a folder."""
    shelf = Shelf([str(path) for path in away.iterdir()])

    def ask(question):
        moved = str(away / Path(question.path).name)
        return shelf.answer(type(question)(moved, *list_of(question)[1:]))

    return ask


def list_of(message) -> list:
    return [getattr(message, name) for name in message.__struct_fields__]


@pytest.mark.parametrize("size", [0, 10, 200_000])
def test_a_raw_file_that_only_the_master_has_is_read_as_the_file_is(tmp_path, size):
    (tmp_path / "away").mkdir()
    data = os.urandom(size)
    (tmp_path / "away" / "a").write_bytes(data)
    found = RawFiles(elsewhere(tmp_path / "away")).find(str(tmp_path / "a"))
    assert found.bytes == size
    with found.open() as file:
        for place in (0, size // 3, max(0, size - 5), size):
            file.seek(place)
            assert file.read(70_000) == data[place : place + 70_000]
        file.seek(-(size // 2), os.SEEK_END)
        assert file.read() == data[size - size // 2 :]


def test_a_file_is_read_by_path_where_it_is_the_same_and_only_there(tmp_path):
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "a").write_text("a" * 100)
    ask = elsewhere(tmp_path / "away")
    shutil.copy2(tmp_path / "away" / "a", tmp_path / "a")
    assert RawFiles(ask).find(str(tmp_path / "a")) is None
    about = os.stat(tmp_path / "a")
    (tmp_path / "a").write_text("a" * 99 + "b")  # of the same size, at the same time
    os.utime(tmp_path / "a", ns=(about.st_atime_ns, about.st_mtime_ns))
    assert RawFiles(ask).find(str(tmp_path / "a")) is not None


def test_a_master_gives_nothing_but_its_sources(tmp_path):
    (tmp_path / "secret").write_text("s")
    shelf = Shelf([str(tmp_path / "a")])
    for name in ("secret", "a"):  # the second is not there
        assert not shelf.answer(Look(str(tmp_path / name))).digest
        assert shelf.answer(Get(str(tmp_path / name), 0, 1)) == Got(b"")


def results(folder: Path) -> list[Part | Sent]:
    """A result of two files, on its way."""
    (folder / "from").mkdir()
    (folder / "to").mkdir()
    (folder / "from" / f"{KEY}.arrow").write_bytes(os.urandom(PART + 10))
    (folder / "from" / f"{KEY}.done").write_bytes(b"{}")
    return list(parts_of(folder / "from", KEY))


def test_a_result_arrives_as_it_was_and_is_gone_where_it_was_made(tmp_path):
    sent = results(tmp_path)
    assert [m.name for m in sent if isinstance(m, Sent)] == [f"{KEY}.arrow", f"{KEY}.done"]
    data = b"".join(m.data for m in sent[:2])
    arrivals = Arrivals(tmp_path / "to", "1")
    for message in sent:
        arrivals.take(message)
    arrivals.discard()
    assert (tmp_path / "to" / f"{KEY}.arrow").read_bytes() == data
    assert sorted(p.name for p in (tmp_path / "to").iterdir()) == [f"{KEY}.arrow", f"{KEY}.done"]
    assert not list((tmp_path / "from").iterdir())
    value = {"key": KEY, "samples": 3, "parts": [{"file": "/there/else", "first": 0, "samples": 3}]}
    moved = arrivals.moved(Done(1, value, f"/there/{KEY}.again"))
    assert moved.value["parts"][0]["file"] == str(tmp_path / "to" / f"{KEY}.arrow")
    assert moved.again == str(tmp_path / "to" / f"{KEY}.again")


@pytest.mark.parametrize("damage", ["lost", "changed", "name"])
def test_nothing_that_was_damaged_on_the_way_counts(tmp_path, damage):
    sent = results(tmp_path)
    if damage == "lost":
        del sent[1]
    if damage == "changed":
        sent[1] = Part(bytes([sent[1].data[0] ^ 1]) + sent[1].data[1:])
    if damage == "name":
        sent[2] = Sent("../a.arrow", sent[2].bytes, sent[2].crc32)
    arrivals = Arrivals(tmp_path / "to", "1")
    with pytest.raises(PeerError):
        list(map(arrivals.take, sent))
    arrivals.discard()
    assert not list((tmp_path / "to").iterdir())
