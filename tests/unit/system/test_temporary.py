"""Temporary folders are gone afterwards, also those of killed processes."""

import os
import signal

import pytest

from instep.system.temporary import temporary_folder


def left_by_a_killed_process(place):
    """The folder of a process that SIGKILL ended while it was in use."""
    end, told = os.pipe()
    if (pid := os.fork()) == 0:
        with temporary_folder("instep-test-", place) as folder:
            (folder / "inside").mkdir()
            (folder / "inside" / "file").write_text("a model")
            os.write(told, os.fsencode(folder))
            signal.pause()
    folder = os.read(end, 4096)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(end)
    os.close(told)
    return place / os.path.basename(os.fsdecode(folder))


def test_what_a_killed_process_has_left_goes_with_the_next_and_nothing_else_does(tmp_path):
    left = left_by_a_killed_process(tmp_path)
    assert (left / "inside" / "file").is_file()
    stays = [tmp_path / "instep-test-file", tmp_path / "another"]
    stays[0].touch()
    stays[1].mkdir()
    (tmp_path / "instep-test-link").symlink_to(stays[1])
    with temporary_folder("instep-test-", tmp_path) as one:
        with temporary_folder("instep-test-", tmp_path) as other:
            assert one.is_dir()
            assert other.is_dir()
        assert not left.exists()
    assert {*tmp_path.iterdir()} == {*stays, tmp_path / "instep-test-link"}


def test_a_folder_of_a_process_killed_before_it_was_in_use_goes_when_it_is_old(tmp_path):
    old, new = (tmp_path / f".instep-test-{name}" for name in ("old", "new"))
    old.mkdir()
    new.mkdir()  # of a process that may be about to lock it
    os.utime(old, (0, 0))
    with temporary_folder("instep-test-", tmp_path):
        assert not old.exists()
        assert new.is_dir()


def test_what_another_user_has_there_stays(tmp_path, monkeypatch):
    left, other = left_by_a_killed_process(tmp_path), os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    with temporary_folder("instep-test-", tmp_path):
        assert left.is_dir()


def test_a_folder_is_gone_after_its_context_also_after_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def fail():
        with temporary_folder("instep-test-") as folder:
            assert list(tmp_path.iterdir()) == [folder]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert list(tmp_path.iterdir()) == []
