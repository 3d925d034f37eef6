"""The page over HTTPS on an address that other machines reach, and beside connections that idle."""

import http.client
import json
import resource
import socket
import ssl
import subprocess
import sys
from contextlib import ExitStack

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
