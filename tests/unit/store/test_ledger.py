"""A ledger ends with the last step that counts, whoever died at what moment of writing it."""

import os
import shutil
import threading
import zlib
from contextlib import closing

import numpy as np
import pytest

from instep.errors import PeerError, RunError
from instep.events import LEDGER, LEDGER_START, ledger_header, read_records
from instep.store.ledger import Ledger, cut_back, last_step, mend


def shares(step, workers=2):
    """Records of one step of 10 samples, an even part for each worker."""
    first = 10 * (step - 1)
    cuts = [first + 10 * n // workers for n in range(workers + 1)]
    return [(step, 0, 0, 1, n, 0, n, cuts[n], cuts[n + 1]) for n in range(workers)]


def written(path, steps):
    ledger = Ledger(path)
    for step in range(1, steps + 1):
        ledger.append(shares(step))
    ledger.close()
    return path


def steps_in(path):
    records = read_records(path, LEDGER)
    assert LEDGER_START + len(records) * LEDGER.itemsize == path.stat().st_size
    return records["step"].tolist()


def test_what_is_appended_is_there_at_once_and_the_size_says_so(tmp_path):
    ledger = Ledger(tmp_path / "ledger.bin")
    for step in range(1, 4):
        data = ledger.append(shares(step, workers=3))
        assert (tmp_path / "ledger.bin").read_bytes().endswith(data)
        assert ledger.size_bytes == (tmp_path / "ledger.bin").stat().st_size
    ledger.close()
    assert steps_in(tmp_path / "ledger.bin") == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_its_checksum_is_that_of_the_whole_file_whoever_wrote_it(tmp_path):
    path = written(tmp_path / "ledger.bin", 2)
    with closing(Ledger(path)) as ledger:
        for step in (3, 4):
            ledger.append(shares(step))
            assert ledger.crc32() == zlib.crc32(path.read_bytes())
        ledger.append(shares(5))
        ledger.cut(LEDGER_START + 3 * LEDGER.itemsize)
        assert ledger.crc32() == zlib.crc32(path.read_bytes())
        ledger.append(shares(6))
        assert ledger.crc32() == zlib.crc32(path.read_bytes())
    assert steps_in(path) == [1, 1, 2, 6, 6]


def others_write(path):
    with path.open("ab") as file:
        file.write(b"x")


def becomes_another(path):
    copy = path.read_bytes()
    path.unlink()
    path.write_bytes(copy)


@pytest.mark.parametrize(
    ("harm", "told"),
    [
        (lambda path: path.unlink(), r"ledger.bin was removed, renamed or replaced"),
        (lambda path: path.rename(path.with_name("other")), r"ledger.bin was removed, renamed"),
        (becomes_another, r"ledger.bin was removed, renamed or replaced"),
        (lambda path: os.truncate(path, LEDGER_START), r"has 32 bytes, and \d+ were written"),
        (lambda path: os.truncate(path, 0), r"has 0 bytes, and \d+ were written"),
        (others_write, r"and \d+ were written: the file was changed by another"),
        (lambda path: shutil.rmtree(path.parent), r"the run folder .*/run was removed or renamed"),
        (
            lambda path: path.parent.rename(path.parent.with_name("moved")),
            r"the run folder .*/run was removed or renamed",
        ),
    ],
)
def test_one_that_somebody_removes_or_changes_is_not_written_on(tmp_path, harm, told):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / "ledger.bin"
    ledger = Ledger(path)
    ledger.append(shares(1))
    ledger.append(shares(2))
    harm(path)
    left = sorted(file.stat().st_size for file in tmp_path.rglob("*"))
    with pytest.raises(RunError, match=told) as caught:
        ledger.append(shares(3))
    assert caught.value.exit_code == 6
    assert sorted(file.stat().st_size for file in tmp_path.rglob("*")) == left
    ledger.close()


def test_two_cannot_write_one_ledger(tmp_path):
    first = Ledger(tmp_path / "ledger.bin")
    with pytest.raises(RunError, match="another process writes"):
        Ledger(tmp_path / "ledger.bin")
    first.close()
    Ledger(tmp_path / "ledger.bin").close()


def test_one_that_was_released_writes_nothing_more_and_lets_another_write(tmp_path):
    first = Ledger(tmp_path / "ledger.bin")
    first.append(shares(1))
    first.release()
    second = Ledger(tmp_path / "ledger.bin")
    assert first.append(shares(2)) == b""
    second.append(shares(2))
    assert steps_in(tmp_path / "ledger.bin") == [1, 1, 2, 2]
    first.close()  # the lock is the other's by now
    with pytest.raises(RunError, match="another process writes"):
        Ledger(tmp_path / "ledger.bin")
    second.close()


def test_a_writer_waits_for_the_one_before_as_long_as_it_is_told_to(tmp_path):
    first, asked = Ledger(tmp_path / "ledger.bin"), []

    def wait():
        asked.append(None)
        if len(asked) == 3:
            first.release()
        return True

    second = Ledger(tmp_path / "ledger.bin", wait)
    assert len(asked) == 3
    second.close()
    first.close()


def test_what_the_asking_raises_is_raised_and_the_file_is_let_go_of(tmp_path):
    first = Ledger(tmp_path / "ledger.bin")

    def gone():
        raise PeerError("the members have changed.")

    with pytest.raises(PeerError, match="have changed"):
        Ledger(tmp_path / "ledger.bin", gone)
    first.close()
    Ledger(tmp_path / "ledger.bin").close()


@pytest.mark.parametrize(
    ("in_file", "counts", "kept"),
    [
        (4, 4, [1, 1, 2, 2, 3, 3, 4, 4]),  # as it should be
        (3, 4, [1, 1, 2, 2, 3, 3, 4, 4]),  # the writer died before it wrote its last commit
        (5, 4, [1, 1, 2, 2, 3, 3, 4, 4]),  # it alone had committed one step more
        (1, 0, []),
        (0, 0, []),
        (0, 1, [1, 1]),
    ],
)
def test_it_is_made_to_end_with_the_last_step_that_counts(tmp_path, in_file, counts, kept):
    path = written(tmp_path / "ledger.bin", in_file)
    mend(path, counts, shares(counts) if counts else [])
    assert steps_in(path) == kept
    assert read_records(path, LEDGER)[-2:].tolist() == (shares(counts) if counts else [])


def test_a_torn_record_at_its_end_is_taken_away(tmp_path):
    path = written(tmp_path / "ledger.bin", 3)
    with path.open("ab") as file:
        file.write(np.array(shares(4), LEDGER).tobytes()[:-5])
    mend(path, 4, shares(4))
    assert len(steps_in(path)) in (7, 8)
    assert read_records(path, LEDGER)["step"].max() == 4


def test_it_is_cut_back_to_where_a_checkpoint_was_saved_and_never_made_longer(tmp_path):
    path = written(tmp_path / "ledger.bin", 3)
    cut_back(path, LEDGER_START + 4 * LEDGER.itemsize)
    assert steps_in(path) == [1, 1, 2, 2]
    cut_back(path, LEDGER_START + 9 * LEDGER.itemsize)
    assert steps_in(path) == [1, 1, 2, 2]
    cut_back(tmp_path / "none", 0)


def test_where_the_run_begins_anew_the_header_stays(tmp_path):
    path = written(tmp_path / "ledger.bin", 3)
    cut_back(path, 0)
    assert path.read_bytes() == ledger_header()
    assert steps_in(written(path, 1)) == [1, 1]


def test_a_header_whose_writer_died_with_it_is_written_anew(tmp_path):
    path = tmp_path / "ledger.bin"
    for cut in range(LEDGER_START):
        path.write_bytes(ledger_header()[:cut])
        assert len(read_records(path, LEDGER)) == 0
        assert steps_in(written(path, 1)) == [1, 1]


@pytest.mark.parametrize("begin", [b"x" * 500, (1).to_bytes(8, "little") + b"\0" * 24])
def test_nothing_is_written_into_what_is_no_ledger_of_this_format(tmp_path, begin):
    path = tmp_path / "ledger.bin"
    path.write_bytes(begin)
    for write in (lambda: Ledger(path), lambda: mend(path, 1, shares(1))):
        with pytest.raises(
            RunError, match=r"ledger\.bin (is not a ledger|was written by instep 0\.1)"
        ):
            write()
    assert path.read_bytes() == begin
    path.write_bytes(ledger_header())
    Ledger(path).close()  # whoever was refused has let go of it


def test_a_step_that_finds_no_room_is_an_error_and_the_file_ends_with_the_one_before(small_disk):
    ledger = Ledger(small_disk.path / "ledger.bin", timeout_s=0)
    ledger.append(shares(1))
    small_disk.fill()
    why = r"No space left on device\. Make room, .* every step that was committed before is in it"
    with pytest.raises(RunError, match=why):
        [ledger.append(shares(step, workers=3)) for step in range(2, 1000)]
    last = steps_in(small_disk.path / "ledger.bin")[-1]
    assert last > 1
    assert ledger.size_bytes == (small_disk.path / "ledger.bin").stat().st_size
    small_disk.make_room()
    ledger.append(shares(last + 1))
    ledger.close()
    assert steps_in(small_disk.path / "ledger.bin")[-2:] == [last + 1] * 2


def test_a_step_waits_for_room_that_a_checkpoint_is_about_to_give_back(small_disk):
    ledger = Ledger(small_disk.path / "ledger.bin", timeout_s=60)
    small_disk.fill()
    other = threading.Timer(0.2, small_disk.make_room)
    other.start()
    for step in range(1, 200):
        ledger.append(shares(step))
    other.join()
    ledger.close()
    assert len(steps_in(small_disk.path / "ledger.bin")) == 2 * 199


@pytest.mark.parametrize("torn", [b"", b"half a"])
def test_the_last_step_is_read_from_the_end_alone(tmp_path, torn):
    path = tmp_path / "ledger.bin"
    assert last_step(path) == 0
    Ledger(path).close()
    assert last_step(path) == 0
    with closing(Ledger(path)) as ledger:
        for step in (1, 2, 3):
            ledger.append(shares(step))
    with path.open("ab") as file:
        file.write(torn)
    assert last_step(path) == 3
