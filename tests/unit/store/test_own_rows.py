"""A file of rows of another version is refused and stays as it is."""

import sqlite3

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
