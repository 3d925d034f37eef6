"""Whatever stands in the place of a file is told at once, and never waited for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from disks import KINDS, put
from instep.control.journal import FILE, Journal
from instep.data.samples.contents import Record
from instep.errors import RunError
from instep.events import STEPS, EventLog, cut_torn_record
from instep.plain_file import NotPlain, check_plain, plain, read_plain, replace_plain, write_plain
from instep.store.folder import held
from instep.store.ledger import Ledger


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["rb", "ab", "wb", "r+b", "a+b"])
def test_nothing_but_a_file_is_opened(tmp_path: Path, kind: str, mode: str) -> None:
    put(kind, tmp_path / "file")
    with pytest.raises(NotPlain, match=f"it is a {kind} and not a file"):
        open(tmp_path / "file", mode, opener=plain).close()
    with pytest.raises(NotPlain, match=f"it is a {kind} and not a file"):
        check_plain(tmp_path / "file")


def test_files_and_links_to_files_are_opened_as_ever(tmp_path: Path) -> None:
    write_plain(tmp_path / "file", "whole")
    (tmp_path / "link").symlink_to("file")
    check_plain(tmp_path / "link")
    check_plain(tmp_path / "nothing")
    assert read_plain(tmp_path / "link") == b"whole"
    with open(tmp_path / "link", "rb", opener=plain) as file:
        assert os.get_blocking(file.fileno())
        assert not os.get_inheritable(file.fileno())
    with pytest.raises(FileNotFoundError):
        read_plain(tmp_path / "nothing")


@pytest.mark.parametrize("kind", KINDS)
def test_no_writer_of_a_run_waits(tmp_path: Path, kind: str) -> None:
    put(kind, path := tmp_path / FILE)
    words = f"cannot be .*: it is a {kind} and not a file"
    for write in (Record, EventLog, Ledger, lambda path: cut_torn_record(path, STEPS)):
        with pytest.raises(RunError, match=words):
            write(path)
    with pytest.raises(RunError, match=words):
        Journal(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        *("run.id", "summary.json", "journal.sqlite", "trace.json"),
        *("contents-0.bin", "job.toml", "logs/worker-0.log"),
    ],
)
def test_a_folder_is_not_taken_where_a_file_is_none(tmp_path: Path, kind: str, name: str) -> None:
    (tmp_path / "logs").mkdir()
    put(kind, tmp_path / name)
    words = f"{name} cannot be used: it is a {kind} and not a file. Remove it"
    with pytest.raises(RunError, match=words), held(tmp_path):
        pass


def test_a_secret_is_not_written_into_a_file_that_somebody_else_has_open(tmp_path: Path) -> None:
    """Who knows the name of the file beside it, and makes that first, reads nothing."""
    guessed = tmp_path / f".secret.{os.getpid()}"
    guessed.touch(0o666)
    with guessed.open() as reader:
        replace_plain(tmp_path / "secret", "a key", 0o600)
        assert reader.read() == ""
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
