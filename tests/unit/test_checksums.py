"""Checksums of lines and records are CRC-32, and what does not match is found."""

import zlib

import pytest

from instep.checksums import CHECKSUM, WrongChecksum, line_of, of_records, table_of, tables_of


@pytest.mark.parametrize(("size", "count"), [(1, 1), (7, 5), (64, 300), (8, 0)])
def test_each_record_has_its_checksum(size, count):
    data = bytes(n * 31 % 256 for n in range(size * count))
    found = of_records(data, size)
    assert found.dtype == CHECKSUM
    wanted = [zlib.crc32(data[at : at + size]) for at in range(0, len(data), size)]
    assert found.tolist() == wanted


def test_a_line_is_the_table_that_it_was_made_of():
    table = {"step": 3, "text": "a b", "loss": 0.25}
    assert table_of(line_of(table)) == table


def test_every_digit_that_is_changed_is_found():
    line = line_of({"step": 3, "loss": 0.25})
    for at in range(len(line)):
        if line[at : at + 1].isdigit():
            other = b"7" if line[at : at + 1] != b"7" else b"8"
            with pytest.raises(WrongChecksum):
                list(tables_of([line, line[:at] + other + line[at + 1 :]]))


def test_a_line_without_a_checksum_is_refused_after_one_that_has_one():
    with_one, without = line_of({"step": 1}), b'{"step": 2}\n'
    assert list(tables_of([without, with_one])) == [{"step": 2}, {"step": 1}]
    with pytest.raises(WrongChecksum, match="it has no checksum"):
        list(tables_of([with_one, without]))
    assert list(tables_of([with_one, without[:-3]])) == [{"step": 1}]  # cut short
