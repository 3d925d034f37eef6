"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.units import (
    host_and_port,
    readable_bytes,
    readable_count,
    readable_seconds,
    readable_share,
    seconds_in,
)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (99_940, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (1_234_567, "1.2 MB"),
        (5e9, "5.0 GB"),
        (2e15, "2.0 PB"),
        (3e18, "3000.0 PB"),
        (-1_500, "-1.5 kB"),
    ],
)
def test_bytes_carry_the_largest_unit_that_keeps_them_above_one(count, text):
    assert readable_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (0.00002, "20 us"),
        (0.0015, "1.5 ms"),
        (0.0123, "12 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
        (75, "1m15s"),
        (3599.6, "1h00m"),
        (7384, "2h03m"),
        (-75, "-1m15s"),
    ],
)
def test_seconds_are_told_in_the_unit_a_person_would_use(seconds, text):
    assert readable_seconds(seconds) == text


@given(st.floats(1e-7, 1e9))
def test_no_time_is_longer_than_a_table_cell(seconds):
    assert len(readable_seconds(seconds)) <= 10


def test_counts_have_their_thousands_marked():
    assert readable_count(9380) == "9,380"
    assert readable_count(7.0) == "7"


def test_a_share_of_nothing_is_a_dash():
    assert readable_share(1, 4) == "25 %"
    assert readable_share(1, 0) == "-"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("0.5", 0.5),
        ("90s", 90),
        (" 30m ", 1800),
        ("1h30m", 5400),
        ("1h 30m 5s", 5405),
        ("1.5h", 5400),
        ("2d", 172_800),
    ],
)
def test_a_length_of_time_is_read_as_people_write_it(text, seconds):
    assert seconds_in(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "soon", "h", "30 min", "-5s", "1:30", "1e3", "5ss", "s5", "1h1h", "30m1h", "1h30"]
)
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(ValueError, match="is no length of time"):
        seconds_in(text)


@given(st.integers(10, 359_999))
def test_a_time_that_was_made_readable_can_be_read_again(seconds):
    shown = seconds_in(readable_seconds(seconds))
    assert shown == seconds if seconds < 3600 else 0 <= seconds - shown < 60


def test_a_machine_and_its_port_are_read_from_one_text():
    assert host_and_port("node1:2222") == ("node1", 2222)
    assert host_and_port("::1:65535") == ("::1", 65535)


@pytest.mark.parametrize("text", ["", "node1", ":2222", "node1:", "node1:0", "node1:65536", "a:b"])
def test_what_is_no_machine_with_a_port_is_refused(text):
    with pytest.raises(ValueError, match="is no machine with a port from 1 to 65535"):
        host_and_port(text)
