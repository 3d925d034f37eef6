"""Where the processes of one start meet: at a file."""

import stat
import threading

import pytest

from instep.client.meeting import MeetingFile, find, write
from instep.comm.channel import Address
from instep.comm.endpoint import Endpoint
from instep.errors import RunError

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
