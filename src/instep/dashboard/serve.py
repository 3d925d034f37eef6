"""Starts the server: a socket, a link with a token, and uvicorn until it is interrupted.

`starlette` and `uvicorn` are in the extra `dashboard`. Ways in: `serve` in this process, `beside`
for one of its own.
"""

from __future__ import annotations

import ipaddress
import json
import os
import secrets
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from instep.detached.kept import keep
from instep.errors import SpecError

LOOPBACK = "127.0.0.1"
LAST_LOOK_S = 1.0
"""Seconds in which open pages are told how a run has ended, before the process beside it ends."""
_LOOK_S = 0.05
_NICE = 19
"""How far those who train come first, as of `nice`."""
PORTS = range(8600, 8650)
"""The first free one is taken where none is given."""


class ListeningSocket(NamedTuple):
    """A socket that listens, and how it is called."""

    socket: socket.socket
    scheme: str
    hosts: list[str]
    """Names with port; the first one is in the link."""

    @property
    def port(self) -> int:
        """Its number."""
        return int(self.socket.getsockname()[1])

    def link(self, token: str) -> str:
        """An address with the token in its fragment, which no browser sends."""
        return f"{self.scheme}://{self.hosts[0]}/#{token}"


def check_installed() -> None:
    """Refuse to start without the packages of the extra.

    Raises:
        SpecError: says how to get them.
    """
    if any(find_spec(name) is None for name in ("starlette", "uvicorn")):
        raise SpecError(
            "the dashboard needs the packages starlette and uvicorn, which are not installed. "
            "Get them with: pip install 'instep[dashboard]'"
        )


def listen(port: int = 0, address: str = "", *, encrypted: bool = False) -> ListeningSocket:
    """Listen on an address.

    Args:
        port: 0 for the first free one of `PORTS`.
        address: of this machine; by default loopback, which no other machine reaches.
        encrypted: whether there are certificates.

    Raises:
        SpecError: it is not loopback, and there are no certificates; or it cannot be used.
    """
    host = address or LOOPBACK
    if not 0 <= port < 1 << 16:
        raise SpecError(f"--port {port}: needs a number from 1 to 65535, or 0 for the first free.")
    if not is_loopback(host) and not encrypted:
        raise SpecError(
            f"--address {host}: other machines could read along. Give --certificates FOLDER too, "
            f"or leave it out and use a tunnel: ssh -L {port or PORTS[0]}:localhost:"
            f"{port or PORTS[0]} {socket.gethostname()}"
        )
    failed: list[OSError] = []
    for number in [port] if port else PORTS:
        try:
            made = socket.create_server((host, number), family=_family(host), backlog=256)
        except OSError as error:
            failed.append(error)
            continue
        return ListeningSocket(made, "https" if encrypted else "http", _names(host, number))
    where = f"{host} port {port}" if port else f"{host}, ports {PORTS[0]} to {PORTS[-1]}"
    raise SpecError(f"the dashboard cannot listen on {where}: {failed[-1].strerror}.")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address; a name that cannot be told is not."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _names(host: str, port: int) -> list[str]:
    names = [f"[{host}]" if ":" in host else host]
    if is_loopback(host):
        names += [name for name in (LOOPBACK, "localhost", "[::1]") if name not in names]
    elif host in ("0.0.0.0", "::"):
        names = [socket.gethostname(), *names]
    return [f"{name}:{port}".lower() for name in names]


def serve(
    runs: Path,
    at: ListeningSocket,
    token: str = "",
    say: Callable[[str], object] = lambda link: None,
    secret: str = "",
    certificates: Path | None = None,
    pool: Path | None = None,
    beside: Callable[[], object] = lambda: None,
) -> int:
    """Serve until the process is interrupted; a server that is killed is replaced.

    Args:
        runs: a folder of runs, or of one.
        token: that the first link has; a random one if it is left out.
        say: told each link that is fit to be opened: another one when one was used.
        secret: as of `Access`.
        certificates: folder of `instep certificates`, for HTTPS.
        pool: as of `RunList`.
        beside: as of `keep`.

    Returns:
        The exit code.
    """
    import uvicorn

    from instep.dashboard.access import Access, new_token
    from instep.dashboard.app import make_app, page_files
    from instep.dashboard.guard import GuardedProtocol  # noqa: F401  imported before the fork
    from instep.dashboard.listing import RunList

    page_files()  # read and compressed once, for all servers
    secret = secret or new_token()

    def serve_once(token: str, tell: Callable[[str], object]) -> None:
        def used(new: str) -> None:
            tell(new)
            say(at.link(new))

        os.nice(_NICE)
        access = Access(at.hosts, at.scheme, at.port, token, used, secret)
        with ThreadPoolExecutor(2) as executor:
            listed = RunList(runs, pool)
            executor.submit(listed.rows)  # before somebody has opened the link
            app: Any = make_app(listed, access, executor)
            with suppress(KeyboardInterrupt):
                uvicorn.Server(_config(app, at, certificates)).run(sockets=[at.socket])

    if not token:
        token = new_token()
        say(at.link(token))
    return keep(serve_once, token, beside)


def _config(app: Any, at: ListeningSocket, certificates: Path | None) -> Any:
    """Settings of uvicorn, with its certificates loaded."""
    import uvicorn

    from instep.dashboard.guard import GuardedProtocol

    with _tls(certificates, at) as options:  # the key lies in a file until it is loaded
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=GuardedProtocol,
            ws="none",
            lifespan="off",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=1,
            h11_max_incomplete_event_size=1 << 14,
            **options,
        )
        config.load()
    if config.ssl is not None:
        config.ssl.minimum_version = ssl.TLSVersion.TLSv1_3
    return config


@contextmanager
def _tls(folder: Path | None, at: ListeningSocket) -> Iterator[dict[str, Any]]:
    """Options of uvicorn for HTTPS, with a certificate of the folder's authority."""
    if folder is None:
        yield {}
        return
    from instep.launch.join_folder import JoinFolder

    names = [name.rpartition(":")[0].strip("[]") for name in at.hosts]
    credentials = JoinFolder(folder).for_names(names)
    with tempfile.TemporaryDirectory() as temporary:
        file = Path(temporary) / "server.pem"
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as written:
            written.write(credentials.own + credentials.authority)
        pem = {"ssl_certfile": str(file), "ssl_keyfile": str(file)}
        yield {**pem, "ssl_version": ssl.PROTOCOL_TLS_SERVER}


@contextmanager
def beside(runs: Path, say: Callable[[str], object]) -> Iterator[None]:
    """For as long as the context lasts, have another process serve; `say` is told the link.

    Raises:
        SpecError: the packages are missing, or no port is free.
    """
    check_installed()
    at, token, secret = listen(), secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    over = threading.Event()
    about = {"runs": str(runs.absolute()), "token": token, "secret": secret, "hosts": at.hosts}
    with _started(at, about) as first:
        keeper = threading.Thread(target=_keep, args=(first, at, about, over), daemon=True)
        keeper.start()
        say(at.link(token))
        try:
            yield
        finally:
            over.set()
            keeper.join()
            at.socket.close()


def _keep(
    first: subprocess.Popen[bytes],
    at: ListeningSocket,
    about: dict[str, Any],
    over: threading.Event,
) -> None:
    """Start another server where one was killed; who was logged in stays so."""
    process, pause_s = first, _LOOK_S
    while not over.wait(_LOOK_S):
        if process.poll() is None:
            continue
        if process.returncode >= 0 and over.wait(pause_s):
            return
        pause_s = min(2 * pause_s, 5.0) if process.returncode >= 0 else _LOOK_S
        with _started(at, {**about, "token": secrets.token_urlsafe(32)}) as process:
            while process.poll() is None and not over.wait(_LOOK_S):
                pass


@contextmanager
def _started(at: ListeningSocket, about: dict[str, Any]) -> Iterator[subprocess.Popen[bytes]]:
    """A server in a process of its own, which ends with the context."""
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "instep.dashboard.serve"],
        stdin=reading,
        stdout=subprocess.DEVNULL,
        pass_fds=[at.socket.fileno()],
        start_new_session=True,  # Ctrl-C reaches only us
    )
    os.close(reading)
    try:
        with open(writing, "wb", buffering=0) as told:  # its end ends the process
            with suppress(BrokenPipeError):
                told.write(json.dumps({**about, "fd": at.socket.fileno()}).encode() + b"\n")
            yield process
    finally:
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def main() -> None:
    """Serve for the process that started this one, until it closes standard input."""
    about = json.loads(sys.stdin.readline())
    at = ListeningSocket(socket.socket(fileno=about["fd"]), "http", about["hosts"])
    serve(Path(about["runs"]), at, about["token"], secret=about["secret"], beside=_end_with_input)


def _end_with_input() -> None:
    sys.stdin.read()
    time.sleep(LAST_LOOK_S)
    os._exit(0)  # nothing is written that could be cut short


if __name__ == "__main__":
    main()
