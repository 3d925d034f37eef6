"""The process that copies checkpoints: a fault of its start is none of the run."""

import errno
import subprocess

import pytest

from instep.client import copying
from instep.data.shards.urls import download
from instep.errors import DataError


class Process:
    """One that has ended, having said something."""

    returncode = pid = 0

    def __init__(self, *_, stdout, **__):
        stdout.write('{"name": "checkpoint_copied", "fields": {"step": 7, "url": "a://b"}}\n')
        stdout.flush()

    def poll(self):
        return 0


def test_a_process_that_cannot_be_started_is_a_warning_and_tried_again(tmp_path, monkeypatch):
    def short(*_, **__):
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(copying, "AGAIN_S", -1.0)
    monkeypatch.setattr(subprocess, "Popen", short)
    follower = copying.Copying(tmp_path, quiet=True)
    (warning,) = follower.events()
    assert warning.name == "warning"
    assert "cannot be started: [Errno 11] Resource temporarily unavailable" in str(warning.fields)
    assert follower.events() == []
    monkeypatch.setattr(subprocess, "Popen", Process)
    assert follower.events() == []
    assert [each.name for each in follower.events()] == ["checkpoint_copied"]
    follower._close()


def test_what_an_ended_process_has_said_is_heard_before_another_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "AGAIN_S", -1.0)
    monkeypatch.setattr(subprocess, "Popen", Process)
    follower = copying.Copying(tmp_path, quiet=True)
    for _ in range(3):
        assert [each.name for each in follower.events()] == ["checkpoint_copied"]
    follower._close()


def test_a_process_that_is_never_started_is_said_at_the_end(tmp_path, monkeypatch, capsys):
    def short(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(subprocess, "Popen", short)
    copying.Copying(tmp_path, quiet=True).end()
    assert "cannot be started: [Errno 12] Cannot allocate memory. The run's" in (
        capsys.readouterr().err
    )


def test_copies_that_do_not_answer_are_named_with_a_remedy(tmp_path, monkeypatch):
    def silent(*_):
        raise OSError(errno.ECONNREFUSED, "Connection refused")

    monkeypatch.setattr(download, "PAUSES_S", (0.0,))
    monkeypatch.setattr(download, "file_system", silent)
    with pytest.raises(
        DataError, match=r"s3://b/digits.*refused.* machine reaches it and may read"
    ):
        copying.folder_of("s3://b/digits", tmp_path / "restored")
    assert not (tmp_path / "restored").exists()
