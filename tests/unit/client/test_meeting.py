"""Where the processes of one start meet: at a file."""

import os
import socket
import stat
import threading
import time

import pytest

from instep.client import running
from instep.client.join import meet, meeting
from instep.client.join.meeting import ENDPOINT as NAME
from instep.client.join.meeting import MeetingFile, find, write
from instep.comm.protocol import connection
from instep.comm.protocol.channel import Address
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import PeerError, RunError
from instep.job.spec import JobSpec
from instep.store import folder

ENDPOINT = Endpoint(Address("127.0.0.1", 4567), "a token")


def test_an_invitation_is_found_and_is_for_the_users_eyes_only(tmp_path):
    file = tmp_path / "runs" / "meeting"
    write(MeetingFile(file), ENDPOINT)
    assert find(MeetingFile(file)) == ENDPOINT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [f.name for f in file.parent.iterdir()] == ["meeting"]


def test_a_stale_invitation_is_waited_out(tmp_path):
    file = MeetingFile(tmp_path / "meeting")
    write(file, ENDPOINT)
    found = []
    waiting = threading.Thread(target=lambda: found.append(find(file, {"a token"})))
    waiting.start()
    fresh = Endpoint(Address("127.0.0.1", 1234), "another token")
    write(file, fresh)
    waiting.join()
    assert found == [fresh]


def test_who_comes_first_waits_for_the_invitation(tmp_path):
    found = []
    waiting = threading.Thread(target=lambda: found.append(find(MeetingFile(tmp_path / "meeting"))))
    waiting.start()
    write(MeetingFile(tmp_path / "meeting"), ENDPOINT)
    waiting.join()
    assert found == [ENDPOINT]


def test_an_invitation_that_does_not_come_is_not_waited_for_without_end(tmp_path):
    with pytest.raises(RunError, match=r"process 0 has not written .*meeting in 10 ms"):
        find(MeetingFile(tmp_path / "meeting"), timeout_s=0.01)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1]",
        "null",
        '{"host": 5, "port": 4567, "token": "x"}',
        '{"host": "127.0.0.1", "port": "a", "token": "x"}',
        '{"host": "127.0.0.1", "port": 70000, "token": "x"}',
        '{"host": "127.0.0.1", "port": 4567, "token": []}',
        b"\xff\xfe",
    ],
)
def test_a_damaged_invitation_is_as_good_as_none_until_the_next(tmp_path, text):
    file = tmp_path / "meeting"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RunError, match="process 0 has not written"):
        find(MeetingFile(file), timeout_s=0.01)
    write(MeetingFile(file), ENDPOINT)
    assert find(MeetingFile(file)) == ENDPOINT


def stranger(monkeypatch, file):
    other = file.stat().st_uid + 1
    monkeypatch.setattr("os.geteuid", lambda: other)


NOT_BELIEVED = {
    "belongs to user": stranger,
    "others can write it": lambda _, file: file.chmod(0o620),
    "it is a link": lambda _, file: file.symlink_to(file.rename(file.with_name("elsewhere"))),
    "a named pipe": lambda _, file: (file.unlink(), os.mkfifo(file)),
}


@pytest.mark.parametrize("why", NOT_BELIEVED)
def test_an_invitation_that_somebody_else_may_have_written_is_not_believed(
    tmp_path, monkeypatch, why
):
    at = MeetingFile(tmp_path / "endpoint.json")
    write(at, ENDPOINT)
    NOT_BELIEVED[why](monkeypatch, at.file)
    with pytest.raises(RunError, match=f"has not written .* not believed: .*{why}"):
        find(at, timeout_s=0.01)
    run = folder.make_run_folder(tmp_path, JobSpec(recipe="a.py:f"), named=False)
    at.file.rename(run / at.file.name)
    with pytest.raises(RunError, match=f"not believed: .*{why}.*as the user of the run"):
        running.call(run)


def test_what_killed_starts_have_left_goes_with_the_next_start(tmp_path):
    def left(name, run="", *, old=False, text=None):
        file = tmp_path / name
        write(MeetingFile(file), ENDPOINT, run=run)
        if text:
            file.write_text(text)
        if old:
            os.utime(file, (0, 0))
        return file

    for name in ("living", "ended"):
        (tmp_path / name).mkdir()
        (tmp_path / name / folder.ID).touch()
    stays = [
        left(".meeting-a.json", "living", old=True),
        left(".meeting-b.json"),
        left(".meeting-b.json.0-to-1", text="{}"),
        left("endpoint.json", old=True),
    ]
    left(".meeting-c.json", "ended")
    left(".meeting-d.json", "removed")
    left(".meeting-e.json.0-to-1", text="{}", old=True)
    left("..meeting-f.json.123", text="{", old=True)
    with folder.held(tmp_path / "living"):
        meeting.remove_old(tmp_path)
    assert sorted(path for path in tmp_path.iterdir() if path.is_file()) == sorted(stays)


@pytest.fixture
def gone():
    """Where nothing listens any more."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = Address(*taken.getsockname())
    return Endpoint(address, "the token of a run")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(meet, "LATE_S", 0.1)
    monkeypatch.setattr(meet, "FORMER_S", 0.6)
    monkeypatch.setattr(meet, "AGAIN_S", 0.1)


def test_a_master_of_this_start_that_refuses_connections_is_named_at_once(
    tmp_path, gone, quick, monkeypatch
):
    monkeypatch.setattr(meet, "FORMER_S", 600.0)
    at, began = MeetingFile(tmp_path / "meeting"), time.monotonic()
    write(at, gone)
    with pytest.raises(RunError, match=r"127.0.0.1:\d+, .*\(Connection refused\)"):
        meet.meet(at, 1)
    assert time.monotonic() - began < meet.FORMER_S


def test_what_a_former_start_may_have_left_is_waited_out_longer_but_not_for_ever(
    tmp_path, gone, quick, monkeypatch
):
    at, began = MeetingFile(tmp_path / "meeting"), time.monotonic()
    write(at, gone)
    monkeypatch.setattr(meeting, "started_at", lambda: time.time() + 1)  # after the note
    with pytest.raises(RunError, match=r"\(Connection refused\)"):
        meet.meet(at, 1)
    assert time.monotonic() - began >= meet.FORMER_S


def test_once_process_0_has_removed_what_was_left_its_own_is_waited_for(
    tmp_path, gone, quick, monkeypatch
):
    at, found = MeetingFile(tmp_path / "meeting"), []
    monkeypatch.setattr(meet, "FORMER_S", 0.2)
    write(at, gone)
    monkeypatch.setattr(meeting, "started_at", lambda: time.time() + 1)
    waiting = threading.Thread(target=lambda: found.append(meet.meet(at, 1)))
    monkeypatch.setattr(meet, "Member", _refused_once(found))
    waiting.start()
    while not found:
        time.sleep(0.01)
    at.remove(NAME)
    time.sleep(0.3)
    write(at, ENDPOINT)
    waiting.join()
    assert found == ["refused", ENDPOINT]


def _refused_once(found):
    def member(endpoint, _):
        if endpoint == ENDPOINT:
            return endpoint
        found.append("refused")
        try:
            raise ConnectionRefusedError(111, "Connection refused")
        except ConnectionRefusedError:
            raise PeerError("no master answers.") from None

    return member


def test_what_takes_a_connection_and_says_nothing_is_named_after_a_while(
    tmp_path, quick, monkeypatch
):
    at = MeetingFile(tmp_path / "meeting")
    monkeypatch.setattr(connection, "ANSWER_S", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        write(at, Endpoint(Address(*silent.getsockname()), "the token of a run"))
        with pytest.raises(RunError, match=r"127.0.0.1:\d+, .*does not answer, for 0.3 s"):
            meet.meet(at, 1)
