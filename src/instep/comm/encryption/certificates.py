"""A run's own authority, and the certificates by which its processes know each other.

A certificate says what a process is: `instep:worker/3/1` is worker 3, on host 1. Whoever
has the authority's key can make any of them, so it stays with the client and the
master; of a run of `instep.join`, with its processes.
Nothing here knows of connections. `cryptography` makes the certificates, and is imported
only where one is made.
"""

from __future__ import annotations

import datetime
import ipaddress
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import (
        EllipticCurvePrivateKey,
        EllipticCurvePublicKey,
    )
    from cryptography.x509 import Certificate, GeneralName

Role = Literal["master", "client", "host", "worker", "server", "newcomer"]
"""A newcomer is a process without a certificate: the machine that wants one (`join_token.py`)."""

LASTS = datetime.timedelta(days=365)
"""How long a certificate is valid. A resumed run has another authority."""

CLOCKS = datetime.timedelta(days=1)
"""By how much clocks of hosts may be behind."""

_NAME = "instep"


class Identity(NamedTuple):
    """What a process is, as its certificate says."""

    role: Role
    number: int = 0
    host: int = 0
    """The number of the host that a worker is on."""

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        return f"{_NAME}:{self.role}/{self.number}/{self.host}"

    @classmethod
    def of(cls, uri: str) -> Identity:
        """What a URI of `uri` says.

        Raises:
            ValueError: it is none.
        """
        name, _, rest = uri.partition(":")
        words = rest.split("/")
        if name != _NAME or len(words) != 3:
            raise ValueError(f"{uri!r} names no process of a run.")
        return cls(msgspec.convert(words[0], Role), int(words[1]), int(words[2]))


def is_worker(peer: Identity, number: int | None = None) -> bool:
    """Whether a process is a worker or a server; with a number, that one."""
    return peer.role in ("worker", "server") and number in (None, peer.number)


@dataclass(frozen=True)
class Credentials:
    """What a process shows others of its run, and how it knows them."""

    own: str
    """Its private key and its certificate, PEM; empty if it has none yet."""
    authority: str
    """The certificate of the run's authority, PEM."""

    def __repr__(self) -> str:
        return "Credentials(...)"  # a key must not get into a log


class Authority:
    """Makes the certificates of one run.

    Args:
        pem: of `pem` of the authority that another process made; by default a new one.
        clock: Unix seconds.

    Raises:
        ValueError: `pem` is damaged.
    """

    def __init__(self, pem: str = "", *, clock: Callable[[], float] = time.time) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives import serialization

        self._clock = clock
        self._key: EllipticCurvePrivateKey
        self._certificate: Certificate
        if pem:
            with _reading():
                key = serialization.load_pem_private_key(pem.encode(), password=None)
                self._key = key  # type: ignore[assignment]  # its kind is that of `pem`
                self._certificate = x509.load_pem_x509_certificate(pem.encode())
                self._certificate.verify_directly_issued_by(self._certificate)
                if key.public_key() != self._certificate.public_key():
                    raise ValueError("its key and its certificate do not belong together")
        else:
            self._key = _new_key()
            self._certificate = self._sign(None, self._key.public_key(), LASTS)

    @classmethod
    def of_secret(cls, secret: str) -> Authority:
        """The authority that all who know a secret of 128 random bits or more have in common."""
        from cryptography.hazmat.primitives import hashes
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF

        derived = HKDF(hashes.SHA256(), 48, salt=None, info=b"instep authority")
        number = int.from_bytes(derived.derive(secret.encode()), "big")
        made = cls.__new__(cls)
        made._clock = time.time
        made._key = ec.derive_private_key(1 + number % (_ORDER - 1), ec.SECP256R1())
        made._certificate = made._sign(None, made._key.public_key(), LASTS)
        return made

    @property
    def pem(self) -> str:
        """Private key and certificate, for another process that makes certificates of this run."""
        return _key_pem(self._key) + self.certificate

    @property
    def certificate(self) -> str:
        """By which its certificates are known, PEM."""
        return _pem(self._certificate)

    def issue(self, identity: Identity, lasts: datetime.timedelta = LASTS) -> Credentials:
        """A key and a certificate for a process."""
        key = _new_key()
        own = _key_pem(key) + _pem(self._sign(identity, key.public_key(), lasts))
        return Credentials(own, self.certificate)

    def issue_for_names(self, names: Sequence[str]) -> Credentials:
        """A key and a certificate for a web server that browsers call by these names or addresses.

        It names no process of a run, and so opens nothing there.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        key, now = _new_key(), datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dashboard")])
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        made = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._certificate.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS)
            .not_valid_after(now + LASTS)
            .add_extension(x509.BasicConstraints(False, None), True)
            .add_extension(issuer, False)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False)
            .add_extension(x509.SubjectAlternativeName(list(map(_general_name, names))), False)
            .sign(self._key, hashes.SHA256())
        )
        return Credentials(_key_pem(key) + _pem(made), self.certificate)

    def certify(self, identity: Identity, public_key: str) -> str:
        """A certificate, PEM, for a process that keeps its key to itself.

        Args:
            identity: what the process is.
            public_key: its own, PEM, as of `new_key`.

        Raises:
            ValueError: that is no such key.
        """
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ec

        with _reading():
            key = serialization.load_pem_public_key(public_key.encode())
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name != _CURVE:
            raise ValueError(f"a public key on {_CURVE} is wanted.")
        return _pem(self._sign(identity, key, LASTS))

    def _sign(
        self, identity: Identity | None, key: EllipticCurvePublicKey, lasts: datetime.timedelta
    ) -> Certificate:
        """A certificate of a process, or (None) of the authority itself."""
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

        def name(text: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

        now = datetime.datetime.fromtimestamp(self._clock(), datetime.UTC)
        authority = identity is None
        uses = {
            "digital_signature": not authority,
            "key_cert_sign": authority,
            **dict.fromkeys(_OTHER_USES, False),
        }
        made = (
            x509.CertificateBuilder()
            .subject_name(name("authority" if identity is None else identity.role))
            .issuer_name(name("authority"))
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS)
            .not_valid_after(now + lasts)
            .add_extension(x509.BasicConstraints(authority, 0 if authority else None), True)
            .add_extension(x509.KeyUsage(**uses), True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), False)
        )
        if identity is not None:
            issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
            sides = {
                "master": [ExtendedKeyUsageOID.SERVER_AUTH],
                "host": [ExtendedKeyUsageOID.CLIENT_AUTH],
                "client": [ExtendedKeyUsageOID.CLIENT_AUTH],
            }
            both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
            made = (
                made.add_extension(issuer, False)
                .add_extension(x509.ExtendedKeyUsage(sides.get(identity.role, both)), False)
                .add_extension(
                    x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]),
                    False,
                )
            )
        return made.sign(self._key, hashes.SHA256())


_OTHER_USES = (
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


_CURVE = "secp256r1"
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
"""Of that curve."""


def _general_name(name: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def new_key() -> str:
    """A private key, PEM."""
    return _key_pem(_new_key())


def public_key(own: str) -> str:
    """The public key that belongs to a private one, PEM both.

    Raises:
        ValueError: it is none.
    """
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        PublicFormat,
        load_pem_private_key,
    )

    with _reading():
        key = load_pem_private_key(own.encode(), password=None).public_key()
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


def valid_until(pem: str) -> float:
    """When a certificate runs out, Unix seconds.

    Raises:
        ValueError: it is none.
    """
    from cryptography import x509

    with _reading():
        return x509.load_pem_x509_certificate(pem.encode()).not_valid_after_utc.timestamp()


@contextmanager
def _reading() -> Iterator[None]:
    """Whatever `cryptography` raises for text that is damaged becomes a ValueError."""
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.x509 import InvalidVersion

    try:
        yield
    except (InvalidSignature, InvalidVersion, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(str(error) or "its signature does not fit") from None


def _new_key() -> EllipticCurvePrivateKey:
    from cryptography.hazmat.primitives.asymmetric import ec

    return ec.generate_private_key(ec.SECP256R1())


def _key_pem(key: EllipticCurvePrivateKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _pem(certificate: Certificate) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM).decode()
