"""The folder of `instep certificates`: tokens that work once and run out, and nobody else reads."""

import fcntl
import json
import ssl
import threading
import time

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from instep.cli import main
from instep.comm.encryption.certificates import new_key, public_key
from instep.errors import JoinError, SpecError
from instep.launch import join_folder
from instep.launch.join_folder import LASTS_S, JoinFolder
from instep.launch.join_token import Token


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def folder(tmp_path, clock):
    made = JoinFolder(tmp_path / "certificates", clock=clock)
    made.prepare(2)
    return made


@pytest.fixture
def key():
    return public_key(new_key())


def secret(folder, host=0):
    return Token.read(folder.token_file(host)).secret


def der(certificate):
    return ssl.PEM_cert_to_DER_cert(certificate)


def test_all_that_is_in_the_folder_is_its_owners_alone(tmp_path, folder):
    path = tmp_path / "certificates"
    assert path.stat().st_mode & 0o777 == 0o700
    names = {file.name for file in path.iterdir()}
    assert names == {"authority.pem", "hosts.json", "host-0.token", "host-1.token", ".lock"}
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o600}
    records = (path / "hosts.json").read_text()
    assert secret(folder) not in records
    assert "PRIVATE" not in folder.token_file(0).read_text()


def test_every_machine_has_a_secret_of_its_own_and_the_same_authority(folder):
    first, second = (Token.read(folder.token_file(host)) for host in (0, 1))
    assert first.secret != second.secret
    assert first.authority == second.authority


def test_tokens_that_wait_stay_and_those_that_ran_out_are_replaced(folder, clock):
    before = secret(folder)
    assert folder.prepare(2) == []
    clock.ahead = LASTS_S - 60
    assert folder.prepare(3) == [2]
    assert secret(folder) == before
    clock.ahead = LASTS_S + 1
    assert folder.prepare(2) == [0, 1]
    assert secret(folder) != before


def test_a_token_that_others_have_seen_is_replaced(folder, key):
    seen = secret(folder)
    folder.token_file(0).chmod(0o640)
    assert folder.prepare(2) == [0]
    assert folder.token_file(0).stat().st_mode & 0o777 == 0o600
    with pytest.raises(JoinError, match="no token of this folder"):
        folder.certify(seen, key)


def test_a_used_token_is_not_replaced_even_if_its_file_is_gone(folder, clock, key):
    bought = folder.certify(secret(folder), key)
    folder.token_file(0).unlink()
    clock.ahead = LASTS_S + 1
    assert folder.prepare(1) == []
    assert folder.is_current(0, der(bought))


def test_a_token_works_once_also_for_another_process(tmp_path, folder, key):
    bought = folder.certify(secret(folder), key)
    again = JoinFolder(tmp_path / "certificates")
    assert again.certify(secret(folder), key) == bought  # its answer was lost
    for each in (folder, again):
        with pytest.raises(JoinError, match="the token of host 0 is used already"):
            each.certify(secret(folder), public_key(new_key()))
    assert folder.certify(secret(folder, 1), key) != bought


def test_of_many_that_ask_at_once_with_one_token_one_gets_a_certificate(tmp_path, folder):
    keys, got, word = [public_key(new_key()) for _ in range(8)], [], secret(folder)

    def ask(key):
        try:
            got.append(JoinFolder(tmp_path / "certificates").certify(word, key))
        except JoinError:
            pass

    threads = [threading.Thread(target=ask, args=(key,)) for key in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    assert folder.is_current(0, der(got[0]))


def test_a_token_runs_out(folder, clock, key):
    clock.ahead = LASTS_S + 1
    with pytest.raises(JoinError, match="the token of host 0 has run out"):
        folder.certify(secret(folder), key)


def test_an_answer_that_was_lost_is_given_again_even_after_the_token_has_run_out(
    folder, clock, key
):
    bought = folder.certify(secret(folder), key)
    clock.ahead = LASTS_S + 1
    assert folder.certify(secret(folder), key) == bought


def test_no_certificate_leaves_unless_it_is_on_disk_that_the_token_is_used(
    tmp_path, folder, key, monkeypatch
):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(join_folder, "replace_plain", full)
        with pytest.raises(OSError):
            folder.certify(secret(folder), key)
    assert not json.loads((tmp_path / "certificates" / "hosts.json").read_text())["0"]["public_key"]
    assert folder.certify(secret(folder), key)


def test_a_process_that_was_stopped_while_it_had_the_folder_is_not_waited_for(
    tmp_path, folder, monkeypatch
):
    monkeypatch.setattr("instep.launch.join_folder.LOCKED_S", 0.2)
    with open(tmp_path / "certificates" / ".lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(SpecError, match="another process has locked"):
            folder.is_current(0, b"")
    assert not folder.is_current(0, b"")


def test_another_token_shuts_out_what_the_first_one_bought(folder, key):
    bought = folder.certify(secret(folder), key)
    assert folder.prepare(2, renew=[0]) == [0]
    assert not folder.is_current(0, der(bought))
    assert folder.is_current(0, der(folder.certify(secret(folder), key)))
    assert not folder.is_current(0, der(bought))


def pem(key):
    return key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: "no key",
        lambda: "",
        new_key,
        lambda: pem(ed25519.Ed25519PrivateKey.generate()),
        lambda: pem(ec.generate_private_key(ec.SECP384R1())),
        lambda: pem(rsa.generate_private_key(65537, 1024)),
    ],
)
def test_only_a_public_key_of_our_kind_is_certified_and_the_token_is_not_lost(folder, key, wrong):
    with pytest.raises(JoinError, match="host 0 sent no key"):
        folder.certify(secret(folder), wrong())
    assert folder.certify(secret(folder), key)


def test_a_folder_that_cannot_be_trusted_is_refused(tmp_path, folder, clock):
    path = tmp_path / "certificates"
    clock.ahead = 366 * 24 * 3600.0
    with pytest.raises(SpecError, match="has run out: remove the folder"):
        JoinFolder(path, clock=clock)
    (path / "authority.pem").chmod(0o644)
    with pytest.raises(SpecError, match=r"others can read the key in .*: remove the folder"):
        JoinFolder(path)
    (path / "authority.pem").write_text("no key")
    (path / "authority.pem").chmod(0o600)
    with pytest.raises(SpecError, match="has no key and certificate"):
        JoinFolder(path)
    path.chmod(0o770)
    with pytest.raises(SpecError, match=r"others can write into .* chmod 700"):
        JoinFolder(path)
    with pytest.raises(SpecError, match=r"cannot be kept in .*No such file"):
        JoinFolder(tmp_path / "none" / "certificates")


def test_the_command_makes_tokens_and_says_where_they_are(tmp_path, capsys):
    path = tmp_path / "certificates"
    command = ["certificates", str(path), "--hosts", "2", "--lasts"]
    assert main([*command, "30m"]) == 0
    assert f"token   {path}/host-1.token" in capsys.readouterr().out
    until = json.loads((path / "hosts.json").read_text())["1"]["until"]
    assert until == pytest.approx(time.time() + 1800, abs=60)
    assert main([*command, "1h", "--renew", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == [f"{path}/host-1.token"]
    assert main([*command, "1h"]) == 0
    assert "none is needed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--hosts", "0"], "--hosts 0: needs at least one machine"),
        (["--hosts", "2", "--renew", "2"], "--renew 2: hosts are counted from 0"),
        (["--hosts", "2", "--lasts", "long"], "--lasts: 'long' is no length of time"),
    ],
)
def test_a_command_that_makes_no_sense_makes_nothing(tmp_path, capsys, words, text):
    assert main(["certificates", str(tmp_path / "c"), *words]) == SpecError.exit_code
    assert text in capsys.readouterr().err
    assert not (tmp_path / "c").exists()
