"""A job file that is parsed section by section is the same as one that is parsed as a whole."""

import re
import tomllib

import pytest

from instep.job.file import build, dump
from instep.job.toml_sections import tables_in

JOB = dump(build({"recipe": "a.py:b", "stop": {"bounds": [[1, 0.5], [2, 0.7]]}}, source="a test"))


@pytest.mark.parametrize(
    "text",
    [
        JOB,
        JOB.replace("workers = 1", "workers = 3"),
        JOB + '"[train]" = 1\ntext = """\n[train]\nx = 1\n"""\n',
        JOB + "\n[arguments.deep]\na = 1\n",
        JOB + "\n[[arguments.many]]\na = 1\n",
        JOB.replace("seed = 0", "seed = [\n1,\n[2],\n]"),
        JOB.replace("format = ", "number = "),
        "format = 2",
    ],
)
def test_it_says_what_tomllib_says(text):
    for _ in range(2):
        found = tables_in(text)
        assert found == tomllib.loads(text)
        for table in found.values():
            if isinstance(table, dict):
                table["changed"] = 1


@pytest.mark.parametrize(
    "text", [JOB + "\n[train]\n", JOB + "x =\n", "format = 2\ntrain = 1\n\n[train]\nx = 1\n"]
)
def test_it_refuses_what_tomllib_refuses_in_the_same_words(text):
    with pytest.raises(tomllib.TOMLDecodeError) as wanted:
        tomllib.loads(text)
    with pytest.raises(tomllib.TOMLDecodeError, match=re.escape(str(wanted.value))):
        tables_in(text)
