"""Numbers that a plan cannot be asked for are refused before anything is looked at."""

import pytest

from instep.cli import main


@pytest.mark.parametrize(
    "words", [("--hosts", "0"), ("--most", "0"), ("--seconds", "nan"), ("--seconds", "-1")]
)
def test_a_number_that_no_plan_can_have_is_refused(words, capsys):
    assert main(["plan", "none.toml", *words]) == 2
    assert f"{words[1]!r}: wanted is" in capsys.readouterr().err
