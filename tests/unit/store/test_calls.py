"""Which call is due, after kills between any two of them."""

import json

import pytest

from instep.errors import RunError
from instep.store.calls import Calls, Due


def calls(path, kind="step", held=lambda: True):
    def writes(write):
        if held():
            write()
        return held()

    return Calls(path / "callbacks.jsonl", kind, writes)


def test_calls_are_new_once_and_done_after_the_next_begins(tmp_path):
    one = calls(tmp_path)
    assert one.begin(0, 1, 0) is Due.NEW
    assert one.begin(0, 1, 1) is Due.NEW
    one.end(0, 1)
    assert one.complete(0, 1)
    for call in (0, 1, 2):
        assert one.begin(0, 1, call) is Due.DONE
    assert one.begin(0, 2, 0) is Due.NEW


def test_a_successor_makes_the_interrupted_call_again_and_the_others_once(tmp_path):
    one = calls(tmp_path)
    one.begin(0, 1, 0)
    one.begin(0, 1, 1, {"a": 2.0})
    heir = calls(tmp_path)
    assert heir.logged == {"a": 2.0}
    assert not heir.complete(0, 1)
    found = [heir.begin(0, 1, call) for call in (0, 1, 2)]
    assert found == [Due.DONE, Due.AGAIN, Due.NEW]
    heir.end(0, 1)
    assert calls(tmp_path).complete(0, 1)


def test_a_commit_that_only_the_killed_worker_had_is_not_called_twice(tmp_path):
    one = calls(tmp_path)
    one.begin(0, 7, 0)
    one.end(0, 7)
    heir = calls(tmp_path)  # the others were at 6, and compute 7 as well
    assert heir.begin(0, 7, 0) is Due.DONE


@pytest.mark.parametrize("ended", [True, False])
def test_steps_after_the_checkpoint_that_a_run_goes_back_to_are_called_again(tmp_path, ended):
    one = calls(tmp_path)
    for step in (4, 5, 6):
        one.begin(0, step, 0)
        if step < 6 or ended:
            one.end(0, step)
    heir = calls(tmp_path)
    heir.continue_after(0, 4)
    found = []
    for step in (5, 6, 7):
        found.append(heir.begin(0, step, 0))
        heir.end(0, step)
    assert found == [Due.AGAIN, Due.AGAIN, Due.NEW]


def test_steps_of_another_course_are_called_again(tmp_path):
    one = calls(tmp_path)
    one.begin(0, 6, 0)
    one.end(0, 6)
    assert [one.begin(1, step, 0) for step in (5, 6, 7)] == [Due.AGAIN, Due.AGAIN, Due.NEW]


def test_what_a_kill_left_of_a_line_counts_for_nothing(tmp_path):
    one = calls(tmp_path)
    one.begin(0, 1, 0)
    with open(tmp_path / "callbacks.jsonl", "a") as file:
        file.write('{"kind": "step", "course": 0, "st')
    heir = calls(tmp_path)
    assert heir.begin(0, 1, 0) is Due.AGAIN
    assert heir.begin(0, 1, 1) is Due.NEW
    assert calls(tmp_path).begin(0, 1, 1) is Due.AGAIN


def test_kinds_do_not_see_each_other_and_the_file_stays_small(tmp_path):
    saves = calls(tmp_path, "save")
    assert saves.begin(0, 3, 0) is Due.NEW
    saves.end(0, 3)
    steps = calls(tmp_path)
    for step in range(1, 12_000):
        steps.begin(0, step, 0)
        steps.end(0, step)
    assert (tmp_path / "callbacks.jsonl").stat().st_size < 1_200_000
    assert calls(tmp_path, "save").complete(0, 3)
    assert calls(tmp_path).complete(0, 11_999)
    assert not calls(tmp_path).complete(0, 12_000)


def test_a_worker_that_no_longer_writes_the_ledger_writes_nothing_here(tmp_path):
    mine = calls(tmp_path, held=lambda: False)
    mine.begin(0, 1, 0)
    assert not (tmp_path / "callbacks.jsonl").exists()


@pytest.mark.parametrize(
    "damaged",
    [
        "not json}",
        '{"kind": "step"}',
        '{"kind": "step", "course": 0, "step": "x", "call": 1, "furthest": [0, 0]}',
    ],
)
def test_a_damaged_file_is_named(tmp_path, damaged):
    (tmp_path / "callbacks.jsonl").write_text(f"{damaged}\n")
    with pytest.raises(RunError, match=r"callbacks\.jsonl cannot be read"):
        calls(tmp_path)


def test_lines_are_json_that_others_can_read(tmp_path):
    calls(tmp_path).begin(0, 1, 3, {"a": 1.0})
    (line,) = (tmp_path / "callbacks.jsonl").read_text().splitlines()
    assert json.loads(line)["call"] == 3
