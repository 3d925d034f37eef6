"""Which hosts are cut off, and whose run can be put on hosts that can be."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SpecError
from instep.job import file as spec_file
from instep.lab.chaos.partitions import check_can_partition, chosen


@given(st.floats(0, 1), st.integers(2, 200))
def test_some_are_chosen_but_never_all(pick, count):
    away = chosen(pick, count)
    assert 0 < len(away) < count
    assert all(one < other for one, other in pairwise(away))
    assert set(away) <= set(range(count))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_every_way_to_choose_is_met(count):
    ways = (1 << count) - 2
    met = {tuple(chosen((number + 0.5) / ways, count)) for number in range(ways)}
    assert len(met) == ways


def test_a_job_that_has_hosts_of_its_own_is_refused():
    table = {
        "name": "net",
        "recipe": "a.py:recipe",
        "network": "private",
        "launch": {"hosts": ["ssh one"]},
        "train": {"steps": 1},
    }
    with pytest.raises(SpecError, match="the job has hosts of its own"):
        check_can_partition(spec_file.build(table, source="here"))
