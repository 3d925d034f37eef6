"""Processes that come to a run that cannot begin, or is over, all hear so."""

import threading

import pytest

from instep.client.join.meeting import MeetingFile
from instep.client.join.refusal import answer_all
from instep.comm.protocol.channel import MOST_UNTRUSTED, Channel
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.messages import Hello, Refused, Welcome
from instep.engine.member import Member
from instep.errors import CheckpointError, PeerError, WorkerError

REFUSED = Refused(kind="CheckpointError", text="it is damaged.", exit_code=7)


@pytest.fixture
def meeting(tmp_path):
    made = MeetingFile(tmp_path / "meeting")
    made.put("", b"here")
    return made


def told(answer, meeting, numbers, **options):
    """Who got the answer, what each made of it, and whether the file was there still."""
    switchboard, found = Switchboard(), {}

    def come(number):
        try:
            found[number] = Member(switchboard.endpoint, number), meeting.file.exists()
        except Exception as error:
            found[number] = error, meeting.file.exists()

    threads = [threading.Thread(target=come, args=(number,)) for number in numbers]
    for thread in threads:
        thread.start()
    heard = answer_all(switchboard, answer=answer, meeting=meeting, **{"count": 3, **options})
    for thread in threads:
        thread.join()
    return heard, found


def test_all_raise_the_same_kind_of_error_once_the_meeting_file_is_gone(meeting):
    heard, found = told(REFUSED, meeting, [1, 2, 3])
    assert heard == {1, 2, 3}
    for error, was_there in found.values():
        assert type(error) is CheckpointError
        assert (str(error), error.exit_code) == ("it is damaged.", 7)
        assert not was_there


def test_an_error_that_is_not_ours_arrives_as_that_of_a_worker(meeting):
    odd = Refused(kind="error", text="KeyError: 'x'", exit_code=5)
    _, found = told(odd, meeting, [1], count=1)
    assert type(found[1][0]) is WorkerError


def test_whoever_does_not_come_is_not_waited_for_without_end(meeting):
    heard, found = told(REFUSED, meeting, [2], timeout_s=1.0)
    assert heard == {2}
    assert type(found[2][0]) is CheckpointError
    assert not meeting.file.exists()


def test_more_processes_than_strangers_may_come_all_hear_the_answer(meeting):
    switchboard, count = Switchboard(), MOST_UNTRUSTED + 10
    channels = [Channel.connect(switchboard.endpoint.address) for _ in range(count)]
    for number, channel in enumerate(channels):
        token = switchboard.endpoint.token
        channel.send(Hello(token=token, role="worker", number=number, pid=1))
    assert answer_all(switchboard, count, REFUSED, meeting) == {*range(count)}
    for channel in channels:
        assert channel.receive() == REFUSED
        channel.close()


def test_a_run_that_is_over_is_known_as_such(meeting, tmp_path):
    job = 'recipe = "a.py:f"'
    over = Welcome(job=job, run=str(tmp_path), started=1.0, complete=True)
    _, found = told(over, meeting, [0, 1, 2])
    for member, _ in found.values():
        assert (member.complete, member.run) == (True, tmp_path)
        member.close()


def test_a_stranger_is_told_nothing(meeting):
    switchboard = Switchboard()
    channel = Channel.connect(switchboard.endpoint.address)
    channel.send(Hello(token="guessed", role="worker", number=1, pid=1))
    assert answer_all(switchboard, 1, REFUSED, meeting, timeout_s=0.2) == set()
    with pytest.raises(PeerError):
        channel.receive()
    channel.close()
