"""What no master has acknowledged is found by the next process, whenever its last was killed."""

import os
import random

import pytest

from instep.system import outbox
from instep.system.memory_files import OUTBOX, STAMPS
from instep.system.outbox import Outbox


@pytest.fixture
def file():
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def test_the_next_process_finds_what_is_not_acknowledged_in_order_at_any_time(file, monkeypatch):
    monkeypatch.setattr(outbox, "ROOM", 400)
    draw, kept, own, lost = random.Random(3), [], Outbox(file), 0
    for _ in range(3000):
        if kept and draw.random() < 0.52:
            kept.pop(0)
            own.drop()
        else:
            message = draw.randbytes(draw.randint(1, 60))
            before = own._end
            own.put(message)
            assert own._sizes[-1] or before > 200, "there was room"
            kept.append(message if own._sizes[-1] else None)
        if draw.random() < 0.5:
            continue
        found = Outbox(file)
        assert found.left == [each for each in kept if each is not None]
        assert found.lost == kept.count(None)
        lost += found.lost
        own, kept = found, list(found.left)  # killed; the next one sends again what is there
        assert Outbox(file).lost == 0, "it is said once"
    assert lost > 100
    for _ in kept:
        own.drop()
    assert not any(os.pread(file, STAMPS, 0)), "the memory goes back to the system"


@pytest.mark.parametrize("at", [OUTBOX, OUTBOX + 9, 4096, 4100, 4110])
def test_what_was_damaged_is_not_sent(file, at):
    Outbox(file).put(b"a message")
    os.pwrite(file, b"\xff", at)
    assert Outbox(file).left == []
