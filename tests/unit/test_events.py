"""Events and records are read back as they were written, whatever a crash cut short."""

import struct
import threading
import zlib

import numpy as np
import pytest

import instep
from instep.errors import RunError
from instep.events import (
    LEDGER,
    LEDGER_START,
    STEPS,
    Appender,
    EventLog,
    NewEvents,
    cut_torn_record,
    ledger_header,
    read_events,
    read_records,
)
from instep.formats import FORMAT
from instep.vocabulary import EVENTS


def test_events_are_read_back_in_order_with_their_time(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    written = [log.emit("warning", text=f"line\n{n} é") for n in range(3)]
    assert list(read_events(tmp_path / "events.jsonl")) == written
    assert [event["time"] for event in written] == sorted(event["time"] for event in written)
    log.close()
    log.close()


def test_a_log_that_is_opened_again_is_appended_to(tmp_path):
    for n in range(2):
        log = EventLog(tmp_path / "events.jsonl")
        log.emit("warning", text=str(n))
        log.close()
    assert [event["text"] for event in read_events(tmp_path / "events.jsonl")] == ["0", "1"]


def test_a_last_line_that_a_crash_cut_short_is_left_out(tmp_path):
    file = tmp_path / "events.jsonl"
    log = EventLog(file)
    for n in range(2):
        log.emit("warning", text=str(n))
    log.close()
    whole = file.read_bytes()
    second = whole.index(b"\n") + 1
    for cut in range(second, len(whole)):
        file.write_bytes(whole[:cut])
        assert [event["text"] for event in read_events(file)] == ["0"]


def test_a_file_that_is_not_there_has_no_events_and_no_records(tmp_path):
    assert list(read_events(tmp_path / "none")) == []
    assert len(read_records(tmp_path / "none", LEDGER)) == 0


def test_an_event_that_is_not_in_the_table_is_our_bug(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    with pytest.raises(AssertionError, match="made_up is not in EVENTS"):
        log.emit("made_up")
    log.close()


def test_events_of_several_threads_do_not_run_into_one_another(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    threads = [
        threading.Thread(target=lambda: [log.emit("warning", text="x" * 500) for _ in range(50)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log.close()
    assert len(list(read_events(tmp_path / "events.jsonl"))) == 200


@pytest.mark.parametrize("dtype", [LEDGER, STEPS])
def test_records_are_read_back_without_a_torn_tail(tmp_path, dtype):
    records = np.zeros(3, dtype)
    records["step"] = [1, 2, 3]
    head = ledger_header() if dtype is LEDGER else b""
    data = head + records.tobytes()
    for cut in range(len(head) + 2 * dtype.itemsize, len(data)):
        (tmp_path / "records").write_bytes(data[:cut])
        assert read_records(tmp_path / "records", dtype)["step"].tolist() == [1, 2]
    for lost in (0, 1, dtype.itemsize, 3 * dtype.itemsize + 5):  # as a loss of power leaves it
        (tmp_path / "records").write_bytes(data + bytes(lost))
        assert np.array_equal(read_records(tmp_path / "records", dtype), records)


def test_records_are_little_endian_and_packed_so_that_numpy_alone_reads_them():
    assert LEDGER.itemsize == 8 + 5 * 4 + 2 + 8 + 8
    assert STEPS.itemsize == 8 + 4 + 4 + 8 + 8 + 8 * 4
    for dtype in (LEDGER, STEPS):
        assert all(dtype[name].str.startswith("<") for name in dtype.names)


def test_numpy_reads_the_records_behind_the_header_of_a_ledger(tmp_path):
    records = np.zeros(3, LEDGER)
    records["worker"] = records["generation"] = 2**31 - 1
    records["course"] = records["unit"] = 2**32 - 1
    (tmp_path / "ledger.bin").write_bytes(ledger_header() + records.tobytes())
    found = np.fromfile(tmp_path / "ledger.bin", LEDGER, offset=LEDGER_START)
    assert np.array_equal(found, records)
    assert len(ledger_header()) == LEDGER_START


def old_record(step):
    """A record of format 1, of 32 bytes."""
    return struct.pack("<qihhqq", step, 0, 0, 1, 0, 64)


@pytest.mark.parametrize("records", [1, 2, 50])
def test_a_ledger_of_format_1_is_refused_with_the_version_that_reads_it(tmp_path, records):
    (tmp_path / "ledger.bin").write_bytes(b"".join(map(old_record, range(1, records + 1))))
    with pytest.raises(RunError) as refused:
        read_records(tmp_path / "ledger.bin", LEDGER)
    assert str(refused.value) == (
        f"{tmp_path / 'ledger.bin'} was written by instep 0.1 in format 1; this is instep "
        f"{instep.__version__}, which reads format {FORMAT}. Use instep 0.1 for it."
    )


def test_a_ledger_of_a_newer_format_is_refused_with_the_version_that_wrote_it(tmp_path):
    header = bytearray(ledger_header()[:-4])
    header[8:12] = (FORMAT + 1).to_bytes(4, "little")
    header[16:] = b"0.31.4".ljust(12, b"\0")
    newer = bytes(header) + zlib.crc32(header).to_bytes(4, "little")
    (tmp_path / "ledger.bin").write_bytes(newer + b"anything")
    says = rf"by instep 0\.31\.4 in format {FORMAT + 1}; .* Use instep 0\.31 for it\."
    with pytest.raises(RunError, match=says):
        read_records(tmp_path / "ledger.bin", LEDGER)


@pytest.mark.parametrize("at", range(LEDGER_START))
def test_no_bit_of_a_ledgers_header_can_change_unseen(tmp_path, at):
    for bit in range(8):
        data = bytearray(ledger_header() + np.zeros(2, LEDGER).tobytes())
        data[at] ^= 1 << bit
        (tmp_path / "ledger.bin").write_bytes(data)
        with pytest.raises(RunError, match=r"its header is wrong|does not match its checksum"):
            read_records(tmp_path / "ledger.bin", LEDGER)


def test_every_event_tells_its_fields():
    assert all(fields.strip() for fields in EVENTS.values())


def test_a_log_goes_on_after_a_torn_line_as_if_it_had_never_been_begun(tmp_path):
    file = tmp_path / "events.jsonl"
    for before in ("", "{}\n", "{}\n" * 50_000):
        for torn in ("{", "x" * 70_000, "x" * 200_000, ""):
            file.write_text(before + torn)
            log = EventLog(file)
            log.emit("warning", text="after")
            log.close()
            *rest, last = read_events(file)
            assert (len(rest), last["text"]) == (before.count("\n"), "after")


def test_a_torn_record_is_cut_off_before_others_follow(tmp_path):
    file = tmp_path / "steps.bin"
    cut_torn_record(file, STEPS)
    assert not file.exists()
    records = np.zeros(2, STEPS)
    records["step"] = [1, 2]
    whole = STEPS.itemsize
    for torn in (b"", b"x", b"x" * (whole - 1), bytes(whole), bytes(3 * whole + 1)):
        file.write_bytes(records.tobytes() + torn)
        cut_torn_record(file, STEPS)
        with file.open("ab") as more:
            more.write(records.tobytes())
        assert read_records(file, STEPS)["step"].tolist() == [1, 2, 1, 2]


def test_events_that_find_no_room_are_held_back_and_come_in_order_when_there_is_some(small_disk):
    file = small_disk.path / "events.jsonl"
    log = EventLog(file)
    small_disk.fill()
    for n in range(300):  # the last of them beyond the first page, which the file had at once
        log.emit("warning", text=f"{n} " + "x" * 100)
    assert len(list(read_events(file))) < 300
    small_disk.make_room()
    log.emit("warning", text="300")
    log.close()
    texts = [event["text"].split()[0] for event in read_events(file)]
    assert texts == [str(n) for n in range(301)]


def test_records_too_are_never_torn_in_the_middle_of_the_file(small_disk):
    records = np.zeros(1000, STEPS)
    records["step"] = range(1000)
    appender = Appender(small_disk.path / "steps.bin")
    for record in records[:500]:
        appender.write(record.tobytes())
    small_disk.fill()
    for record in records[500:]:
        appender.write(record.tobytes())
    small_disk.make_room()
    appender.close()
    assert np.array_equal(read_records(small_disk.path / "steps.bin", STEPS), records)


def test_only_so_much_is_held_back(small_disk):
    small_disk.fill()
    appender = Appender(small_disk.path / "steps.bin", most_held=1000)
    appender.write(b"x" * 900)
    with pytest.raises(RunError, match=r"steps\.bin cannot be written: No space left on device"):
        appender.write(b"x" * 200)
    appender.close()
    assert not (small_disk.path / "steps.bin").stat().st_size


def test_files_that_cannot_be_opened_are_named(frail_disk):
    file = frail_disk.path / "events.jsonl"
    file.write_text("{torn")
    records = frail_disk.path / "steps.bin"
    records.write_bytes(b"torn")
    frail_disk.give_up()
    for path, attempt in (
        (file, lambda: EventLog(file)),
        (records, lambda: cut_torn_record(records, STEPS)),
        (records, lambda: Appender(records)),
    ):
        with pytest.raises(RunError, match=f"{path.name} cannot be written: Read-only file sys"):
            attempt()


def texts(new: NewEvents) -> list[str]:
    return [event["text"] for event in new.read()]


def test_new_events_come_once_and_a_half_line_when_it_is_whole(tmp_path):
    new, file = NewEvents(tmp_path), tmp_path / "events.jsonl"
    assert texts(new) == []  # there is no file yet
    log = EventLog(file)
    log.emit("warning", text="first")
    whole = file.read_bytes()
    file.write_bytes(whole + whole[:20])
    assert (texts(new), texts(new)) == (["first"], [])
    with file.open("ab") as rest:
        rest.write(whole[20:])
    assert texts(new) == ["first"]
    log.close()


def test_a_damaged_event_is_not_new(tmp_path):
    log, file = EventLog(tmp_path / "events.jsonl"), tmp_path / "events.jsonl"
    for text in ("a1", "a2", "a3"):
        log.emit("warning", text=text)
    log.close()
    file.write_bytes(file.read_bytes().replace(b"a2", b"a4") + b"[1]\n")
    assert texts(NewEvents(tmp_path)) == ["a1", "a3"]


def test_a_log_that_was_replaced_is_read_from_its_beginning(tmp_path):
    new, file = NewEvents(tmp_path), tmp_path / "events.jsonl"
    for texts_then in (["one", "two"], ["three"], ["four", "five", "six"]):
        file.unlink(missing_ok=True)
        log = EventLog(file)
        for text in texts_then:
            log.emit("warning", text=text)
        log.close()
        assert texts(new) == texts_then
