"""The gate of a cluster under attack, on real sockets: who gets in, and what all others learn."""

import json
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest

from instep.comm.encryption import tls
from instep.comm.encryption.certificates import (
    Authority,
    Credentials,
    Identity,
    new_key,
    public_key,
)
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import MOST_UNTRUSTED, Address, Channel, frame
from instep.comm.protocol.endpoint import Switchboard
from instep.errors import JoinError, PeerError, StrangerError
from instep.launch.gate import REFUSED, Gate
from instep.launch.join_folder import LASTS_S, JoinFolder
from instep.launch.join_token import Token, credentials
from instep.launch.joining import Machine

PLACES = ("127.0.0.1:1", "127.0.0.1:2")
DAY_S = 24 * 3600.0


class Served:
    """A gate that a thread serves; what it let in, and what it said."""

    def __init__(self, folder, port=0):
        self.folder, self.events, self.said = folder, [], []
        self.gate = Gate(("127.0.0.1", port), PLACES, folder, self.said.append)
        self.address = self.gate._hub.address
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        while not self._ends.is_set():
            self.events.extend(self.gate.turn(0.02))

    def close(self):
        self._ends.set()
        self._thread.join()
        self.gate._hub.close()


@pytest.fixture
def folder(tmp_path):
    made = JoinFolder(tmp_path / "certificates")
    made.prepare(3)
    return made


@pytest.fixture
def served(folder):
    serves = Served(folder)
    yield serves
    serves.close()


@contextmanager
def connected(served, shown):
    made = tls.context(shown, server=False)
    channel = Channel.connect(served.address, 5.0, made)
    try:
        yield channel
    finally:
        channel.close()


def newcomer(folder):
    return Credentials("", folder.credentials().authority)


def answer(served, shown, message):
    """What the gate says to it, and whether it hangs up then."""
    with connected(served, shown) as channel:
        channel.send(message)
        said = channel.receive(5.0)
        if isinstance(said, m.Refused):
            with pytest.raises(PeerError, match="closed the connection"):
                channel.receive(5.0)
        return said


def copied(folder, tmp_path, host=0):
    """The token file of a machine, in a folder of its own."""
    there = tmp_path / f"machine-{host}"
    there.mkdir()
    file = there / "token"
    file.write_text(folder.token_file(host).read_text())
    file.chmod(0o600)
    return file


def secret(folder, host=0):
    return Token.read(folder.token_file(host)).secret


def certify(secret, key=None):
    return m.Certify(secret=secret, public_key=key or public_key(new_key()))


def until(condition, timeout_s=600.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# ---- who gets in


def test_a_token_buys_a_certificate_that_is_kept_and_opens_the_place_of_its_machine(
    served, folder, tmp_path
):
    file = copied(folder, tmp_path, 1)
    shown = credentials(served.address, file)
    kept = file.with_name("token.certificate")
    assert kept.stat().st_mode & 0o777 == 0o600
    assert "PRIVATE" in shown.own
    assert answer(served, shown, m.Join(who="me")) == m.Joined(place=PLACES[1])
    file.unlink()  # it is not needed any more, nor is the gate
    assert credentials(Address("127.0.0.1", 1), file) == shown


def test_the_private_key_never_reaches_the_gate(served, folder, tmp_path):
    shown = credentials(served.address, copied(folder, tmp_path))
    key = shown.own.split("-----")[2].strip()
    for file in (tmp_path / "certificates").iterdir():
        assert key not in file.read_text()


def test_a_machine_comes_back_with_its_certificate_to_the_next_gate(folder, tmp_path):
    file, first = copied(folder, tmp_path), Served(folder)
    try:
        shown = credentials(first.address, file)
    finally:
        first.close()
    second = Served(JoinFolder(tmp_path / "certificates"))
    try:
        again = credentials(second.address, file)
        assert again == shown
        assert answer(second, again, m.Join()) == m.Joined(place=PLACES[0])
    finally:
        second.close()


def test_a_machine_whose_answer_was_lost_gets_it_when_it_asks_again(served, folder, tmp_path):
    file = copied(folder, tmp_path)
    with pytest.raises(PeerError):
        credentials(Address("127.0.0.1", free_port()), file)  # a key is made, and nobody is there
    kept = json.loads(file.with_name("token.certificate").read_text())
    lost = certify(secret(folder), public_key(kept["key"]))
    with connected(served, newcomer(folder)) as channel:
        channel.send(lost)
        while not folder._known()[0].used:  # the machine ends before it reads the answer
            channel.wait(0.01)
            channel._read()
    shown = credentials(served.address, file)
    assert shown.own.startswith(kept["key"])
    assert answer(served, shown, m.Join()) == m.Joined(place=PLACES[0])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_that_a_token_is_used_is_on_disk_when_its_certificate_arrives(served, folder, tmp_path):
    said = answer(served, newcomer(folder), certify(secret(folder)))
    found = json.loads((tmp_path / "certificates" / "hosts.json").read_text())
    assert found["0"]["certificate"] == said.certificate


# ---- who does not, and what it is told

ROLES = ("worker", "server", "client", "host")
WRONG = {
    "no token": lambda folder, used: m.Join(who="me"),
    "an empty token": lambda folder, used: certify(""),
    "a wrong token": lambda folder, used: certify("0" * 32),
    "a token that is not ASCII": lambda folder, used: certify("ä" * 32),
    "a token that has run out": lambda folder, used: certify(secret(folder, 1)),
    "a token that is used": lambda folder, used: certify(used),
    "another folder's token": lambda folder, used: certify(other_secret(folder)),
    "no key": lambda folder, used: certify(secret(folder, 2), "no key"),
    "a message of machines": lambda folder, used: m.HostEnded(code=0, detail=""),
    "a message of masters": lambda folder, used: m.Leave(),
}


def other_secret(folder):
    other = JoinFolder(folder._path.with_name("other"))
    other.prepare(1)
    return secret(other)


@pytest.mark.parametrize("what", WRONG)
def test_before_proof_every_refusal_is_the_same_word(served, folder, what):
    used = secret(folder)
    answer(served, newcomer(folder), certify(used))
    folder.prepare(2, lasts_s=-1, renew=[1])
    said = answer(served, newcomer(folder), WRONG[what](folder, used))
    assert said == m.Refused(kind="JoinError", text=REFUSED, exit_code=JoinError.exit_code)
    until(lambda: not served.gate._hub.peers())
    assert served.events == []
    told = len(served.said)
    answer(served, newcomer(folder), WRONG[what](folder, used))
    assert len(served.said) == told  # a flood of it fills no screen
    if what != "no key":  # as if nobody had asked
        assert not folder._known()[1].used
    assert isinstance(answer(served, newcomer(folder), certify(secret(folder, 2))), m.Certified)


def closed_without_a_word(served, made, message):
    """A connection on which the gate says nothing at all after the handshake."""
    with socket.create_connection(served.address, timeout=600) as connection:
        arrived, leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = made.wrap_bio(arrived, leaving)
        try:
            while True:
                try:
                    ours.do_handshake()
                    ours.write(frame(message))
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(leaving.read())
                    data = connection.recv(1 << 16)
                    if not data:
                        return True
                    arrived.write(data)
            connection.sendall(leaving.read())
            return connection.recv(1 << 16) == b""
        except ConnectionResetError:
            return True


def at_most_1_2(shown):
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.maximum_version, made.check_hostname = ssl.TLSVersion.TLSv1_2, False
    made.load_verify_locations(cadata=shown.authority)
    return made


@pytest.mark.parametrize("role", ROLES)
def test_certificates_of_a_run_open_no_gate(served, folder, role):
    """They come from the run's own authority."""
    own = Authority().issue(Identity(role, 0)).own
    made = tls.context(Credentials(own, folder.credentials().authority), server=False)
    assert closed_without_a_word(served, made, m.Join())


@pytest.mark.parametrize("role", ["worker", "server", "client"])
def test_another_role_opens_no_gate_even_by_the_same_authority(served, folder, role):
    shown = folder._authority.issue(Identity(role, 0))
    assert answer(served, shown, m.Join()).text == REFUSED


def test_a_gate_is_no_machine(served, folder):
    """Its certificate accepts connections, and makes none."""
    made = tls.context(folder.credentials(), server=False)
    assert closed_without_a_word(served, made, m.Join())


def test_tls_1_2_is_closed(served, folder):
    assert closed_without_a_word(served, at_most_1_2(newcomer(folder)), certify(secret(folder)))
    assert not folder._known()[0].used


def test_a_certificate_that_no_token_has_bought_opens_nothing(served, folder):
    """As of somebody who had the authority's key for a moment, or before another token was made."""
    shown = folder._authority.issue(Identity("host", 0))
    assert answer(served, shown, m.Join()).text == REFUSED


def test_a_machine_whose_token_was_replaced_is_out(served, folder, tmp_path):
    shown = credentials(served.address, copied(folder, tmp_path))
    folder.prepare(2, renew=[0])
    assert answer(served, shown, m.Join()).text == REFUSED


def test_a_certificate_opens_the_place_of_its_own_machine_alone(served, folder, tmp_path):
    """Nothing that is sent says which one it is; and the token of a third one of two opens none."""
    third = credentials(served.address, copied(folder, tmp_path, 2))
    said = answer(served, third, m.Join())
    assert said.text == "the run expects 2 machines, and this is host 2."
    zero = credentials(served.address, copied(folder, tmp_path, 0))
    with connected(served, zero) as channel:
        channel.send(m.Join(who="one"))
        assert channel.receive(5.0) == m.Joined(place=PLACES[0])
        with connected(served, zero) as second:
            second.send(m.Join(who="another"))
            while served.gate._places[0].rival is None:  # its part of the handshake
                if second.wait(0.01):
                    second._read()
            channel.send(m.Heartbeat())
            assert "has joined already (one)" in second.receive(5.0).text
        assert served.gate.missing == [PLACES[1]]


@pytest.mark.parametrize("says", [m.Hello(token="", role="host", number=0, pid=1), m.Join()])
def test_a_machines_certificate_opens_no_master(served, folder, tmp_path, says):
    shown = credentials(served.address, copied(folder, tmp_path))
    board = Switchboard(authority=Authority())
    made = tls.context(Credentials(shown.own, board.authority.certificate), server=False)
    channel = Channel.connect(board.endpoint.address, 5.0, made)
    try:
        channel.send(says)
        arrived = []

        def serve_and_read():
            while True:
                arrived.extend(one for _, one in board.hub.receive(0.01) if one is not None)
                if channel.wait(0.01):
                    channel.read()

        with pytest.raises(PeerError):
            serve_and_read()
        assert arrived == []
    finally:
        channel.close()
        board.close()


def test_captured_bytes_that_are_sent_again_open_nothing(served, folder):
    sent = bytearray()
    with socket.create_connection(served.address, timeout=600) as connection:
        made = tls.context(newcomer(folder), server=False)
        ours, found = tls.Tls(made, server=False, accepted=lambda _: True), b""
        data = ours.begin() + ours.seal(frame(certify(secret(folder))))
        while not found:
            sent += data
            connection.sendall(data)
            found, data = ours.open(connection.recv(1 << 16))
    before = dict(folder._known())
    with socket.create_connection(served.address, timeout=600) as connection:
        connection.sendall(sent)
        heard = b""
        try:
            while data := connection.recv(1 << 16):
                heard += data
        except ConnectionResetError:
            pass
    assert b"Certified" not in heard
    assert folder._known() == before
    assert secret(folder).encode() not in sent


def test_strangers_that_say_nothing_keep_no_machine_out(served, folder, tmp_path):
    strangers = []
    try:
        for _ in range(3 * MOST_UNTRUSTED):
            strangers.append(socket.create_connection(served.address))
        shown = credentials(served.address, copied(folder, tmp_path))
        assert answer(served, shown, m.Join()) == m.Joined(place=PLACES[0])
        assert len(served.gate._hub.peers()) <= MOST_UNTRUSTED + 1
    finally:
        for each in strangers:
            each.close()


def test_a_gate_whose_folder_is_gone_serves_on_and_lets_nobody_in(served, folder, tmp_path):
    shown = credentials(served.address, copied(folder, tmp_path))
    (tmp_path / "certificates").rename(tmp_path / "away")
    for message, who in [(m.Join(), shown), (certify("0" * 32), newcomer(folder))]:
        with pytest.raises(PeerError, match="closed the connection"):
            answer(served, who, message)
    assert "cannot join" in served.said[-1]
    (tmp_path / "away").rename(tmp_path / "certificates")
    assert answer(served, shown, m.Join()) == m.Joined(place=PLACES[0])


# ---- what a machine tells whom


class Stranger:
    """Listens in the place of a gate; keeps all that it is sent, and what of it it can read."""

    def __init__(self, shown, newest=ssl.TLSVersion.TLSv1_3):
        self.raw, self.read = bytearray(), bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = Address(*self._listener.getsockname())
        self._made = tls.context(shown, server=True, newcomers=True)
        self._made.minimum_version, self._made.maximum_version = ssl.TLSVersion.TLSv1_2, newest
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        connection, _ = self._listener.accept()
        connection.settimeout(600)
        ours = tls.Tls(self._made, server=True, accepted=lambda _: True)
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.raw += data
                    found, back = ours.open(data)
                    self.read += found
                    connection.sendall(back)
            except (OSError, PeerError):
                pass

    def close(self):
        self._thread.join()
        self._listener.close()


@pytest.mark.parametrize("who", ["another authority's gate", "a machine", "a worker"])
def test_nobody_but_a_gate_of_its_authority_gets_the_secret(folder, tmp_path, who):
    """A man in the middle, or a machine of the same run that plays the gate."""
    if who == "another authority's gate":
        shown = JoinFolder(tmp_path / "other").credentials()
    else:
        role = {"a machine": "host", "a worker": "worker"}[who]
        shown = folder._authority.issue(Identity(role, 0))
    file, stranger = copied(folder, tmp_path), Stranger(shown)
    try:
        with pytest.raises(StrangerError):
            credentials(stranger.address, file)
    finally:
        stranger.close()
    assert len(stranger.raw) > 100  # it did call
    assert stranger.read == b""
    assert secret(folder).encode() not in stranger.raw


def test_a_gate_that_speaks_tls_1_2_is_told_nothing(folder, tmp_path):
    stranger = Stranger(folder.credentials(), newest=ssl.TLSVersion.TLSv1_2)
    try:
        with pytest.raises(PeerError):
            credentials(stranger.address, copied(folder, tmp_path))
    finally:
        stranger.close()
    assert stranger.read == b""
    assert secret(folder).encode() not in stranger.raw


def test_nobody_but_a_gate_of_its_authority_hears_who_comes_back(served, folder, tmp_path):
    file = copied(folder, tmp_path)
    credentials(served.address, file)
    stranger = Stranger(JoinFolder(tmp_path / "other").credentials())
    try:
        with pytest.raises(JoinError, match=r"was told nothing\. Copy the token file again"):
            Machine(stranger.address, file, print).serve()
    finally:
        stranger.close()
    assert stranger.read == b""


def test_a_program_that_speaks_no_tls_is_told_nothing(folder, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail ready\r\n" * 10)
                heard.append(connection.recv(1 << 16))

        heard, file = [], copied(folder, tmp_path)
        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(StrangerError):
            credentials(Address(*listener.getsockname()), file)
        thread.join()
    assert secret(folder).encode() not in heard[0]


@pytest.mark.parametrize("name", ["token", "token.certificate"])
def test_a_file_that_others_can_read_is_not_used(served, folder, tmp_path, name):
    file = copied(folder, tmp_path)
    credentials(served.address, file)
    (file.parent / name).chmod(0o640)
    with pytest.raises(JoinError, match=rf"others can read .*{name}. Use: chmod 600"):
        credentials(Address("127.0.0.1", 1), file)  # it does not even call


@pytest.mark.parametrize("text", ["", "0" * 32, "0" * 32 + "\nno certificate", "\x00"])
def test_a_file_that_is_no_token_is_refused(tmp_path, text):
    file = tmp_path / "token"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(JoinError, match="is no token file"):
        credentials(Address("127.0.0.1", 1), file)


def test_a_certificate_that_has_run_out_is_said(served, folder, tmp_path):
    file = copied(folder, tmp_path)
    credentials(served.address, file)
    beside = file.with_name("token.certificate")
    kept = json.loads(beside.read_text())
    run_out = folder._authority.issue(Identity("host", 0), timedelta(seconds=-1)).own
    kept["certificate"] = run_out[run_out.index("-----BEGIN CERTIFICATE") :]
    beside.write_text(json.dumps(kept))
    with pytest.raises(JoinError, match=r"has run out\. Get a new token file"):
        credentials(served.address, file)


@pytest.mark.parametrize("part", ["certificate", "key", "authority"])
def test_a_certificate_that_is_damaged_is_said(served, folder, tmp_path, part):
    file = copied(folder, tmp_path)
    credentials(served.address, file)
    beside = file.with_name("token.certificate")
    kept = json.loads(beside.read_text())
    kept[part] = kept[part].replace("A", "", 1)
    beside.write_text(json.dumps(kept))
    with pytest.raises(JoinError, match=r"token.certificate is damaged .*Remove the file"):
        credentials(served.address, file)


def test_another_token_takes_the_place_of_the_first(served, folder, tmp_path):
    file = copied(folder, tmp_path)
    first = credentials(served.address, file)
    folder.prepare(2, renew=[0])
    file.write_text(folder.token_file(0).read_text())
    second = credentials(served.address, file)
    assert second != first
    assert answer(served, second, m.Join()) == m.Joined(place=PLACES[0])


def test_two_copies_of_one_token_let_one_machine_in(served, folder, tmp_path):
    one, two = (copied(folder, tmp_path / name) for name in made(tmp_path, "a", "b"))
    credentials(served.address, one)
    with pytest.raises(JoinError, match="its token is wrong or used, or has run out"):
        credentials(served.address, two)
    assert "the token of host 0 is used already" in served.said[-1]


def made(folder, *names):
    for name in names:
        (folder / name).mkdir()
        yield name


@pytest.mark.parametrize("ahead_s", [DAY_S / 2, -DAY_S / 2])
def test_clocks_that_differ_by_half_a_day_do_no_harm(tmp_path, ahead_s):
    folder = JoinFolder(tmp_path / "certificates", clock=lambda: time.time() + ahead_s)
    folder.prepare(1)
    served = Served(folder)
    try:
        shown = credentials(served.address, copied(folder, tmp_path))
        assert answer(served, shown, m.Join()) == m.Joined(place=PLACES[0])
    finally:
        served.close()


def test_a_clock_that_is_days_behind_is_said(tmp_path):
    folder = JoinFolder(tmp_path / "certificates", clock=lambda: time.time() + 3 * DAY_S)
    folder.prepare(1)
    served = Served(folder)
    try:
        with pytest.raises(JoinError, match="look at this machine's clock"):
            Machine(served.address, copied(folder, tmp_path), print).serve()
    finally:
        served.close()


def test_a_token_waits_no_longer_than_it_lasts(tmp_path):
    ahead = [0.0]
    folder = JoinFolder(tmp_path / "certificates", clock=lambda: time.time() + ahead[0])
    folder.prepare(1)
    served = Served(folder)
    try:
        ahead[0] = LASTS_S + 1
        with pytest.raises(JoinError, match="has run out"):
            credentials(served.address, copied(folder, tmp_path))
    finally:
        served.close()
