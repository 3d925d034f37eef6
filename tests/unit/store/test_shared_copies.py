"""Copies in places where somebody else copies or removes, and where nothing may be removed."""

import time

import pytest
from test_copies import Run, check_none_is_half_there, step_in

from instep.data.shards.urls import download
from instep.store.copies import objects
from instep.store.copies.follow import END_S
from instep.store.copies.restore import restore
from loopback_store import Store, installed


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    monkeypatch.setattr(objects, "PAUSES_S", (0.0,) * 2)
    installed(tmp_path)
    store = Store()
    yield store
    store.close()


class Restored(Run):
    """A run that was restored from the copies of one that goes on."""

    def __init__(self, run, folder):
        self.job, self.url, self.spec, self.told = run.job, run.url, run.spec, []
        self.path = restore(run.url, folder, lambda _: None)
        self.follow_anew()


def copied_steps(run):
    return [fields["step"] for name, fields in run.told if name == "checkpoint_copied"]


@pytest.mark.parametrize("last", ["records/", "own.safetensors", "manifest.json"])
def test_of_two_that_copy_one_run_the_later_goes_on_and_no_half_of_a_copy_counts(
    store, tmp_path, last
):
    first = Run(tmp_path, store.loop, keep_last=2)
    for step in (10, 20):
        first.save(step)
        assert not first.copy()
    second = Restored(first, tmp_path / "second")

    def in_the_middle(method, name):
        if method == "PUT" and last in name:
            store.after = lambda *_: None
            second.save(21)
            assert not second.copy()

    first.save(30)
    store.after = in_the_middle
    first.copy()
    check_none_is_half_there(store.objects)
    for step in (31, 41):
        first.save(step)
        assert first.copy()
        second.save(step + 1)
        assert not second.copy()
        check_none_is_half_there(store.objects)
    assert max(copied_steps(first)) <= 30
    assert copied_steps(second) == [21, 32, 42]
    assert step_in(second.restored(tmp_path)) == 42
    texts = [fields["text"] for name, fields in first.told if name == "warning"]
    assert any(f"since ({second.path} on " in text for text in texts)
    claims = [name for name in store.objects if "/copied-by/" in name]
    assert len(claims) == 1

    first.follow_anew()  # as when that run is resumed
    first.save(50)
    assert not first.copy()
    second.save(52)
    assert second.copy()
    assert step_in(first.restored(tmp_path)) == 50


@pytest.mark.parametrize("part", ["records/", "-0000", "own.safetensors", ""])
def test_what_somebody_has_removed_is_copied_again(store, tmp_path, part):
    run = Run(tmp_path, store.loop)
    run.save(10)
    assert not run.copy()
    for name in [name for name in store.objects if part in name]:
        del store.objects[name]
    run.save(20)
    while run.copy():
        pass
    assert step_in(run.restored(tmp_path)) == 20
    first = "step-00000010"  # which is as somebody has left it
    check_none_is_half_there({n: o for n, o in store.objects.items() if first not in n})


def test_where_nothing_may_be_removed_that_is_said_once_and_copying_goes_on_and_ends(
    store, tmp_path
):
    run, later_s = Run(tmp_path, store.loop, keep_last=1), [0.0]
    run.follow_anew(lambda: time.monotonic() + later_s[0])
    store.faults = lambda method, *_: "403" if method == "DELETE" else ""
    for step in (10, 20, 30):
        run.save(step)
        run.copy()
    assert copied_steps(run) == [10, 20, 30]
    (text,) = [fields["text"] for name, fields in run.told if name == "warning"]
    assert text.startswith(f"old copies of checkpoints cannot be removed at {run.url}: ")
    run.follower.run_is_over()
    assert run.copy()
    assert not run.follower.gives_up()
    later_s[0] += 1.01 * END_S
    assert run.copy()
    assert run.follower.gives_up()
    assert run.told[-1][0] == "finished"
    assert step_in(run.restored(tmp_path)) == 30

    store.faults = lambda method, *_: "503" if method == "PUT" else ""
    run.save(40)
    assert run.copy()
    assert "cannot be copied to" in run.told[-1][1]["text"]


def test_where_there_is_room_for_one_more_copy_no_half_of_an_older_one_takes_it(store, tmp_path):
    run, full = Run(tmp_path, store.loop, keep_last=1), [True]
    run.save(10)
    assert not run.copy()

    def fault(method, name, _):
        halves = {each.split("/")[1] for each in store.objects if "/step-" in each}
        begins = "/step-" in name and name.split("/")[1] not in halves
        ends = full[0] and name.endswith("manifest.json")
        return "503" if method == "PUT" and (ends or (begins and len(halves) > 1)) else ""

    store.faults = fault
    run.save(20)
    assert run.copy()
    full[0] = False
    run.save(30)
    assert not run.copy()
    assert step_in(run.restored(tmp_path)) == 30
