"""Where processes meet whose hosts share no folder: an address of process 0."""

import contextlib
import random
import socket
import stat
import threading
import time

import pytest
from cryptography import x509

from instep.client.join import meet, refusal, rendezvous, rendezvous_client
from instep.client.join.meeting import ENDPOINT, MeetingFile, find, read, write
from instep.client.join.placement import Placement
from instep.client.join.refusal import announced, notes
from instep.client.join.rendezvous import Rendezvous, meeting_at
from instep.comm.encryption import tls
from instep.comm.encryption.certificates import Authority, Identity
from instep.comm.protocol import channel
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address, Channel
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import InstepError, JoinError, PeerError, RunError, SpecError

MASTER = Endpoint(Address("127.0.0.1", 4567), "the token of a run")


REFUSED = m.Refused(kind="JoinError", text="refused", exit_code=9)


def answers(port, message, secret=None):
    """All that process 0 answers to a message, before it hangs up."""
    made = None
    if secret is not None:
        shown = Authority.of_secret(secret).issue(Identity("worker", 1))
        made = tls.context(shown, server=False)
    caller, found = Channel.connect(Address("127.0.0.1", port), context=made), []
    caller.send(message)
    with contextlib.suppress(PeerError):
        while True:
            found.append(caller.receive())
    caller.close()
    return found


def place(rank, key="this start"):
    return Placement(rank, 3, rank, 3, key)


@pytest.fixture
def port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@pytest.fixture
def at(port, tmp_path):
    """`at(rank)`: how this process meets the others, all of which have the same token."""
    made = []

    def begin(rank, key="this start", token_file=None):
        file = token_file or tmp_path / "token"
        where = f"127.0.0.1:{port}"
        made.append(meeting_at(place(rank, key), tmp_path, where, file, {}))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_others_learn_where_the_master_listens_and_only_process_0_writes_a_file(at, tmp_path):
    zero, one = at(0), at(1)
    one.enter()
    assert read(one) is None
    write(zero, MASTER)
    assert find(one) == MASTER
    zero.remove(ENDPOINT)
    assert read(one) is None
    assert [path.name for path in tmp_path.iterdir()] == ["token"]
    assert stat.S_IMODE((tmp_path / "token").stat().st_mode) == 0o600


def test_who_comes_before_process_0_and_before_its_token_waits(at, tmp_path):
    one = at(1)
    waiting = threading.Thread(target=one.enter)
    waiting.start()
    time.sleep(0.3)
    at(0)
    waiting.join()
    assert one.put("1-to-0", b"here")


def test_who_has_another_token_is_told_nothing_and_tells_nothing(at, port, tmp_path):
    at(0)
    wrong = tmp_path / "wrong"
    wrong.write_text("0" * 32 + "\n")
    wrong.chmod(0o600)
    with pytest.raises(JoinError, match=rf"127.0.0.1:{port} does not have the token in "):
        at(1, token_file=wrong).enter()
    assert answers(port, m.Meet(token="0" * 32), secret="0" * 32) == []


def test_a_token_that_can_be_guessed_is_refused(at, tmp_path):
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "token").chmod(0o600)
    with pytest.raises(JoinError, match=r"is too short to encrypt with\. Make one with: openssl"):
        at(0)


@pytest.mark.parametrize("message", [m.StoreGet(key=""), m.StoreSet(key="", value=b"mine")])
def test_without_a_token_nothing_is_read_and_nothing_is_written(at, port, tmp_path, message):
    zero = at(0)
    write(zero, MASTER)
    assert answers(port, message) == []
    assert answers(port, message, (tmp_path / "token").read_text().strip()) == [REFUSED]
    assert read(zero) == MASTER


def test_every_process_makes_its_own_certificate_of_the_runs_authority(at):
    zero, one, authority = at(0), at(1), Authority()
    write(zero, MASTER, authority)
    shown = read(one, 1).credentials
    assert shown.authority == authority.certificate
    certificate = x509.load_pem_x509_certificate(shown.own.encode())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [Identity("worker", 1).uri]
    assert read(one, 1).token == MASTER.token


@pytest.mark.parametrize(("size", "most"), [(100, 4), (500, 2)])
def test_processes_of_a_large_start_look_less_often(at, tmp_path, port, monkeypatch, size, most):
    at(0)
    one = meeting_at(Placement(1, size, 1, size, "this start"), tmp_path, f"127.0.0.1:{port}",
                     tmp_path / "token", {})  # fmt: skip
    one.enter()
    looks = []
    with pytest.raises(RunError):
        find(one, timeout_s=0.5, look=lambda: looks.append(1))
    assert 1 < len(looks) <= most
    one.close()


def test_strangers_in_any_number_keep_nobody_out(at, port):
    zero, one = at(0), at(1)
    write(zero, MASTER)
    dice = random.Random(5)
    with contextlib.ExitStack() as strangers:
        for number in range(200):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", port)))
            if number % 2:
                with contextlib.suppress(OSError):
                    stranger.sendall(dice.randbytes(dice.randint(1, 300)))
        one.enter()
        assert read(one) == MASTER


def test_a_token_that_others_can_read_is_refused(at, tmp_path):
    (tmp_path / "token").write_text("ab" * 16 + "\n")
    (tmp_path / "token").chmod(0o644)
    for rank in (0, 1):
        with pytest.raises(JoinError, match=r"others can read .*token\. Use: chmod 600"):
            at(rank).enter()


def test_the_process_0_of_another_start_is_waited_out(at, monkeypatch):
    monkeypatch.setattr(rendezvous_client, "NO_ANSWER_S", 0.5)
    at(0, key="the last start")
    with pytest.raises(JoinError, match="the start the last start is there"):
        at(1).enter()


def test_where_nobody_answers_address_port_and_firewall_are_named(at, port, monkeypatch, tmp_path):
    monkeypatch.setattr(rendezvous_client, "NO_ANSWER_S", 0.3)
    monkeypatch.setattr(rendezvous_client, "SAY_AFTER_S", 0.1)
    with pytest.raises(JoinError, match=r"there is no .*token here"):
        at(1).enter()
    (tmp_path / "token").write_text("ab" * 16 + "\n")
    (tmp_path / "token").chmod(0o600)
    words = rf"does not answer at 127.0.0.1:{port} \(Connection refused\).* firewall closes port"
    with pytest.raises(JoinError, match=words):
        at(1).enter()


def test_another_torch_is_said_by_the_process_that_has_it(at, monkeypatch):
    at(0)
    ours, here = rendezvous.versions(), threading.get_ident()

    def other_here():
        return (ours[0], ("torch", "1.0")) if threading.get_ident() == here else ours

    for each in (rendezvous, rendezvous_client):
        monkeypatch.setattr(each, "versions", other_here)
    with pytest.raises(SpecError, match=r"process 1 has torch 1\.0, and that of process 0 "):
        at(1).enter()


def test_an_error_before_the_master_is_there_reaches_process_0(at):
    zero, one = at(0), at(1)

    def fails():
        with pytest.raises(SpecError), announced(place(1), one):
            raise SpecError("there is no epoks.")

    failing = threading.Thread(target=fails)
    failing.start()
    while not (found := notes(zero, 0)):
        time.sleep(0.01)
    failing.join()
    assert [(n, str(error)) for n, error in found.items()] == [(1, "there is no epoks.")]
    assert notes(zero, 0) == {}


def test_a_master_whose_port_is_closed_is_named_with_the_reason(at, monkeypatch):
    zero, one = at(0), at(1)
    write(zero, MASTER)

    def unreachable(*_):
        try:
            raise TimeoutError(110, "Connection timed out")
        except TimeoutError:
            raise PeerError("no master answers.") from None

    monkeypatch.setattr(meet, "call", unreachable)
    with pytest.raises(RunError, match=r"at 127.0.0.1:4567, .*timed out.* open all ports"):
        meet.meet(one, 1)


def test_a_master_whose_port_swallows_packets_is_named_after_some_seconds(at, monkeypatch):
    monkeypatch.setattr(channel, "CONNECT_S", 0.3)
    monkeypatch.setattr(meet, "AGAIN_S", 0.1)
    zero, one = at(0), at(1)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as queue:
        with contextlib.suppress(TimeoutError):
            while True:  # until the kernel drops what asks for a connection
                queue.enter_context(socket.create_connection(full.getsockname(), timeout=0.1))
        write(zero, Endpoint(Address(*full.getsockname()), "the token of a run"))
        with pytest.raises(RunError, match=r"nothing can be reached there \(timed out\)"):
            meet.meet(one, 1)


def test_a_master_that_is_gone_or_behind_a_firewall_that_refuses_is_named(at, monkeypatch):
    monkeypatch.setattr(meet, "LATE_S", 0.3)
    zero, one = at(0), at(1)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        gone = Address(*taken.getsockname())
    write(zero, Endpoint(gone, "the token of a run"))
    with pytest.raises(RunError, match=rf"at 127.0.0.1:{gone.port}, .*\(Connection refused\)"):
        meet.meet(one, 1)


def test_who_comes_late_to_a_process_0_that_failed_gets_the_cause(at, monkeypatch):
    monkeypatch.setattr(refusal, "BRIEFLY_S", 0.1)
    zero, one = at(0), at(1)

    def fails():
        with pytest.raises(SpecError), announced(Placement(0, 2, 0, 2, "this start"), zero):
            raise SpecError("there is no epoks.")

    failing = threading.Thread(target=fails)
    failing.start()
    time.sleep(0.5)
    one.enter()
    with pytest.raises(SpecError, match="no epoks"):
        meet.meet(one, 1)
    failing.join(2)
    assert not failing.is_alive()  # it does not stay once all know


def test_a_process_0_that_was_there_and_is_gone_is_not_waited_for_without_end(at, monkeypatch):
    monkeypatch.setattr(rendezvous_client, "LOST_S", 0.3)
    zero, one = at(0), at(1)
    one.enter()
    assert read(one) is None
    zero.close()
    words = r"was at 127.0.0.1:\d+ and does not answer there any more \(Connection refused\)"
    with pytest.raises(JoinError, match=words):
        find(one)


def test_between_two_sessions_process_0_may_be_away_for_longer(at, monkeypatch):
    monkeypatch.setattr(rendezvous_client, "LOST_S", 0.1)
    zero, _, again = at(0), at(1), at(1)
    again.enter()
    zero.close()
    found = []
    waiting = threading.Thread(target=lambda: found.append(find(again)))
    waiting.start()
    time.sleep(0.7)
    write(at(0), MASTER)
    waiting.join(600)
    assert found == [MASTER]


@pytest.mark.parametrize(
    ("where", "file", "words"),
    [
        ("29600", "token", "needs the machine of process 0 and a free port"),
        ("node1:0", "token", "needs the machine of process 0 and a free port"),
        ("127.0.0.1:29600", None, "Name its file with token_file or INSTEP_TOKEN_FILE"),
        ("no.such.name.invalid:1", "token", "leads to no address"),
        ("192.0.2.1:29600", "token", "process 0 cannot listen there .* its machine"),
    ],
)
def test_the_error_for_a_mistake_is_one_sentence(tmp_path, where, file, words):
    path = tmp_path / file if file else None
    with pytest.raises(InstepError, match=words):
        meeting_at(place(0), tmp_path, where, path, {})


@pytest.mark.parametrize(("where", "leads_to"), [("0.0.0.0", "0.0.0.0"), ("node1", "127.0.1.1")])
@pytest.mark.parametrize("rank", [0, 2])
def test_an_address_that_other_machines_cannot_reach_is_refused(
    tmp_path, monkeypatch, where, leads_to, rank
):
    monkeypatch.setattr(socket, "gethostbyname", lambda _: leads_to)  # as in Debian's /etc/hosts
    apart = Placement(rank, 3, 0, 1, "this start")
    words = rf"{where} leads to {leads_to} on the machine of process {rank}, which other machines "
    with pytest.raises(SpecError, match=words):
        meeting_at(apart, tmp_path, f"{where}:29600", tmp_path / "token", {})
    assert not list(tmp_path.iterdir())


def test_the_environment_may_say_it_and_a_process_alone_needs_none(tmp_path, port):
    said = {
        "INSTEP_RENDEZVOUS": f"127.0.0.1:{port}",
        "INSTEP_TOKEN_FILE": str(tmp_path / "token"),
    }
    found = meeting_at(place(0), tmp_path, None, None, said)
    assert isinstance(found, Rendezvous)
    found.close()
    alone = Placement(0, 1, 0, 1, "alone")
    for at in (meeting_at(alone, tmp_path, None, None, said),
               meeting_at(place(0), tmp_path, None, None, {})):  # fmt: skip
        assert isinstance(at, MeetingFile)
