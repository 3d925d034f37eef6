"""Files with secrets in which single bits were flipped: a sentence, or another place to ask; and no
traceback, whatever the bit stands for.
"""

import os
import random
import warnings

import msgspec
import pytest

from instep.client.join import meeting
from instep.comm.encryption.certificates import Authority, Identity, new_key, public_key
from instep.comm.encryption.tls import context
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import InstepError, PeerError
from instep.launch.join_folder import JoinFolder
from instep.launch.join_token import Token, credentials

FLIPS = 150
NOWHERE = Address("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of `cryptography`, of numbers that it does not like
        yield


def flipped(file, seed=0):
    """The file, with another bit flipped each time; whole again at the end."""
    whole, draw = file.read_bytes(), random.Random(seed)
    for at in draw.sample(range(8 * len(whole)), FLIPS):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        write(file, bytes(damaged))
        yield
    write(file, whole)


def write(file, data):
    file.write_bytes(data)
    os.chmod(file, 0o600)


def said(what):
    """Whether it raises an error of ours; any other fails the test."""
    try:
        what()
    except InstepError:
        return True
    return False


@pytest.fixture
def folder(tmp_path):
    made = JoinFolder(tmp_path / "certificates")
    made.prepare(1)
    return made


def test_an_authority_with_a_flipped_bit_is_refused(tmp_path, folder):
    file, key, spoken = tmp_path / "certificates" / "authority.pem", public_key(new_key()), 0

    def serve():
        found = JoinFolder(tmp_path / "certificates")
        context(found.credentials(), server=True, newcomers=True)
        found._authority.certify(Identity("host", 0), key)

    for _ in flipped(file):
        spoken += said(serve)
    assert spoken > FLIPS * 0.95  # the others are ends of lines, and the like
    assert not said(serve)


@pytest.mark.parametrize("used", [False, True])
def test_what_is_known_of_tokens_with_a_flipped_bit_stops_no_gate(tmp_path, folder, used):
    token, key = Token.read(folder.token_file(0)), public_key(new_key())
    if used:
        folder.certify(token.secret, key)

    def ask():
        folder.is_current(0, b"")
        folder.certify(token.secret, key)

    for _ in flipped(tmp_path / "certificates" / "hosts.json"):
        said(ask)


def test_a_token_with_a_flipped_bit_is_refused_or_opens_nothing(tmp_path, folder):
    file = folder.token_file(0)
    for _ in flipped(file):
        file.with_name(file.name + ".certificate").unlink(missing_ok=True)
        assert said(lambda: credentials(NOWHERE, file))


@pytest.mark.parametrize("bought", [False, True])
def test_a_certificate_that_is_kept_with_a_flipped_bit_is_named(tmp_path, folder, bought):
    file = folder.token_file(0)
    kept = file.with_name(file.name + ".certificate")
    with pytest.raises(PeerError):  # nothing listens; but its key is there now
        credentials(NOWHERE, file)
    if bought:
        whole = msgspec.json.decode(kept.read_bytes())
        certificate = folder.certify(Token.read(file).secret, public_key(whole["key"]))
        write(kept, msgspec.json.encode({**whole, "certificate": certificate}))
    for _ in flipped(kept):
        assert said(lambda: credentials(NOWHERE, file)) or bought


@pytest.mark.parametrize("whose", ["processes", "programs"])
def test_a_meeting_file_with_a_flipped_bit_is_as_good_as_none(tmp_path, whose):
    at, authority = meeting.MeetingFile(tmp_path / "meeting"), Authority()
    endpoint = Endpoint(NOWHERE, "t" * 32, credentials=authority.issue(Identity("client", 1)))
    meeting.write(at, endpoint, authority if whose == "processes" else None)
    none = 0
    for _ in flipped(at.file):
        found = meeting.read(at, 1)
        none += found is None or found.context is None
    assert none > FLIPS / 4
    assert meeting.read(at, 1) is not None


def test_a_private_key_is_in_no_temporary_file(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "a full disk"))
    assert context(Authority().issue(Identity("worker")), server=True) is not None
