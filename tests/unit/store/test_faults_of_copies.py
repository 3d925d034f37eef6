"""Objects that are copied and restored where attempts hang, disks are full, and stores are away."""

import io
import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import pytest
from fsspec.spec import AbstractFileSystem
from test_copies import Run, step_in

from instep.client.copying import check_not_elsewhere
from instep.data.shards.urls import download
from instep.data.shards.urls.elsewhere import copies_of
from instep.data.shards.urls.remote import CACHE
from instep.errors import DataError, RunError, SpecError
from instep.store.copies import objects
from instep.store.copies.restore import restore, runs_called
from loopback_store import LeapingClock, Store, installed

LONG_S = 60.0
"""Against hangs only."""


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    installed(tmp_path)
    store = Store()
    yield store
    store.close()


class Hanging(AbstractFileSystem):
    """Keeps objects; hangs once in the call of the name `hangs`, until it is released."""

    protocol = "hanging"
    hangs, stalls = "", 0

    def _open(self, path, mode="rb", **_):
        self.hang("open")
        return _Written(path)

    @classmethod
    def hang(cls, where, most_s=None):
        if cls.hangs == where:
            cls.hangs, cls.stalls = "", cls.stalls + 1
            cls.released.wait(most_s)

    def info(self, path, **_):
        return {"name": path, "size": len(self.objects[self._strip_protocol(path)])}


class _Written(io.BytesIO):
    def __init__(self, path):
        super().__init__()
        self._path = path

    def write(self, data):
        Hanging.hang("write")
        return super().write(data)

    def close(self):
        if not self.closed:
            Hanging.hang("close", 0.3)
            Hanging.objects[self._path] = self.getvalue()
            super().close()


@pytest.fixture
def hanging(monkeypatch):
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    monkeypatch.setattr(Hanging, "objects", {}, raising=False)
    monkeypatch.setattr(Hanging, "released", threading.Event(), raising=False)
    monkeypatch.setattr(Hanging, "hangs", "")
    LeapingClock(Hanging, monkeypatch)
    yield
    Hanging.released.set()


def ended(threads_before):
    for each in set(threading.enumerate()) - threads_before:
        each.join(LONG_S)
        assert not each.is_alive()


def test_a_large_file_of_which_nothing_moves_is_given_up_as_soon_as_a_small_one(
    hanging, monkeypatch
):
    monkeypatch.setattr(objects, "SLOW", 1e-6)  # else years would be left
    Hanging.hangs = "write"
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(objects.Objects("hanging://a").send, "b", b"bytes", 5)
        try:
            with pytest.raises(download.WrongBytes, match="nothing came for 60 s"):
                sent.result(LONG_S)
        finally:
            Hanging.released.set()


def test_the_end_of_a_large_file_has_the_time_that_a_slow_file_system_takes(hanging, monkeypatch):
    monkeypatch.setattr(objects, "SLOW", 1e-6)
    Hanging.hangs = "close"
    objects.Objects("hanging://a").send("b", b"bytes", 5)
    assert Hanging.objects == {"a/b": b"bytes"}


def test_an_attempt_that_comes_back_late_writes_no_bytes_of_another_file(hanging, tmp_path):
    Hanging.hangs = "open"
    (tmp_path / "right").write_bytes(b"right")
    (tmp_path / "other").write_bytes(b"other")
    there, before = objects.Objects("hanging://a"), set(threading.enumerate())
    with open(tmp_path / "right", "rb") as right:
        with pytest.raises(download.WrongBytes):
            there.send("b", right, 5)
        number = right.fileno()
    with open(tmp_path / "other", "rb") as other:
        assert other.fileno() == number
        Hanging.released.set()
        ended(before)
    assert set(Hanging.objects.values()) == {b"right"}


def full(path, *_, **__):
    return open("/dev/full", "wb", buffering=0)


def test_a_disk_that_is_full_is_named_and_nothing_is_brought_again(store, tmp_path, monkeypatch):
    run = Run(tmp_path, store.loop)
    for step in (10, 20):
        run.save(step)
        assert not run.copy()
    store.objects["raw/a.csv"] = b"x\n1\n"
    monkeypatch.setattr(download, "open", full, raising=False)
    store.asked.clear()
    with pytest.raises(RunError, match=r"new cannot be written: No space left on device. Make"):
        restore(run.url, tmp_path / "new", print)
    with pytest.raises(RunError, match=r"cache .* cannot be written: No space left on device"):
        copies_of([f"{store.loop}/raw/a.csv"])
    asked = {name: n for name, n in store.asked.items() if name.endswith((".safetensors", ".csv"))}
    assert [n for name, n in asked.items() if "safetensors" in name] == [1]
    assert asked["GET raw/a.csv"] == 1
    assert not list(tmp_path.glob(".new*"))


def test_a_folder_is_restored_by_one_process_at_a_time(store, tmp_path):
    run, second = Run(tmp_path, store.loop), []
    for step in (10, 20):
        run.save(step)
        assert not run.copy()

    def another(method, name):
        store.after = lambda *_: None
        try:
            restore(run.url, tmp_path / "new", print)
        except Exception as error:
            second.append(error)

    store.after = lambda method, name: "model" in name and another(method, name)
    assert step_in(restore(run.url, tmp_path / "new", print)) == 20
    (error,) = second
    assert isinstance(error, RunError)
    assert "is being restored by another process" in str(error)
    assert not list(tmp_path.glob(".new*"))


def test_an_attempt_to_bring_an_object_that_comes_back_late_changes_nothing(
    store, tmp_path, monkeypatch
):
    run, released = Run(tmp_path, store.loop), threading.Event()
    run.save(10)
    assert not run.copy()
    hung, chunks = [], download.chunks

    def first_hangs(files, url):
        if "model" in url and not hung:
            hung.append(url)
            yield b"other bytes"
            store.stalls += 1
            released.wait()
        yield from chunks(files, url)

    monkeypatch.setattr(download, "chunks", first_hangs)
    LeapingClock(store, monkeypatch)
    before = set(threading.enumerate())
    folder = restore(run.url, tmp_path / "new", print)
    names = sorted(folder.rglob("*"))
    released.set()
    ended(before)
    assert hung
    assert step_in(folder) == 10
    assert sorted(folder.rglob("*")) == names
    assert not list(folder.rglob(".*"))


class Away(Exception):
    """What paramiko and ftplib raise is no OSError either."""


class Connecting(AbstractFileSystem):
    """Connects when it is made, as SFTP and FTP do."""

    protocol = "connecting"

    def __init__(self, **options):
        super().__init__(**options)
        raise Away("the host does not answer")


def test_a_store_that_connects_at_once_and_is_away_is_a_sentence_and_no_end_of_a_run(
    store, tmp_path
):
    fsspec.register_implementation("connecting", Connecting, clobber=True)
    objects.check_url("connecting://a/runs")
    with pytest.raises(SpecError, match=r"checkpoint\.copy_to: nothing://a cannot be read"):
        objects.check_url("nothing://a")
    run = Run(tmp_path, "connecting://a/runs")
    run.save(10)
    assert run.copy()
    assert "the host does not answer" in run.told[0][1]["text"]
    for asked in (
        lambda: restore("connecting://a/net", tmp_path / "new", print),
        lambda: copies_of(["connecting://a/b.csv"]),
        lambda: copies_of(["connecting://a/*.csv"]),
        lambda: runs_called("net", "connecting://a"),
    ):
        with pytest.raises(DataError, match=r"the host does not answer\. It was tried 7 times"):
            asked()


def test_a_run_that_is_to_be_continued_and_lies_elsewhere_is_not_begun_anew(store, tmp_path):
    run = Run(tmp_path, f"{store.loop}/runs")
    check_not_elsewhere(run.job, tmp_path / "new")
    run.save(10)
    assert not run.copy()
    with pytest.raises(RunError, match=rf"instep resume {run.url} --to .*/new/net, which"):
        check_not_elsewhere(run.job, tmp_path / "new")
    store.faults = lambda *_: "503"
    with pytest.raises(DataError, match=r"cannot be known: .* leave resume=True out"):
        check_not_elsewhere(run.job, tmp_path / "new")
