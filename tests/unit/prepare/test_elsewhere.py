"""Raw files at URLs: the samples of the local file, whatever the server does on the way."""

import http.server
import json
import os
import resource
import shutil
import threading
from collections import Counter
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from test_prepare import ask, made

from instep.data.shards.urls import download, elsewhere, in_use, remote
from instep.errors import DataError, InstepError, RunError, SpecError
from instep.prepare.prepare import prepare
from lazily import needs

pytestmark = needs("aiohttp")

ROWS = [{"x": number, "text": f"word {number}"} for number in range(300)]
NAMES = ["a.jsonl", "b.csv", "c.parquet"]


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves files of a folder with an ETag; each request has a number that decides its fault."""

    def do_GET(self):
        self.server.asked[f"{self.command} {self.name}"] += 1
        fault = self.server.faults(self.command, sum(self.server.asked.values()))
        path = Path("served", self.name)
        if fault == "503" or not path.is_file():
            self.send_error(503 if fault else 404)
            return
        if fault == "stall":
            self.server.ended.wait()
            return
        data = path.read_bytes()
        self.send_response(200)
        longer = fault == "wrong length" or (fault == "wrong HEAD" and self.command == "HEAD")
        length = len(data) + (7 if longer else 0)
        self.send_header("Content-Length", str(length))
        etag = self.server.etags.get(self.name, "1")
        if fault == "always new":
            etag = str(sum(self.server.asked.values()))
        if etag is not None:
            self.send_header("ETag", f'"{etag}{"x" if fault == "new ETag" else ""}"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)

    do_HEAD = do_GET

    @property
    def name(self):
        return self.path.partition("?")[0].lstrip("/")

    def log_message(self, *_):
        pass


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """A server of the folder `served`, on this machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(remote.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    Path("served").mkdir()
    Path("served/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    Path("served/b.csv").write_text("x,text\n" + "".join(f"{r['x']},{r['text']}\n" for r in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS), "served/c.parquet")
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.asked, server.faults, server.etags = Counter(), lambda *_: "", {}
    server.ended, server.url = threading.Event(), f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.ended.set()
    server.shutdown()
    thread.join()
    server.server_close()
    while in_use._uses:
        in_use._uses.popitem()[1].close()


def sha256_of(*sources, to="out"):
    return made(ask(sources=list(sources), to=to))[0].sha256


def of_files():
    return sha256_of(*(f"served/{name}" for name in NAMES), to="local")


@pytest.mark.parametrize("fault", ["", "503", "stall", "cut", "wrong length", "new ETag"])
def test_samples_of_urls_are_those_of_the_files_whatever_the_server_does(serve, monkeypatch, fault):
    if fault == "stall":
        monkeypatch.setattr(
            download, "STALL_S", 2.0
        )  # of attempts that are answered, many are left
    serve.faults = lambda _, number: fault if number in (2, 4, 9) else ""
    assert sha256_of(*(f"{serve.url}/{name}" for name in NAMES)) == of_files()
    assert not list(Path("cache").rglob(".[!.]*[!k]"))  # but locks


def test_what_is_unchanged_is_not_read_again_and_what_is_new_is(serve):
    asked = ask(sources=[f"{serve.url}/a.jsonl?signature=secret"])
    manifest, job, _ = made(asked)
    (source,) = manifest.sources
    assert (source.path, source.version) == (f"{serve.url}/a.jsonl", 'ETag: "1"')
    assert "secret" not in Path("out/manifest.json").read_text()
    assert made(asked)[1].done_before == job.tasks
    assert serve.asked["GET a.jsonl"] == 1
    Path("served/a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:7]))
    serve.etags["a.jsonl"] = "2"
    assert made(asked)[0].sha256 == sha256_of("served/a.jsonl", to="local")


def test_threads_that_want_one_file_read_it_once(serve):
    def want():
        found.append(elsewhere.copies_of([f"{serve.url}/b.csv"]))

    found = []
    threads = [threading.Thread(target=want) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 8
    assert serve.asked["GET b.csv"] == 1
    assert {copies[0].path.read_bytes() for copies in found} == {Path("served/b.csv").read_bytes()}


def test_copies_that_nobody_uses_go_and_those_in_use_stay(serve, monkeypatch):
    monkeypatch.setenv(remote.GIGABYTES, "0")
    (first,) = elsewhere.copies_of([f"{serve.url}/a.jsonl"])
    others = dict(in_use._uses)  # as of another process
    in_use._uses.clear()
    (second,) = elsewhere.copies_of([f"{serve.url}/b.csv"])
    assert first.path.exists()
    others.popitem()[1].close()
    elsewhere.copies_of([f"{serve.url}/c.parquet"])
    assert not first.path.exists()
    assert second.path.exists()
    left = sorted(path.name for path in Path("cache/sources").glob(".*"))
    assert len([name for name in left if name.startswith(".used-")]) == 1
    assert len(left) == 4  # and the locks of both copies, and of all


def test_many_files_at_urls_need_few_open_files(serve):
    before = len(os.listdir("/proc/self/fd"))
    for number in range(40):
        Path(f"served/{number}.csv").write_text(f"x\n{number}\n")
    assert len(elsewhere.copies_of([f"{serve.url}/{number}.csv" for number in range(40)])) == 40
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_copy_that_was_removed_while_it_is_in_use_is_fetched_again(serve):
    """Also by the process that uses it."""
    (copy,) = elsewhere.copies_of([f"{serve.url}/a.jsonl"])
    others = dict(in_use._uses)
    in_use._uses.clear()
    for _ in range(2):
        shutil.rmtree(Path(*copy.path.relative_to(Path.cwd()).parts[:3]))
        assert elsewhere.copies_of([f"{serve.url}/a.jsonl"]) == [copy]
        assert copy.path.exists()
    others.popitem()[1].close()


@pytest.mark.parametrize("damage", ["cut", "a changed digit", "removed"])
@pytest.mark.parametrize("together", [False, True])
def test_a_copy_that_somebody_has_changed_is_fetched_again(serve, damage, together):
    url = f"{serve.url}/a.jsonl"

    def copy(version=""):
        if together:
            return elsewhere.side_by_side(url, lambda _: [url], version)
        return elsewhere.copies_of([url])[0].path, ""

    (path, version), wanted = copy(), Path("served/a.jsonl").read_bytes()
    if damage == "removed":
        path.unlink()
    else:
        path.write_bytes(wanted[:50] if damage == "cut" else wanted.replace(b"1", b"2", 1))
    assert copy(version) == (path, version)
    assert path.read_bytes() == wanted


def test_a_full_disk_of_this_machine_is_named_at_once(serve):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RunError, match=r"cache .*sources cannot be written: File too large\."):
            elsewhere.copies_of([f"{serve.url}/a.jsonl"])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert serve.asked["GET a.jsonl"] == 1


def test_a_file_whose_versions_cannot_be_told_apart_is_refused(serve):
    serve.etags["a.jsonl"] = None
    with pytest.raises(SpecError, match=r"neither an ETag nor when it was changed\. Copy it to a"):
        elsewhere.copies_of([f"{serve.url}/a.jsonl"])


def test_files_of_another_file_system_are_found_by_a_pattern(serve):
    memory = fsspec.filesystem("memory")
    for name in NAMES[:2]:
        memory.pipe(f"/raw/{name}", Path("served", name).read_bytes())
    try:
        given = sha256_of("memory://raw/*")
        assert given == sha256_of(*(f"served/{name}" for name in NAMES[:2]), to="local")
        with pytest.raises(SpecError, match=r"memory://raw is a folder\. Name its files, as"):
            sha256_of("memory://raw")
    finally:
        memory.rm("/raw", recursive=True)


@pytest.mark.parametrize(
    ("source", "fault", "error", "said"),
    [
        ("{}/no.csv", "", SpecError, "names no file. Compare its name"),
        ("http://127.0.0.1:1/a.csv", "", DataError, "tried 7 times. See that this machine"),
        ("{}/a.jsonl", "503", DataError, "503.* tried 7 times. See that this machine reaches"),
        ("{}/a.jsonl", "wrong HEAD", DataError, "bytes came, and it has .* tried 7 times"),
        ("{}/a.jsonl", "always new", DataError, "has changed each time while it was read. Leave"),
        ("nosuch://a/b.csv", "", SpecError, "nosuch://a/b.csv cannot be read: Protocol not known"),
    ],
)
def test_a_source_that_cannot_be_read_is_one_sentence(serve, source, fault, error, said):
    serve.faults = lambda *_: fault
    with pytest.raises(error, match=said):
        sha256_of(source.format(serve.url))


def test_shards_are_made_on_this_machine_only(serve):
    with pytest.raises(InstepError, match="--to memory://out: shards are made in a folder of this"):
        prepare(ask(sources=["served/a.jsonl"], to="memory://out"), print)
