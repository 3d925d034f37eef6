"""A machine's join token, and the certificate that it buys. Way in: `credentials`.

A token is a file: a secret that works once, and the certificate of the authority that takes it
(`join_folder.py`). So the machine knows whom it tells the secret, before it tells it. It makes its
key itself. Key and certificate stay beside the token file, and all later connections show them.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from instep.comm.encryption.certificates import Credentials, new_key, public_key, valid_until
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address, Channel
from instep.errors import JoinError
from instep.plain_file import PRIVATE, is_private, plain, replace_plain
from instep.undecodable import UNDECODABLE

ANSWER_S = 15.0
"""How long to wait for a connection, and for an answer."""

_TOKEN = re.compile(
    r"([0-9a-f]{32})\n(-----BEGIN CERTIFICATE-----\n[\w+/=\n]*-----END CERTIFICATE-----)\s*", re.A
)


class Token(NamedTuple):
    """What is in a token file."""

    secret: str
    authority: str
    """Its certificate, PEM."""

    @property
    def text(self) -> str:
        """As it is in the file."""
        return f"{self.secret}\n{self.authority.strip()}\n"

    @classmethod
    def read(cls, path: Path) -> Self:
        """The token in a file.

        Raises:
            JoinError: there is none, or others can read it.
        """
        found = _TOKEN.fullmatch(read_secret(path).replace("\r\n", "\n"))
        if found is None or not _is_certificate(found[2]):
            raise JoinError(f"{path} is no token file. Copy it again from where it was made.")
        return cls(*found.groups())


class _Kept(msgspec.Struct):
    """What a machine keeps beside the token file."""

    token: str
    """SHA-256 of the token's text."""
    authority: str
    key: str
    certificate: str = ""
    """Empty until the answer has come. All are PEM."""

    @property
    def credentials(self) -> Credentials:
        return Credentials(self.key + self.certificate, self.authority)


def _is_certificate(text: str) -> bool:
    from instep.comm.encryption.tls import context

    with suppress(ValueError):
        context(Credentials("", text), server=False)
        return True
    return False


def credentials(gate: Address, token_file: Path) -> Credentials:
    """What this machine shows: the certificate that it has, or the one that its token buys now.

    Once there is a certificate, the token file may be removed. Another token replaces it.

    Args:
        gate: where to buy it.
        token_file: the certificate is, or will be, in a file beside it.

    Raises:
        FileNotFoundError: there is no token file yet.
        JoinError: the token is refused, or cannot be used.
        StrangerError: what listens there is not of the token's authority. It was told nothing.
        PeerError, TimeoutError: nothing listens there, or does not answer.
    """
    file = token_file.with_name(token_file.name + ".certificate")
    kept = _kept(file)
    if kept is None or not kept.certificate or token_file.exists():
        if not token_file.exists():
            raise FileNotFoundError(f"there is no {token_file}")
        token = Token.read(token_file)
        sha256 = hashlib.sha256(token.text.encode()).hexdigest()
        if kept is None or kept.token != sha256 or not (kept.certificate or _has_key(kept)):
            kept = _Kept(sha256, token.authority, new_key())
            _keep(
                file, kept
            )  # a machine that asks again, also after a restart, asks with the same key
        if not kept.certificate:
            kept.certificate = _bought(gate, token, public_key(kept.key))
            _keep(file, kept)
    _check(kept, file)
    return kept.credentials


def _has_key(kept: _Kept) -> bool:
    with suppress(ValueError):
        return bool(public_key(kept.key))
    return False


def _check(kept: _Kept, file: Path) -> None:
    """JoinError if what is kept has run out, or is damaged."""
    from instep.comm.encryption.tls import context

    try:
        if valid_until(kept.certificate) < time.time():
            raise JoinError(f"the certificate in {file} has run out. Get a new token file.")
        context(kept.credentials, server=False)
    except ValueError as error:
        raise JoinError(
            f"the certificate in {file} is damaged ({error}). Remove the file, and get a new token "
            "file: `instep certificates --renew`, on the machine of `instep run`, makes one."
        ) from None


def _bought(gate: Address, token: Token, key: str) -> str:
    from instep.comm.encryption.tls import context

    channel = Channel.connect(
        gate, ANSWER_S, context(Credentials("", token.authority), server=False)
    )
    try:
        channel.send(m.Certify(secret=token.secret, public_key=key))
        answer = channel.receive(ANSWER_S)
    finally:
        channel.close()
    if isinstance(answer, m.Certified):
        return answer.certificate
    raise JoinError(refusal(gate, "token"))


def refusal(gate: Address, what: str) -> str:
    """What to tell the user who was told no more than `refused`."""
    return (
        f"{gate.host}:{gate.port} refused this machine: its {what} is wrong or used, or has run "
        "out. `instep certificates --renew`, on the machine of `instep run`, makes a new token."
    )


def stranger(gate: Address, token_file: Path) -> str:
    """What to tell the user when the other end is not of the token's authority."""
    return (
        f"what listens at {gate.host}:{gate.port} is not the run that {token_file} is for, and "
        "was told nothing. Copy the token file again, and look at this machine's clock."
    )


def _kept(file: Path) -> _Kept | None:
    if not file.exists():
        return None
    try:
        return msgspec.json.decode(read_secret(file), type=_Kept)
    except UNDECODABLE:
        return None


def _keep(file: Path, kept: _Kept) -> None:
    try:
        replace_plain(file, msgspec.json.encode(kept).decode(), PRIVATE, durable=True)
    except OSError as error:
        raise JoinError(
            f"the certificate of this machine cannot be kept in {file}: {error.strerror}. Copy the "
            "token file into a folder of yours."
        ) from None


def read_secret(path: Path) -> str:
    """The text of a file with a secret, which only its owner may read.

    Raises:
        JoinError: it cannot be read, or others can read it.
    """
    try:
        with open(path, "rb", opener=plain) as file:
            about, text = os.fstat(file.fileno()), file.read().decode(errors="replace")
    except OSError as error:
        raise JoinError(
            f"{path} cannot be read: {error.strerror}. Copy it from where it was made."
        ) from None
    if not is_private(about):
        raise JoinError(f"others can read {path}. Use: chmod 600 {path}")
    return text
