"""The token file: only its owner's, made anew when it is old or was seen by others."""

import os
import time

import pytest

from instep.errors import JoinError, SpecError
from instep.launch.join_token import LASTS_S, read, written


def test_a_token_is_written_for_its_owner_alone_and_read_again(tmp_path):
    path = tmp_path / "token"
    token = written(path)
    assert len(token) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert read(path) == token == written(path)


def test_a_token_that_is_a_day_old_is_replaced(tmp_path):
    path = tmp_path / "token"
    token = written(path)
    old = time.time() - LASTS_S - 1
    os.utime(path, (old, old))
    assert written(path) != token


def test_a_token_that_others_have_seen_is_refused_and_replaced(tmp_path):
    path = tmp_path / "token"
    token = written(path)
    path.chmod(0o640)
    with pytest.raises(JoinError, match=f"others can read the token file .* chmod 600 {path}"):
        read(path)
    assert written(path) != token
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("content", [None, b"", b" \n"])
def test_a_file_without_a_token_is_refused(tmp_path, content):
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(JoinError, match="Copy it"):
        read(path)


def test_a_folder_that_is_not_there_is_said(tmp_path):
    with pytest.raises(SpecError, match=r"token_file = .* cannot be written"):
        written(tmp_path / "none" / "token")
