"""What is broken follows from the seed; what cannot be asked for is refused in a sentence."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.errors import SpecError
from instep.lab.chaos.injections import (
    HOLD_S,
    LAST,
    NETWORK,
    WEIGHTS,
    check_long_enough,
    check_numbers,
    check_roles,
    draw,
)

ROLES = st.lists(st.sampled_from(sorted(WEIGHTS)), min_size=1, unique=True)


@given(st.integers(0, 60), st.integers(0, 20), st.integers(0, 9), ROLES, st.integers(0, 2**40))
def test_the_draw_is_what_was_asked_for_in_the_order_in_which_it_is_due(
    kills, hangs, partitions, roles, seed
):
    drawn = draw(kills, hangs, roles, seed, partitions)
    wanted = Counter(kill=kills, hang=hangs, partition=partitions)
    assert Counter(each.kind for each in drawn) == +wanted
    assert [each.at for each in drawn] == sorted(each.at for each in drawn)
    assert all(0 <= each.at <= LAST and 0 <= each.pick <= 1 for each in drawn)
    assert {each.role for each in drawn if each.kind != "partition"} <= set(roles)
    assert {each.role for each in drawn if each.kind == "partition"} <= {NETWORK}
    shortest, longest = HOLD_S
    held = [each.hold_s for each in drawn if each.kind == "partition"]
    assert all(shortest <= each <= longest for each in held)
    assert drawn == draw(kills, hangs, roles[::-1], seed, partitions)


def test_every_role_is_met_and_some_injections_come_during_a_recovery():
    for kills, hangs in ((400, 0), (0, 400)):
        drawn = draw(kills, hangs, list(WEIGHTS), 7)
        counted = Counter(each.role for each in drawn)
        assert counted["worker"] > counted["loader"] > counted["master"] > 0 < counted["host"]
        assert counted["spare"] > 0
    close = sum(one.at == other.at for one, other in pairwise(drawn))
    assert 40 < close < 120
    assert draw(400, 0, list(WEIGHTS), 8) != drawn


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((-1, 0, 0, 0.0), "--kills -1: needs to be at least 0, and at most 100000."),
        ((1, -2, 0, 0.0), "--hangs -2: needs to be at least 0, and at most 100000."),
        ((1, 0, -3, 0.0), "--partitions -3: needs to be at least 0, and at most 100000."),
        ((0, 0, 0, 0.0), "there is nothing to break"),
        ((1, 0, 0, -1.0), "--over -1: needs to be a number of seconds"),
        ((1, 0, 0, float("inf")), "--over inf: needs to be a number of seconds"),
    ],
)
def test_numbers_that_cannot_be_are_refused(numbers, words):
    with pytest.raises(SpecError) as refused:
        check_numbers(*numbers)
    assert words in str(refused.value)


def test_a_role_that_there_is_not_is_refused_with_the_near_miss():
    check_roles(["worker", "host"])
    with pytest.raises(SpecError, match=r"no role 'wroker'\. Did you mean 'worker'\?"):
        check_roles(["wroker"])


def test_a_run_that_is_too_short_is_refused_with_the_way_to_lengthen_it():
    check_long_enough(20, 10, "")
    with pytest.raises(SpecError, match=r"19 steps are too few .* at least 20 are needed\. Do x"):
        check_long_enough(19, 10, "Do x.")
