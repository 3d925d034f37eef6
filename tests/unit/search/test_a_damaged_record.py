"""A changed digit in the record of a search is noticed, said in a sentence, and never used."""

import sqlite3
from contextlib import closing

import pytest

from instep.cli import main
from instep.dashboard.listing import RunList
from instep.errors import RunError
from instep.search.begin import found_in
from instep.search.record import FILE, SearchRecord
from made_up_searches import TOLD, make_search


def change(folder, statement, *values):
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as rows:
        assert rows.execute(statement, values).rowcount == 1


def text_of(folder, table, column, where):
    with closing(sqlite3.connect(folder / FILE)) as rows:
        return rows.execute(f"SELECT {column} FROM {table} WHERE {where}").fetchone()[0]


def read(folder):
    with SearchRecord(folder, write=False) as record:
        return record.about(), record.chosen(), record.results()


@pytest.mark.parametrize(
    ("table", "column", "where", "said"),
    [
        ("trials", "chosen", "number = 1", "the values of trial 1"),
        ("trials", "bounds", "number = 1", "the bounds of trial 1"),
        ("trials", "result", "number = 2", "the result of trial 2"),
        ("about", "value", "key = 'job'", "fact job"),
        ("about", "value", "key = 'chosen'", "fact chosen"),
    ],
)
def test_each_digit_of_a_record_that_changes_is_said_and_never_used(
    tmp_path, table, column, where, said
):
    folder = make_search(tmp_path / "net-search")
    text = text_of(folder, table, column, where)
    for place in [n for n, sign in enumerate(text) if sign.isdecimal()][::5]:
        other = str((int(text[place]) + 1) % 10)
        changed = text[:place] + other + text[place + 1 :]
        change(folder, f"UPDATE {table} SET {column} = ? WHERE {where}", changed)
        with pytest.raises(RunError, match=f"is damaged: {said}: it does not match its checksum"):
            read(folder)
    change(folder, f"UPDATE {table} SET {column} = ? WHERE {where}", text)
    assert len(read(folder)[2]) == len(TOLD)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM trials WHERE number = 5", "it has 5 trials, and had 6"),
        ("DELETE FROM trials WHERE number = 2", "it has 5 trials, and not the first ones"),
        ("UPDATE trials SET number = 9 WHERE number = 5", "it has 6 trials, and not the first"),
        ("UPDATE trials SET chosen = X'37' WHERE number = 0", "the values of trial 0: it is no t"),
    ],
)
def test_a_row_of_a_record_that_is_lost_or_elsewhere_is_said(tmp_path, statement, said):
    folder = make_search(tmp_path / "net-search")
    change(folder, statement)
    with pytest.raises(RunError, match=f"is damaged: {said}"):
        read(folder)


@pytest.mark.parametrize(
    ("column", "text", "said"),
    [
        ("result", '{"state": "completed", "value": "0.5"}', "the result of trial 0: .*`float"),
        ("result", '{"state": "completed", "value": NaN}', "the result of trial 0: .* not finite"),
        ("result", '{"state": "completed", "value": 1, "rungs": [["a", 1]]}', "result of trial 0"),
        ("result", '{"state": "completed", "value": 1, "vlaue": 2}', "the result of trial 0: .*vl"),
        ("chosen", "[1]", "the values of trial 0: Expected `object`"),
    ],
)
def test_what_somebody_has_written_into_a_record_is_refused_and_hides_no_other_run(
    tmp_path, column, text, said
):
    folder = make_search(tmp_path / "net-search")
    change(folder, f"UPDATE trials SET {column} = ? WHERE number = 0", text)
    with pytest.raises(RunError, match=f"is damaged: .*{said}"):
        read(folder)
    (row,) = RunList(tmp_path).searches()
    assert "is damaged" in row["error"]


def test_a_search_whose_record_is_damaged_is_not_continued(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    folder = make_search(tmp_path / "net-search")
    before = text_of(folder, "trials", "result", "number = 0")
    change(folder, "UPDATE trials SET result = ? WHERE number = 0", before.replace("0.5", "0.6"))
    with pytest.raises(RunError, match="the result of trial 0"):
        found_in(folder)
    assert main(["search", str(folder)]) == RunError.exit_code
    (line,) = [each for each in capsys.readouterr().err.splitlines() if "instep:" in each]
    assert "is damaged: the result of trial 0" in line


def test_a_record_of_an_earlier_version_is_read(tmp_path):
    folder = make_search(tmp_path / "net-search")
    now = read(folder)
    with closing(sqlite3.connect(folder / FILE, isolation_level=None)) as rows:
        rows.execute("DELETE FROM about WHERE key = 'chosen'")
        rows.execute("UPDATE about SET value = substr(value, 1, length(value) - 9)")
        for column in ("chosen", "bounds", "result"):
            rows.execute(f"UPDATE trials SET {column} = substr({column}, 1, length({column}) - 9)")
    about, *same = read(folder)
    assert same == [*now[1:]]
    assert about == {"job": now[0]["job"]}
