"""The page over HTTPS on an address that other machines reach, beside connections that idle, and
under requests that make no sense."""

import http.client
import json
import random
import re
import resource
import socket
import ssl
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, suppress

import psutil
import pytest

from made_up_runs import make_run

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.slow, pytest.mark.process]


def own_address():
    """An address of this machine that is not loopback."""
    for found in psutil.net_if_addrs().values():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("needs an address that is not loopback")
    return ""


@pytest.fixture
def runs(tmp_path):
    (make_run(tmp_path / "runs" / "one") / "run.id").write_text("one")
    return tmp_path / "runs"


class Served:
    """`instep dashboard`, and a session with it."""

    def __init__(self, runs, *words, context=None):
        command = [sys.executable, "-m", "instep", "dashboard", str(runs), "--json", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.link = json.loads(self.process.stdout.readline())["link"]
        self.scheme, _, self.host = self.link.split("/")[:3]
        self._context = context
        self._made = []

    def connect(self, context=None):
        host, _, port = self.host.rpartition(":")
        if self.scheme == "https:":
            made = http.client.HTTPSConnection(host, int(port), timeout=30, context=context)
        else:
            made = http.client.HTTPConnection(host, int(port), timeout=30)
        self._made.append(made)
        return made

    def ask(self, path, cookie="", context=None):
        made = self.connect(context or self._context)
        made.request("GET", path, headers={"Cookie": cookie} if cookie else {})
        return made.getresponse()

    def log_in(self):
        made = self.connect(self._context)
        origin = f"{self.scheme}//{self.host}"
        headers = {"Origin": origin, "Content-Type": "application/json"}
        made.request(
            "POST", "/session", json.dumps({"token": self.link.partition("#")[2]}), headers
        )
        answer = made.getresponse()
        assert answer.status == 200
        return answer.headers["set-cookie"]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait(30)
        self.process.stdout.close()
        for each in self._made:
            each.close()


def test_off_the_host_it_speaks_tls_1_3_with_the_certificates_of_a_run_and_nothing_else(
    tmp_path, runs
):
    address, keys = own_address(), tmp_path / "keys"
    make = [sys.executable, "-m", "instep", "certificates", str(keys), "--hosts", "1"]
    subprocess.run(make, check=True, capture_output=True)
    text = (keys / "authority.pem").read_text()
    authority = text[text.index("-----BEGIN CERTIFICATE-----") :]
    trusting = ssl.create_default_context(cadata=authority)
    words = ("--address", address, "--certificates", str(keys))
    with Served(runs, *words, context=trusting) as server:
        assert server.link.startswith(f"https://{address}:")
        cookie = server.log_in()
        assert "; Secure" in cookie
        answer = server.ask("/api/stream", cookie.partition(";")[0])
        lines = [answer.readline() for _ in range(4)]
        assert any(b"row one" in line for line in lines)
        with pytest.raises(ssl.SSLCertVerificationError):  # a stranger's browser is warned
            server.ask("/", context=ssl.create_default_context())
        old = ssl.create_default_context(cadata=authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(ssl.SSLError):
            server.ask("/", context=old)
        host, _, port = server.host.rpartition(":")
        with socket.create_connection((host, int(port)), 30) as plain:
            plain.sendall(b"GET / HTTP/1.1\r\nHost: it\r\n\r\n")
            assert b"HTTP" not in plain.recv(100)


def half_a_token(host):
    """A request whose body never comes."""
    heads = [f"Host: {host}", f"Origin: http://{host}", "Content-Type: application/json"]
    text = "\r\n".join(["POST /session HTTP/1.1", *heads, "Content-Length: 100", "", "{"])
    return text.encode()


def test_two_thousand_idle_connections_keep_nobody_out(runs):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2500:
        pytest.skip("needs 2,500 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2500), hard))
    try:
        with Served(runs) as server, ExitStack() as idle:
            cookie = server.log_in().partition(";")[0]
            host, _, port = server.host.rpartition(":")
            for number in range(2000):
                each = idle.enter_context(socket.create_connection((host, int(port)), 30))
                if number % 3 == 0:
                    each.sendall(b"GET / HTTP/1.1\r\nHost: ")  # and never more
                if number % 3 == 1:
                    each.sendall(half_a_token(server.host))
            for _ in range(20):
                answer = server.ask("/api/alive", cookie)
                assert answer.status == 200
            answer = server.ask("/api/stream", cookie)
            assert any(b"row one" in answer.readline() for _ in range(4))
            process = psutil.Process(server.process.pid)
            assert process.num_fds() < 400
            assert process.memory_info().rss < 150e6
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


METHODS = ("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "X", "")
PATHS = (
    *("/", "/static/page.js", "/session", "/api/stream", "/api/alive", "/api/compare", "*"),
    *("/static/..%2f..%2fapp.py", "//", "/api/../", "/api/stream?run=one", "/logs/worker-0.log"),
    *("/api/compare?run=one", "/runs/one/job.toml", "/%00", "/etc/passwd", "http://127.0.0.1/"),
)
NAMES = ("Host", "Origin", "Cookie", "Sec-Fetch-Site", "Content-Type", "Expect", "Upgrade", "Te")


def letters(draw, most):
    return bytes(draw.choices(range(256), k=draw.randint(0, most)))


def request(draw, host):
    """A random one; most of them are well formed, and none has a session."""
    kind = draw.random()
    if kind < 0.02:
        return letters(draw, 300)
    path = draw.choice(PATHS).encode()
    if draw.random() < 0.5:
        path += (
            draw.choice((b"/", b"?", b"&run=", b"%2e%2e/", b"\\"))
            + letters(draw, 12).hex().encode()
        )
    given = [(b"Host", host.encode())] if draw.random() < 0.95 else []
    for _ in range(draw.randint(0, 3)):
        value = draw.choice((letters(draw, 20), host.encode(), b"same-origin", b"instep-8600=a.b"))
        value = value.translate(None, b"\r\n") if kind < 0.9 else value
        given.append((draw.choice(NAMES).encode(), value))
    body = letters(draw, 40) if draw.random() < 0.3 else b""
    size = len(body) if kind < 0.95 else draw.randint(0, 60)
    given.append((b"Content-Length", str(size).encode()))
    first = draw.choice(METHODS).encode() + b" " + path + b" HTTP/1.1\r\n"
    return first + b"".join(b"%s: %s\r\n" % each for each in given) + b"\r\n" + body


def answers(address, sent):
    """What comes back of some requests that are sent over one connection, up to its end."""
    with socket.create_connection(address, 30) as made:
        with suppress(ConnectionError):
            made.sendall(sent)
            made.shutdown(socket.SHUT_WR)
        found = b""
        with suppress(ConnectionError):
            while piece := made.recv(1 << 16):
                found += piece
        return found


def test_a_hundred_thousand_random_requests_get_nothing_of_a_run_and_do_no_harm(runs):
    draw = random.Random(43)
    with Served(runs) as server:
        cookie = server.log_in().partition(";")[0]
        host, _, port = server.host.rpartition(":")
        address, said, sizes = (host, int(port)), Counter(), []
        keeper = psutil.Process(server.process.pid)
        served = [keeper, *keeper.children()]
        for number in range(50_000):
            found = answers(address, request(draw, server.host) + request(draw, server.host))
            said.update(re.findall(rb"HTTP/1.1 (\d+)", found))
            for of_a_run in (b"digits.py:recipe", b"run_started", b'"sections"', b"root:"):
                assert of_a_run not in found
            if number in (5000, 49_999):
                sizes.append(sum(each.memory_info().rss for each in served))
        assert server.ask("/api/alive", cookie).status == 200
        stream = server.ask("/api/stream", cookie)
        assert any(b"row one" in stream.readline() for _ in range(4))
        assert [each.pid for each in keeper.children()] == [served[1].pid]
        assert served[1].num_fds() < 64
        assert sizes[1] < sizes[0] + 10e6
    assert {code for code in said if code < b"400"} <= {b"200"}
    assert said[b"200"] < sum(said.values()) / 4
    assert sum(said.values()) > 50_000
