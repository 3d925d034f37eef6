"""Shards on a server that fails now and then: every sample is right, each file is loaded once."""

import http.server
import json
import multiprocessing
import os
import resource
import shutil
import threading
import zlib
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from unittest import mock

import msgspec
import numpy as np
import pytest
from test_data_shards import written

from instep.data.loader import Loader, Slice
from instep.data.shards.manifest import Shard, write_manifest
from instep.data.shards.urls import download, remote, room
from instep.data.sources import shards
from instep.errors import DataError, RunError, SpecError
from instep.job.file import absolute, build
from instep.plain_file import crc32_of
from instep.worker.reading.dataset_check import _absolute
from lazily import needs

pytestmark = [pytest.mark.process, needs("aiohttp")]

SAMPLES = 400


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files; each request has a number, and `faults` says what happens to some."""

    def do_GET(self):
        name = Path(self.path).name
        self.server.asked[name] += 1
        number = sum(self.server.asked.values())
        fault = self.server.faults(number) if name.endswith(".arrow") else ""
        if any(name.endswith(end) for end in self.server.silent):
            self.server.silent.clear()
            fault = "stall"
        if fault == "503":
            self.send_error(503)
            return
        if fault == "stall":
            self.server.ended.wait()
            return
        data = (self.server.folder / name).read_bytes() if self._has(name) else None
        if data is None:
            self.send_error(404)
            return
        sent = {"cut": data[:-9], "changed": data[:-30] + bytes([data[-30] ^ 1]) + data[-29:]}
        data, length = sent.get(fault, data), len(data)
        self.send_response(200)
        self.send_header("Content-Length", str(length + (fault == "longer")))
        self.end_headers()
        self.wfile.write(data)

    def _has(self, name):
        return self.path.startswith("/served/") and (self.server.folder / name).is_file()

    def do_HEAD(self):
        name = Path(self.path).name
        self.send_response(200 if self._has(name) else 404)
        size = (self.server.folder / name).stat().st_size if self._has(name) else 0
        self.send_header("Content-Length", str(size))
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A folder of eight shards, and a server of it."""
    folder = tmp_path / "served"
    folder.mkdir()
    samples = [{"n": i, "x": np.full(200, i, np.float32)} for i in range(SAMPLES)]
    manifest = written(folder, samples, [50 * i for i in range(1, 8)])
    kept = [Shard(s.file, s.samples, s.bytes, crc32_of(folder / s.file)) for s in manifest.shards]
    write_manifest(folder, type(manifest)(**{**_fields(manifest), "shards": kept}))
    monkeypatch.setenv(remote.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.folder, server.asked, server.faults = folder, Counter(), lambda _: ""
    server.ended, server.silent = threading.Event(), []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()


def _fields(manifest):
    return {name: getattr(manifest, name) for name in manifest.__struct_fields__}


def url(server):
    return f"http://127.0.0.1:{server.server_port}/served"


def read(where, cache, limit, seed):
    """How many samples are wrong, of all in a random order; in whatever process."""
    os.environ[remote.CACHE], download.PAUSES_S = str(cache), (0.0,) * 6
    dataset = shards(where, cache=limit)
    wrong = 0
    for index in np.random.default_rng(seed).permutation(SAMPLES).tolist():
        sample = dataset[index]
        wrong += int(sample["n"]) != index or sample["x"].tolist() != [index] * 200
    return wrong


FAULTS = ("503", "cut", "changed", "longer")


def test_processes_that_read_at_once_get_what_was_written_whatever_the_server_does(serve, tmp_path):
    serve.faults = lambda number: FAULTS[number // 3 % 4] if number % 3 == 0 else ""
    one = max(path.stat().st_size for path in serve.folder.glob("*.arrow"))
    forks = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(3, mp_context=forks) as pool:
        assert sum(pool.map(partial(read, url(serve), tmp_path / "cache", 3 * one), range(3))) == 0
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.arrow"))
    assert kept <= 4 * one


def read_files(where, cache, limit, seed):
    """How many whole files are wrong, of 340 that four threads of whatever process read."""
    os.environ[remote.CACHE], download.PAUSES_S = str(cache), (0.0,) * 6
    files = remote.Remote(where, limit)
    shards = json.loads(files.small("manifest.json"))["shards"]

    def wrong(number):
        shard = msgspec.convert(shards[number], Shard)
        while True:
            path = files.path(shard)
            try:
                return zlib.crc32(path.read_bytes()) != shard.crc32
            except FileNotFoundError:  # another reader has made room
                continue

    with ThreadPoolExecutor(4) as pool:
        return sum(pool.map(wrong, np.random.default_rng(seed).integers(0, 8, 340).tolist()))


@pytest.mark.tail
def test_no_file_of_a_thousand_is_wrong_where_processes_and_threads_share_a_small_cache(
    serve, tmp_path
):
    serve.faults = lambda number: FAULTS[number // 20 % 4] if number % 20 == 0 else ""
    one = max(path.stat().st_size for path in serve.folder.glob("*.arrow"))
    one_cache = partial(read_files, url(serve), tmp_path / "cache", 4 * one)
    with ProcessPoolExecutor(3, mp_context=multiprocessing.get_context("forkserver")) as pool:
        assert sum(pool.map(one_cache, range(3))) == 0
    kept = sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.arrow"))
    assert kept <= 5 * one


def test_each_file_is_loaded_once_for_all_of_a_host(serve, tmp_path):
    def loaded():
        return {name: n for name, n in serve.asked.items() if name.endswith(".arrow")}

    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as pool:
        assert sum(pool.map(partial(read, url(serve), tmp_path / "cache", 10**9), range(2))) == 0
    of_two = loaded()
    assert read(url(serve), tmp_path / "cache", 10**9, 7) == 0
    assert loaded() == of_two
    serve.asked.clear()
    assert read(url(serve), tmp_path / "another", 10**9, 7) == 0
    assert loaded() == of_two  # as many requests as one process alone makes


@pytest.mark.parametrize("name", ["0.arrow", "manifest.json"])
def test_a_server_that_falls_silent_is_given_up_and_asked_again(serve, tmp_path, monkeypatch, name):
    monkeypatch.setattr(download, "STALL_S", 2.0)  # of attempts that are answered, seven are left
    (tmp_path / "cache" / "shards").mkdir(parents=True)
    serve.silent = [name]
    assert read(url(serve), tmp_path / "cache", 10**9, 0) == 0
    assert serve.silent == []


def test_a_server_that_stays_silent_is_named(serve, monkeypatch):
    dataset = shards(url(serve))  # reads the manifest while the server still answers
    monkeypatch.setattr(download, "STALL_S", 0.05)
    serve.faults = lambda _: "stall"
    with pytest.raises(
        DataError, match=r"0\.arrow cannot be read: nothing came for 0\.05 s.*7 times"
    ):
        dataset[0]


def test_what_a_killed_process_has_left_of_a_download_is_removed(serve, tmp_path):
    dataset = shards(url(serve))
    dataset[0]
    (whole,) = (tmp_path / "cache").rglob("*-*.arrow")
    left = whole.with_name(f".{whole.name}.1a2b3c4d")
    left.write_bytes(b"half of it")
    whole.unlink()
    assert int(shards(url(serve))[0]["n"]) == 0
    assert not left.exists()


def test_what_has_happened_to_the_cache_is_seen_and_loaded_again(serve, tmp_path):
    def flipped(path):
        good = path.read_bytes()
        path.write_bytes(good[:900] + bytes([good[900] ^ 1]) + good[901:])

    def cut(path):
        os.truncate(path, 700)

    def gone(_):
        shutil.rmtree(tmp_path / "cache")

    def touched(path):
        os.utime(path)

    dataset = shards(url(serve), columns=["n", "x"])
    (shard, *_), count = dataset.manifest.shards, Counter()
    for happens in (touched, flipped, cut, gone, touched):
        path = dataset._remote.path(shard)
        asked = serve.asked[shard.file]
        happens(path)
        assert read(url(serve), tmp_path / "cache", 10**9, 0) == 0
        count[happens] += serve.asked[shard.file] - asked
        assert crc32_of(path) == shard.crc32
    once = count.pop(gone)
    assert count == {touched: 0, flipped: once, cut: once}
    assert once > 0


def test_a_cache_that_is_removed_or_too_small_for_one_file_is_of_no_consequence(serve, tmp_path):
    def removes(_):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        return 0

    with ThreadPoolExecutor(4) as pool:
        reads = pool.map(partial(read, url(serve), tmp_path / "cache", 0), range(3))
        pool.map(removes, range(30))
        assert sum(reads) == 0


def test_a_cache_that_is_removed_at_the_end_of_a_download_is_filled_again(
    serve, tmp_path, monkeypatch
):
    calls, make_room = [], room.CacheRoom._make_room

    def removes(self, wanted, limit):
        calls.append(wanted)
        if len(calls) == 2:  # the first is before the download
            shutil.rmtree(tmp_path / "cache")
        return make_room(self, wanted, limit)

    monkeypatch.setattr(room.CacheRoom, "_make_room", removes)
    assert read(url(serve), tmp_path / "cache", 0, 0) == 0
    assert len(calls) > 4


def test_a_job_says_where_the_cache_is_and_how_large(serve, tmp_path):
    job = build(
        {"name": "a", "recipe": "a.py:b", "data": {"cache": "mine", "cache_gb": 0.5}}, source="job"
    )
    job = absolute(job, tmp_path)
    with mock.patch.dict(os.environ):
        remote.use_cache(job.data.cache, job.data.cache_gb)
        dataset = shards(url(serve))
        assert dataset._remote.limit == 500_000_000
        assert int(dataset[0]["n"]) == 0
        remote.use_cache("", None)  # as a job that does not say
        assert shards(url(serve), cache=7)._remote.limit == 7
        assert remote.cache() == tmp_path / "mine"
    assert list((tmp_path / "mine").rglob("*.arrow"))
    assert shards(url(serve))._remote.limit == 20 * 10**9
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written_is_named_at_once(serve, tmp_path):
    dataset, limits = shards(url(serve)), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        said = r"^the cache .* File too large\. Free some .*INSTEP_CACHE to another folder\.$"
        with pytest.raises(RunError, match=said):
            dataset[0]
        with (
            pytest.raises(RunError, match=said),  # which is no sample that cannot be read
            closing(Loader(dataset, seed=1, shuffle=False, unreadable="skip")) as loader,
        ):
            list(loader.read([Slice(0, 0, 2)]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [path for path in (tmp_path / "cache").rglob("*.arrow*") if path.stat().st_size]


def test_a_file_that_is_another_one_for_good_is_named(serve):
    serve.faults = lambda _: "changed"
    with pytest.raises(DataError, match=r"0\.arrow cannot be read: it has .* tried 7 times"):
        shards(url(serve))[0]


def test_no_message_has_the_password_of_a_url(serve):
    secret = url(serve).replace("http://", "http://me:word@") + "?token=word"
    with pytest.raises(DataError) as caught:
        shards(secret.replace("/served", "/other/none"))
    assert "word" not in str(caught.value)
    dataset = shards(url(serve).replace("http://", "http://me:word@"))
    assert _absolute(dataset) == url(serve)
    serve.faults = lambda _: "503"
    with pytest.raises(DataError) as caught:
        dataset[0]
    assert "word" not in str(caught.value)


def test_a_source_may_have_a_space_in_its_name(serve, tmp_path):
    (tmp_path / "empty").mkdir()
    source = serve.folder.rename(tmp_path / "my data #1")
    assert int(shards(tmp_path / "empty", source=source)[399]["n"]) == 399


def test_what_is_not_there_or_cannot_be_asked_is_one_sentence(serve):
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        shards(url(serve).replace("/served", "/other/none"))
    with pytest.raises(SpecError, match="nosuch://a cannot be read"):
        shards("nosuch://a")
