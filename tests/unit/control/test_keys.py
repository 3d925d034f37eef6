"""Members of a group ask the master for the keys of all, a few times each."""

import random

import pytest

from instep.comm.protocol.messages import StoreGet, StoreValue
from instep.control import keys as of_keys
from instep.control.keys import Keys

GROUP = "generation-7/0"


class Asker:
    """A member: asks for one key after the other, as gloo does, and keeps all that it is told."""

    def __init__(self, size):
        self.size, self.told, self.asked = size, {}, 0

    def question(self):
        """The next, if there is one."""
        missing = (f"{GROUP}/{rank}" for rank in range(self.size))
        key = next((key for key in missing if key not in self.told), None)
        self.asked += key is not None
        return key and StoreGet(key=key, known=len(self.told))

    def hear(self, answer):
        assert isinstance(answer, StoreValue)
        self.told |= {answer.key: answer.value, **answer.more}


def meet(keys, size, order, forget_at=-1):
    """Members set their keys in this order and ask at once; returns them."""
    askers = [Asker(size) for _ in range(size)]
    begun = set()

    def ask(number):
        while (question := askers[number].question()) is not None:
            answer = keys.find(question, number)
            if answer is None:
                return
            askers[number].hear(answer)

    for turn, number in enumerate(order):
        woken = keys.leave(f"{GROUP}/{number}", b"of %d" % number)
        begun.add(number)
        for other, answer in woken:
            askers[other].hear(answer)
            ask(other)
        ask(number)
        if turn == forget_at:  # another master, which knows what the journal kept, in another order
            kept = list(keys._groups.pop(GROUP).items())
            random.Random(turn).shuffle(kept)
            waiting = keys._waiting
            keys = Keys()
            keys._waiting = waiting
            for key, value in kept:
                keys.leave(key, value)
    return askers


def check_all_know_all(askers, size):
    expected = {f"{GROUP}/{number}": b"of %d" % number for number in range(size)}
    assert all(asker.told == expected for asker in askers)


@pytest.mark.parametrize("size", [1, 16, 256])
def test_a_member_asks_a_few_times_however_many_there_are(size):
    order = list(range(size))
    random.Random(size).shuffle(order)
    askers = meet(Keys(), size, order)
    check_all_know_all(askers, size)
    assert sum(asker.asked for asker in askers) <= 8 * size


@pytest.mark.parametrize("seed", range(20))
def test_whatever_order_another_master_knows_them_in_each_gets_all(seed):
    dice = random.Random(seed)
    size = dice.randint(2, 12)
    order = dice.sample(range(size), size)
    check_all_know_all(meet(Keys(), size, order, forget_at=dice.randrange(size)), size)


def test_what_is_told_besides_fits_a_message(monkeypatch):
    monkeypatch.setattr(of_keys, "LARGEST", 4 * 100)
    keys = Keys()
    for number in range(5):
        keys.leave(f"{GROUP}/{number}", bytes(30))
    told = keys.find(StoreGet(key=f"{GROUP}/4"), 0)
    assert set(told.more) == {f"{GROUP}/0", f"{GROUP}/1"}


def test_nothing_is_told_of_another_group():
    keys = Keys()
    keys.leave("generation-6/0/0", b"old")
    keys.leave("known", b"all")
    keys.leave(f"{GROUP}/0", b"new")
    assert keys.find(StoreGet(key=f"{GROUP}/0"), 0) == StoreValue(key=f"{GROUP}/0", value=b"new")
    keys.forget("generation-6/")
    assert keys.find(StoreGet(key="generation-6/0/0"), 0) is None
    assert keys.value("known") == b"all"
    assert keys.value("generation-6/0/0") == b""
