"""Tables of parts: listed for nothing, imported when wanted, wrong names answered."""

import sys

import pytest

from instep.errors import SpecError
from instep.registry import Registry

TABLE = Registry("toy", {"parser": "configparser:ConfigParser", "absent": "no_such_module:Thing"})


def test_listing_and_asking_imports_nothing():
    before = set(sys.modules)
    assert list(TABLE) == ["parser", "absent"]
    assert len(TABLE) == 2
    assert "absent" in TABLE
    assert "other" not in TABLE
    TABLE.check("absent")
    assert set(sys.modules) == before


def test_looking_up_imports_the_part():
    import configparser

    assert TABLE["parser"] is configparser.ConfigParser


@pytest.mark.parametrize("ask", [TABLE.check, TABLE.__getitem__])
def test_a_wrong_name_answers_with_kind_near_miss_and_list(ask):
    with pytest.raises(SpecError) as error:
        ask("paser")
    assert str(error.value) == (
        "no toy is called 'paser'. Did you mean 'parser'? Known: absent, parser."
    )
