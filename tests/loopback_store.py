"""An object store on this machine, whose requests fail on demand, and its fsspec file system.

`Store` serves objects in memory over HTTP; `LoopbackFiles` is what fsspec knows as `loop://`, in
each process that has the folder of `installed` on its PYTHONPATH. Objects are there as a whole or
not at all, as in S3; nothing renames one.
"""

import hashlib
import http.client
import http.server
import io
import json
import threading
import time
from collections import Counter
from concurrent.futures import wait
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import quote, unquote

import fsspec
from fsspec.spec import AbstractFileSystem

from instep.data.shards.urls import download


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        store, name = self.server.store, unquote(self.path.lstrip("/"))
        length = int(self.headers.get("Content-Length") or 0)
        fault = store.next_fault(self.command, name)
        if fault == "stall":
            store.ended.wait()
        body = self.rfile.read(length if fault != "cut" or self.command != "PUT" else length // 2)
        if fault == "stall" or (fault == "cut" and self.command == "PUT"):
            self.close_connection = True
            return
        if fault in ("403", "503"):
            self.send_error(int(fault))
            return
        found = store.do(self.command, name, body) if fault != "404" else None
        if found is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(found)))
        self.send_header("ETag", f'"{hashlib.md5(found).hexdigest()}"')
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(found[: len(found) // 2] if fault == "cut" else found)
            self.close_connection |= fault == "cut"

    do_GET = do_HEAD = do_PUT = do_DELETE = answer

    def log_message(self, *_):
        pass


class Store:
    """A server of objects; `faults(method, name, number)` says what goes wrong, if anything."""

    def __init__(self):
        self.objects, self.asked, self.stalls = {}, Counter(), 0
        self.faults, self.ended = lambda *_: "", threading.Event()
        self.after = lambda method, name: None
        self._lock = threading.Lock()
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.store = self
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    @property
    def http(self):
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def loop(self):
        return f"loop://127.0.0.1:{self.server.server_port}"

    def next_fault(self, method, name):
        with self._lock:
            self.asked[f"{method} {name}"] += 1
            fault = self.faults(method, name, sum(self.asked.values()))
            self.stalls += fault == "stall"
            return fault

    def do(self, method, name, body):
        with self._lock:
            if method == "PUT":
                self.objects[name], found = body, b""
            elif method == "DELETE":
                found = b"" if self.objects.pop(name, None) is not None else None
            elif name.startswith("?list="):
                sizes = {n: len(o) for n, o in self.objects.items()}
                found = json.dumps(sizes).encode()
            else:
                found = self.objects.get(name)
        self.after(method, name)
        return found

    def put_folder(self, folder, under):
        for path in Path(folder).rglob("*"):
            if path.is_file():
                self.objects[f"{under}/{path.relative_to(folder)}"] = path.read_bytes()

    def close(self):
        self.ended.set()
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()


class LeapingClock:
    """Let downloads see time leap when a store falls silent: what is answered is never too late.

    Args:
        store: whose stalls are seen.
        monkeypatch: of the test.
    """

    def __init__(self, store, monkeypatch):
        self._store = store
        clock = SimpleNamespace(monotonic=self.monotonic, sleep=time.sleep)
        monkeypatch.setattr(download, "time", clock)
        monkeypatch.setattr(download, "wait", self._wait)

    def monotonic(self):
        return time.monotonic() + 1e6 * self._store.stalls

    def _wait(self, futures, timeout):
        until = self.monotonic() + timeout
        while (found := wait(futures, 0.01)).not_done and self.monotonic() < until:
            pass
        return found


class LoopbackFiles(AbstractFileSystem):
    protocol = "loop"

    def _ask(self, method, path, body=None):
        host, _, name = self._strip_protocol(path).partition("/")
        connection = http.client.HTTPConnection(host)
        try:
            connection.request(method, "/" + quote(name, safe="/?="), body)
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status == 404:
            raise FileNotFoundError(path)
        if answer.status == 403:
            raise PermissionError(path)
        if answer.status != 200:
            raise OSError(f"{method} {name}: {answer.status} {answer.reason}")
        return data, answer.headers

    def _every(self, path):
        host = self._strip_protocol(path).partition("/")[0]
        sizes = json.loads(self._ask("GET", f"{host}/?list=")[0])
        return {f"{host}/{name}": size for name, size in sizes.items()}

    def info(self, path, **_):
        path = self._strip_protocol(path)
        every = self._every(path)
        if path in every:
            _, headers = self._ask("HEAD", path)
            return {"name": path, "size": every[path], "type": "file", "ETag": headers["ETag"]}
        if any(name.startswith(f"{path}/") for name in every):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        found = {}
        for name, size in self._every(path).items():
            if name.startswith(f"{path}/"):
                first, _, rest = name.removeprefix(f"{path}/").partition("/")
                kind = "directory" if rest else "file"
                found[f"{path}/{first}"] = {"size": 0 if rest else size, "type": kind}
        if not found:
            raise FileNotFoundError(path)
        every = [{"name": name, **about} for name, about in found.items()]
        return every if detail else list(found)

    def _open(self, path, mode="rb", **_):
        if mode == "rb":
            return io.BytesIO(self._ask("GET", path)[0])
        return _Written(lambda data: self._ask("PUT", path, data))

    def _rm(self, path):
        self._ask("DELETE", path)


class _Written(io.BytesIO):
    def __init__(self, put):
        super().__init__()
        self._put = put

    def close(self):
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._put(data)


def installed(folder):
    """Let fsspec find `loop://` here, and in processes that have what is returned as PYTHONPATH."""
    fsspec.register_implementation("loop", LoopbackFiles, clobber=True)
    about = Path(folder, "loopback_store-1.dist-info")
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: loopback_store\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[fsspec.specs]\nloop=loopback_store:LoopbackFiles\n")
    return f"{folder}:{Path(__file__).parent}"
