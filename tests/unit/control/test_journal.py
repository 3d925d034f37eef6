"""What one master knew, the next one knows."""

import random
import signal
import sqlite3
import stat
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from instep.comm.protocol.messages import Done, Failed
from instep.control import journal as journal_file
from instep.control.decisions.decide import decide
from instep.control.decisions.events import Built, Ended, Formed, Joined, Tick
from instep.control.decisions.phases import NEXT, Member, Phase
from instep.control.decisions.state import Blame, State, TimeLimit, first_members
from instep.control.journal import FILE, Begin, Journal, _sealed
from instep.errors import RunError
from instep.store.folder import BEGINNING, StartPoint

FAILED = Failed(kind="error", cause="no", where="", line="", step=3, phase="loss", exit_code=5)
FULL = State(
    members={
        0: Member(wanted=True, phase=Phase.FORMING, formed=3, hung="it slept", loops=True),
        2: Member(phase=Phase.LEFT, last_message=Done(generation=3, step=9, rule="steps")),
        3: Member(wanted=True, role="server", last_message=FAILED),
    },
    recovers=True,
    phase="training",
    group=(0, 2),
    draining=(2,),
    lost={0: (7, 2)},
    time_limit=TimeLimit(30.0, 1.5, 2.5),
    suspect=Blame(0, FAILED),
    blame=Blame(2, FAILED),
    deadline=12.5,
)


@pytest.fixture
def begun(tmp_path):
    journal = Journal(tmp_path, Begin(12.5, BEGINNING))
    yield journal
    journal.close()


def test_a_journal_that_has_only_begun_knows_nothing(begun):
    assert begun.last() is None


def test_the_next_master_finds_the_last_state_and_the_beginning(tmp_path):
    start_point = StartPoint(5, Path("/somewhere/step-5"), generations=2, spent_s=7.0)
    first = Journal(tmp_path, Begin(12.5, start_point))
    first.write(Tick(), State(members=first_members(1)))
    first.write(Tick(), FULL)
    first.close()
    second = Journal(tmp_path)
    assert (second.begin, second.last()) == (Begin(12.5, start_point), FULL)
    second.close()


def test_a_new_session_begins_with_an_empty_journal(tmp_path, begun):
    begun.write(Tick(), FULL)
    begun.close()
    again = Journal(tmp_path, Begin(99.0, BEGINNING))
    assert again.last() is None
    again.close()


def test_keys_are_kept_until_those_with_a_prefix_are_forgotten(begun, tmp_path):
    begun.keep("a/b", b"\x00 first")
    begun.keep("a/b", b"\x00 second")
    begun.keep("c", b"")
    begun.close()
    another = Journal(tmp_path)
    assert sorted(another.kept()) == [("a/b", b"\x00 second"), ("c", b"")]
    another.forget("a")
    assert another.kept() == [("c", b"")]
    another.close()


def test_every_state_can_be_read_back(begun):
    state = State(members=first_members(2), recovers=True)
    news = [Joined(0), Joined(1), Built(0), Built(1), Formed(0, 1), Ended(1, -signal.SIGKILL, 4, 3)]
    for piece in news:
        state, _ = decide(state, piece, 1.0)
        begun.write(piece, state)
        assert begun.last() == state


@pytest.mark.parametrize("seed", range(10))
def test_the_next_master_knows_every_member_wherever_the_last_one_was_killed(
    tmp_path, monkeypatch, seed
):
    monkeypatch.setattr("instep.control.journal.WHOLE_EVERY", 5)
    dice, state = random.Random(seed), State(members=first_members(4))
    journal = Journal(tmp_path, Begin(12.5, BEGINNING))
    for _ in range(60):
        number = dice.randrange(6)
        what = dice.randrange(3)
        if what == 0:
            state = state.note(number, wanted=dice.random() < 0.5, owes=False)
        elif what == 1:
            phases = [phase for phase in Phase if phase in NEXT[state.member(number).phase]]
            state = state.move(number, dice.choice(phases))
        else:
            state = replace(state, generation=state.generation + 1)
        journal.write(Tick(), state)
        assert journal.last() == state
        if dice.random() < 0.1:  # another master takes over
            journal.close()
            journal = Journal(tmp_path)
            assert journal.last() == state
    journal.close()


def test_a_decision_about_one_of_many_members_writes_that_one(tmp_path, begun):
    state = State(members=first_members(1000))
    begun.write(Tick(), state)
    begun.write(Joined(7), state.move(7, Phase.BUILDING))
    begun.close()
    rows = sqlite3.connect(tmp_path / FILE)
    (whole,), (one,) = rows.execute("SELECT length(state) FROM decisions ORDER BY number")
    rows.close()
    assert whole > 50_000
    assert one < 1000


def test_each_row_has_the_event_and_the_state_after_it(tmp_path, begun):
    begun.write(Ended(1, None, 4), replace(FULL, phase="gathering"))
    begun.close()
    rows = sqlite3.connect(tmp_path / FILE)
    ((event,),) = rows.execute("SELECT event FROM decisions").fetchall()
    rows.close()
    assert event == "Ended(worker=1, code=None, step=4, committed=0, place=None)"


def test_a_journal_leaves_no_file_beside_it(tmp_path, begun):
    begun.write(Tick(), FULL)
    begun.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("content", "said"), [(b"no database", "is damaged"), (b"", "cannot be used: it is empty")]
)
def test_a_file_that_is_no_journal_is_one_clear_error(tmp_path, content, said):
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(RunError, match=rf"journal\.sqlite {said}"):
        Journal(tmp_path)


def test_a_journal_whose_bytes_were_changed_is_one_clear_error_or_as_it_was(tmp_path, begun):
    for step in range(70):
        begun.write(Tick(step), replace(FULL, generation=step))
    begun.keep("key", b"value")
    known = begun.begin, begun.last(), begun.kept()
    begun.close()
    data, dice, damaged = (tmp_path / FILE).read_bytes(), random.Random(0), 0
    for _ in range(300):
        at, many = dice.randrange(len(data)), dice.choice([1, 1, 512, 4096])
        noise = dice.randbytes(min(many, len(data) - at))
        (tmp_path / FILE).write_bytes(data[:at] + noise + data[at + len(noise) :])
        try:
            journal = Journal(tmp_path)
            with closing(journal):
                assert (journal.begin, journal.last(), journal.kept()) == known
        except RunError as error:
            damaged += 1
            assert FILE in str(error)  # noqa: PT017
    assert damaged > 100


def test_a_journal_that_was_removed_is_said_to_be_empty(tmp_path, begun):
    begun.close()
    (tmp_path / FILE).unlink()
    with pytest.raises(RunError, match=f"{FILE} cannot be used: it is empty, or was removed"):
        Journal(tmp_path)


def test_a_folder_in_the_place_of_the_journal_is_named(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(RunError, match=f"{FILE} cannot be used: "):
        Journal(tmp_path, Begin(12.5, BEGINNING))


def changed(folder, *sql):
    rows = sqlite3.connect(folder / FILE, isolation_level=None)
    rows.execute(*sql)
    rows.close()


def test_a_journal_of_a_version_without_checksums_is_said_to_be_of_another(tmp_path, begun):
    begun.write(Tick(), FULL)
    begun.close()
    changed(tmp_path, "PRAGMA user_version = 0")
    changed(tmp_path, "UPDATE begin SET begin = substr(begin, 5)")
    changed(tmp_path, "UPDATE decisions SET state = substr(state, 5)")
    with pytest.raises(RunError, match="another version of instep, which began this session"):
        Journal(tmp_path)


def test_a_row_that_is_intact_and_has_something_else_is_of_another_version(tmp_path, begun):
    begun.write(Tick(), FULL)
    begun.close()
    changed(tmp_path, "UPDATE decisions SET state = ?", (_sealed(b"\x81\xa1a\x01", 1),))
    journal = Journal(tmp_path)
    with pytest.raises(RunError, match="another version of instep"):
        journal.last()
    journal.close()


@pytest.mark.parametrize("value", [None, 7, "text"])
def test_a_row_of_another_type_is_damaged(tmp_path, begun, value):
    begun.close()
    changed(tmp_path, "UPDATE begin SET begin = ?", (value,))
    with pytest.raises(RunError, match=r"is damaged \(a row was changed\)"):
        Journal(tmp_path)


def test_a_row_that_is_missing_is_noticed(tmp_path, begun):
    begun.write(Tick(), FULL)
    begun.write(Tick(), replace(FULL, members={**FULL.members, 4: Member()}))
    begun.write(Tick(), FULL)
    begun.close()
    changed(tmp_path, "DELETE FROM decisions WHERE number = 2")
    journal = Journal(tmp_path)
    with pytest.raises(RunError, match=r"is damaged \(a row is missing\)"):
        journal.last()
    journal.close()


def test_an_error_of_ours_is_not_said_to_be_damage(tmp_path):
    with pytest.raises(NotImplementedError):
        Journal(tmp_path, Begin(object(), BEGINNING))


# ---- other processes


def test_only_its_owner_may_read_it(tmp_path, begun):
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_no_other_process_can_lock_it_while_a_master_has_it(tmp_path, begun):
    other = sqlite3.connect(tmp_path / FILE, timeout=0)
    for attempt in ("SELECT * FROM begin", "BEGIN EXCLUSIVE"):
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute(attempt)
    begun.write(Tick(), FULL)
    assert begun.last() == FULL
    other.close()


@pytest.mark.parametrize(
    "lock",
    [
        ["BEGIN", "SELECT * FROM begin"],
        ["BEGIN IMMEDIATE", "DELETE FROM decisions"],
        ["BEGIN EXCLUSIVE", "DELETE FROM begin"],
    ],
    ids=["read", "write", "alone"],
)
def test_a_lock_of_another_process_ends_no_run_and_is_said(tmp_path, begun, lock, monkeypatch):
    monkeypatch.setattr("instep.control.journal.LOCKED_S", 0.05)
    begun.write(Tick(), FULL)
    begun.keep("key", b"value")
    begun.close()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    for each in lock:
        other.execute(each).fetchall()
    journal = Journal(tmp_path)
    assert (journal.begin, journal.last(), journal.kept()) == (
        *(Begin(12.5, BEGINNING), FULL),
        [("key", b"value")],
    )
    (said,) = journal.warnings
    assert f"another process had locked {tmp_path / FILE}: the master continues with" in said
    journal.write(Tick(), replace(FULL, generation=7))
    other.close()
    journal.close()
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600
    after = Journal(tmp_path)
    assert after.last() == replace(FULL, generation=7)
    assert not after.warnings
    after.close()


def test_a_copy_is_of_one_moment_also_while_another_process_writes(tmp_path, begun, monkeypatch):
    monkeypatch.setattr("instep.control.journal.LOCKED_S", 0.05)
    begun.write(Tick(), FULL)
    begun.close()
    other = sqlite3.connect(tmp_path / FILE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    reads = []

    def half_written(path, read=journal_file.read_plain):
        reads.append(path)
        data = read(path)
        return (
            data[: len(data) // 2] + bytes(len(data) - len(data) // 2) if reads == [path] else data
        )

    monkeypatch.setattr(journal_file, "read_plain", half_written)
    journal = Journal(tmp_path)
    assert journal.last() == FULL
    journal.close()
    other.close()
    monkeypatch.setattr(journal_file, "read_plain", lambda path: reads.append(path) or reads[:])
    with pytest.raises(sqlite3.OperationalError, match="goes on writing"):
        journal_file._of_one_moment([tmp_path / FILE])
