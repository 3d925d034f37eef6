"""The dataset of the process that trains knows the epoch of a step before that begins."""

from types import SimpleNamespace

from instep.data.order import Position
from instep.worker.loop.loop import Loop


def test_a_step_tells_its_epoch_first_even_where_no_sample_is_read():
    calls = []

    def passes(where, share, loads):
        calls.append(("passes", where.epoch))
        yield from ()

    loop = SimpleNamespace(
        step=7,
        _loader=SimpleNamespace(tell=lambda epoch: calls.append(("told", epoch))),
        engine=SimpleNamespace(begin_step=lambda step, where: calls.append(("step", step))),
        _passes=passes,
        _exchange=lambda passed, share: None,
    )
    assert list(Loop._agree(loop, Position(3, 0, 8), None, iter(()))) == []
    assert calls == [("told", 3), ("step", 7), ("passes", 3)]
