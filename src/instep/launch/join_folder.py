"""The folder of `instep certificates`: an authority, and a join token for each machine.

    authority.pem    key and certificate; the key never leaves the folder
    host-1.token     to be copied to machine 1, which buys its certificate with it
    hosts.json       hashes of the tokens, and what each has bought

All of it is its owner's only. A certificate from here opens the gate of a run (`gate.py`) and
nothing else: what processes of a run show each other comes from the run's own authority. The
machine's end is `join_token.py`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import ssl
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from instep.comm.encryption.certificates import Authority, Credentials, Identity, valid_until
from instep.errors import JoinError, SpecError
from instep.launch.join_token import Token
from instep.plain_file import PRIVATE, is_private, plain, read_plain, replace_plain

LASTS_S = 24 * 3600.0
"""How long a token waits for its machine."""

LOCKED_S = 2.0
"""How long another process may keep the folder, which needs milliseconds unless it was stopped."""


class _Host(msgspec.Struct):
    """What is known of the token of one machine."""

    sha256: str
    """Of its secret."""
    until: float
    """Unix seconds."""
    public_key: str = ""
    """Of the machine that has used it, PEM."""
    certificate: str = ""
    """What it was given, PEM."""

    @property
    def used(self) -> bool:
        return bool(self.certificate)


class JoinFolder:
    """Makes tokens, and certificates for them. Several processes may use one folder.

    Args:
        path: of the folder, which is made if it is not there.
        clock: Unix seconds.

    Raises:
        SpecError: it cannot be used; the text says what to do.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock = path, clock
        with self._speaking():
            path.mkdir(0o700, exist_ok=True)
            about = path.stat()
            if about.st_uid != os.geteuid() or about.st_mode & 0o022:
                raise SpecError(f"others can write into {path}. Use: chmod 700 {path}")
            with self._locked():
                self._authority = self._load()

    def _load(self) -> Authority:
        file = self._path / "authority.pem"
        if not file.exists():
            made = Authority(clock=self._clock)
            self._write(file, made.pem)
            return made
        if not is_private(file.stat()):
            raise SpecError(f"others can read the key in {file}: {self._anew()}")
        try:
            found = Authority(read_plain(file).decode(), clock=self._clock)
        except ValueError:
            raise SpecError(f"{file} has no key and certificate: {self._anew()}") from None
        if valid_until(found.certificate) < self._clock():
            raise SpecError(f"the certificate in {file} has run out: {self._anew()}")
        return found

    def _anew(self) -> str:
        return f"remove the folder {self._path}, and give each machine a new token."

    def token_file(self, host: int) -> Path:
        """Of one machine."""
        return self._path / f"host-{host}.token"

    def prepare(
        self, hosts: int, lasts_s: float = LASTS_S, renew: Collection[int] = ()
    ) -> list[int]:
        """Write the tokens that are missing, have run out unused, or were seen by others.

        Args:
            hosts: how many machines there are.
            lasts_s: how long new tokens wait for their machines.
            renew: hosts that get another in any case. What the former one has bought opens nothing
                any more.

        Returns:
            The hosts that have a new token.
        """
        with self._speaking(), self._locked():
            known = self._known()
            wanted = [n for n in range(hosts) if n in renew or self._needs_one(n, known.get(n))]
            tokens = {n: Token(secrets.token_hex(16), self._authority.certificate) for n in wanted}
            for n, token in tokens.items():
                known[n] = _Host(_sha256(token.secret), self._clock() + lasts_s)
            for n, token in tokens.items():
                self._write(self.token_file(n), token.text)
            if tokens:
                self._remember(known)
        return wanted

    def _needs_one(self, host: int, about: _Host | None) -> bool:
        if about is None:
            return True
        file = self.token_file(host)
        return not about.used and (
            about.until < self._clock() or (file.exists() and not is_private(file.stat()))
        )

    def credentials(self) -> Credentials:
        """For a gate."""
        return self._authority.issue(Identity("master"))

    def for_names(self, names: Sequence[str]) -> Credentials:
        """For a web server that browsers call by these names or addresses."""
        return self._authority.issue_for_names(names)

    def certify(self, secret: str, public_key: str) -> str:
        """The certificate for a token, PEM: once. A machine that asks again with the same key has
        not got the answer, and gets the same one. That the token is used is on disk before.

        Raises:
            JoinError: says why not, for the owner of this folder; strangers are not told.
            SpecError, OSError: the folder cannot be read or written.
        """
        sha256 = _sha256(secret)
        with self._locked():
            known = self._known()
            host = next((n for n, about in known.items() if about.sha256 == sha256), None)
            if host is None:
                raise JoinError("it has no token of this folder")
            about = known[host]
            if about.used and about.public_key == public_key:
                return about.certificate
            if about.used:
                raise JoinError(f"the token of host {host} is used already")
            if about.until < self._clock():
                raise JoinError(f"the token of host {host} has run out")
            try:
                certificate = self._authority.certify(Identity("host", host), public_key)
            except ValueError as error:
                raise JoinError(f"host {host} sent no key: {error}") from None
            about.public_key, about.certificate = public_key, certificate
            self._remember(known)
        return certificate

    def is_current(self, host: int, certificate: bytes) -> bool:
        """Whether that certificate (DER) is what the newest token of a host has bought.

        Raises:
            SpecError, OSError: the folder cannot be read.
        """
        with self._locked():
            about = self._known().get(host)
        try:
            return (
                about is not None
                and about.used
                and ssl.PEM_cert_to_DER_cert(about.certificate) == certificate
            )
        except ValueError:  # it is damaged
            return False

    # ---- files

    def _known(self) -> dict[int, _Host]:
        file = self._path / "hosts.json"
        try:
            return msgspec.json.decode(read_plain(file), type=dict[int, _Host])
        except FileNotFoundError:
            return {}
        except (ValueError, RecursionError) as error:  # also where text is none
            raise SpecError(f"{file} is damaged ({error}): {self._anew()}") from None

    def _remember(self, known: dict[int, _Host]) -> None:
        self._write(self._path / "hosts.json", msgspec.json.encode(known).decode())

    def _write(self, file: Path, text: str) -> None:
        """All at once, for the owner alone, and on disk when it returns."""
        replace_plain(file, text, PRIVATE, durable=True)
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT
        file = plain(self._path / ".lock", flags, PRIVATE)
        try:
            self._lock(file)
            yield
        finally:
            os.close(file)

    def _lock(self, file: int) -> None:
        deadline = time.monotonic() + LOCKED_S
        while time.monotonic() < deadline:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                time.sleep(0.01)
            except OSError:  # the file system has no locks
                return
            else:
                return
        raise SpecError(f"another process has locked {self._path} for {LOCKED_S:g} s. End it.")

    @contextmanager
    def _speaking(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise SpecError(
                f"certificates cannot be kept in {self._path}: {error.strerror}. Name a folder of "
                "yours."
            ) from None


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
