"""Processes of this machine are watched in a program that has many files open, too."""

import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from instep.system.processes import Watched, wait_readable


@pytest.fixture
def many_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < 1200:
        pytest.skip("the system allows fewer than 1200 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    yield
    for each in held:
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_a_process_is_watched_where_more_than_1024_files_are_open():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    watched = Watched(process.pid)
    assert not watched.ended
    process.communicate(b"\n")
    assert watched.ended
    watched.close()
    reading, writing = os.pipe()
    assert reading > 1024
    assert wait_readable([reading], 0) == []
    os.close(writing)
    assert wait_readable([reading], 10) == [reading]
    os.close(reading)
