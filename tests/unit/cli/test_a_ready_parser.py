"""A parser that is made before a process forks reads each command as one that is made anew."""

import pytest

from instep.cli import COMMANDS, GROUPS, parsing
from instep.errors import InstepError

LINES = (
    ("run", "job.toml", "--workers", "3", "--json"),
    ("run", "script.py", "--", "--workers", "3"),
    ("resume", "runs/net", "--set", "train.steps=9"),
    ("submit", "job.toml", "--at-least", "2"),
    ("submit", "job.toml"),
    ("pool", "--pool", "p", "drain", "node2", "--undo"),
    ("pool", "drain", "node2", "--json"),
)


def read(line):
    found = dict(vars(parsing.parsed([*line], GROUPS)))
    found.pop("parser")
    return found


def test_a_parser_that_is_used_again_and_again_has_nothing_left_of_earlier_lines(monkeypatch):
    anew = [read(line) for line in LINES]
    made = []
    make = parsing.make_parser
    monkeypatch.setattr(parsing, "make_parser", lambda groups: made.append(groups) or make(groups))
    monkeypatch.setattr(parsing, "_ready", [])
    parsing.make_ready(GROUPS)
    assert [read(line) for line in [*LINES, *LINES]] == [*anew, *anew]
    with pytest.raises(InstepError, match="--nonsense"):
        parsing.parsed(["run", "job.toml", "--nonsense"], GROUPS)
    assert read(LINES[0]) == anew[0]
    assert made == [GROUPS]
    some = {"all": COMMANDS}
    parsing.parsed([*LINES[0]], some)
    assert made == [GROUPS, some], "another table has another parser"
