"""A file of rows of another version is refused and stays as it is."""

import shutil
import sqlite3
import subprocess
import sys

import pytest

from instep.errors import RunError
from instep.store.own_rows import open_rows

TABLES = ("CREATE TABLE IF NOT EXISTS jobs (id TEXT)",)


@pytest.mark.parametrize("write", [True, False])
def test_a_file_of_another_version_is_refused_and_keeps_its_version(tmp_path, write):
    path = tmp_path / "a.sqlite"
    open_rows(path, TABLES, version=2, write=True).close()
    before = path.read_bytes()
    with pytest.raises(RunError, match="was written by another version of instep"):
        open_rows(path, TABLES, version=1, write=write)
    assert path.read_bytes() == before


def test_what_was_written_is_there_for_readers_who_cannot_write(tmp_path):
    path = tmp_path / "a.sqlite"
    rows = open_rows(path, TABLES, version=1, write=True)
    rows.execute("INSERT INTO jobs VALUES ('one')")
    reader = open_rows(path, TABLES, version=1, write=False)
    assert reader.execute("SELECT id FROM jobs").fetchall() == [("one",)]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        reader.execute("INSERT INTO jobs VALUES ('two')")
    reader.close()
    rows.close()


def folder_of(path):
    return {
        each.name: (each.read_bytes(), each.stat().st_mtime_ns) for each in path.parent.iterdir()
    }


WRITES = """
import sys
from pathlib import Path
from instep.store.own_rows import open_rows
tables = ["CREATE TABLE IF NOT EXISTS jobs (id TEXT)"]
rows = open_rows(Path(sys.argv[1]), tables, version=1, write=True)
for name in ("one", "two"):
    rows.execute("INSERT INTO jobs VALUES (?)", (name,))
print("written", flush=True)
sys.stdin.readline()
rows.execute("INSERT INTO jobs VALUES ('three')")
rows.close()
"""


@pytest.mark.process
def test_a_reader_sees_all_that_was_written_and_makes_and_changes_no_file(tmp_path):
    """While its writer has it open, after that was killed, and when it is closed."""
    path = tmp_path / "there" / "a.sqlite"
    path.parent.mkdir()

    def seen(path):
        before = folder_of(path)
        for _ in range(2):
            reader = open_rows(path, TABLES, version=1, write=False)
            names = [name for (name,) in reader.execute("SELECT id FROM jobs")]
            reader.close()
            assert folder_of(path) == before
        return names, sorted(each.removeprefix(path.name) for each in before)

    words = [sys.executable, "-c", WRITES, str(path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        writer.stdout.readline()
        assert seen(path) == (["one", "two"], ["", "-shm", "-wal"])
        for name, kept in (("killed", ["", "-shm", "-wal"]), ("copied", ["", "-wal"])):
            (tmp_path / name).mkdir()
            for end in kept:
                shutil.copy(f"{path}{end}", tmp_path / name)
            assert seen(tmp_path / name / path.name) == (["one", "two"], kept)
        writer.stdin.write(b"\n")
        writer.stdin.close()
        writer.wait()
    assert seen(path) == (["one", "two", "three"], [""])


def test_a_log_that_is_a_link_is_not_followed(tmp_path):
    path = tmp_path / "a.sqlite"
    open_rows(path, TABLES, version=1, write=True).close()
    (tmp_path / "other").write_bytes(b"x" * 100)
    path.with_name("a.sqlite-wal").symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic links"):
        open_rows(path, TABLES, version=1, write=False)
