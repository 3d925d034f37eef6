"""Fragments that agree in turn: with one fragment it is DiLoCo to the bit, and all are alike."""

import pytest
import torch
from torch import nn

from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.errors import SpecError
from instep.job.sync import SyncSpec
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.rounds.outer import Momentum, Outer
from instep.sync.rounds.segments import Segments
from instep.sync.rounds.streaming import Streaming
from instep.worker.rounds.local_models import LocalModel
from instep.worker.rounds.local_states import MODEL, LocalStates

SHAPES = [(90, 100), (7,), (3, 4000), (5,)]
PARTICIPANTS, WEIGHTS = 3, [0.2, 0.3, 0.5]


def parameters():
    generator = torch.Generator().manual_seed(5)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def test_more_fragments_than_there_are_numbers_to_train_are_refused():
    def body(comm):
        strategy = make_strategy("diloco", {"fragments": 8})
        strategy.start(
            [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.zeros(1))],
            comm,
            Generation(notes=0),
        )

    with pytest.raises(SpecError, match=r"fragments = 8: the model has 7 numbers to train"):
        run_ranks(1, body)


def way(participant, step):
    generator = torch.Generator().manual_seed(100 * step + participant)
    return [0.1 * torch.randn(shape, generator=generator) for shape in SHAPES]


def trained(comm, make, steps=4):
    strategy, slots = make(), parameters()
    if isinstance(strategy, Streaming):
        strategy.participants = PARTICIPANTS
        parts = {MODEL: LocalModel(slots, strategy.agreed_since)}
        strategy.kept = LocalStates(parts, torch.device("cpu"), stays=True)
    strategy.start(slots, comm, Generation(notes=0))

    @torch.no_grad()
    def move():
        for slot in slots:
            slot.sub_(slot.grad)

    for step in range(1, steps + 1):
        own = range((comm.rank + step) % comm.size, PARTICIPANTS, comm.size)
        strategy.begin_step(Attempt(0, step, 1))
        strategy.recall(own)
        for n in own:
            strategy.begin_pass(WEIGHTS[n], last=False, unit=n)
            for slot, gradient in enumerate(way(n, step)):
                strategy.gradient(slot, gradient)
            if strategy.kept is not None:
                strategy.kept.computed(n, strategy.kept.pack())
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.prepare(step, 1.0)
        strategy.hand_out()
        strategy.apply(move)
    return torch.cat([slot.detach().flatten() for slot in slots])


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_with_one_fragment_it_is_diloco_to_the_bit(ranks):
    def streaming():
        outer = Outer(Momentum(0.7, 0.9, nesterov=True))
        return Streaming(fragments=1, outer=outer, codec=CODECS["int4"]())

    (wanted,) = run_ranks(1, trained, lambda: make_strategy("diloco", {}, "int4"))
    for found in run_ranks(ranks, trained, streaming):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_fragments_are_of_about_the_same_size_and_leave_nothing_out(count):
    segments = Segments(parameters(), fragments=count)
    stops = [stop for _, stop in segments.fragments]
    assert [start for start, _ in segments.fragments] == [0, *stops[:-1]]
    assert stops[-1] == segments.length == sum(p.numel() for p in parameters())
    sizes = [stop - start for start, stop in segments.fragments]
    assert max(sizes) <= 1.2 * segments.length / count
    for fragment in segments.fragments:
        assert set(fragment) <= set(segments.cuts)
        stretches = segments.stretches([0, 1], 2, fragment)
        assert (stretches[0][0], stretches[1][1]) == fragment


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("averaging", {"local_steps": 4, "fragments": 2}, "agrees on all parameters at once"),
        ("diloco", {"local_steps": 20, "fragments": 3}, "multiple of options.fragments = 3"),
        ("diloco", {"fragments": 4, "delay": 6}, "at most local_steps / fragments = 5"),
        ("diloco", {"delay": 1}, "needs options.fragments of at least 2"),
        ("diloco", {"fragments": 0}, "at least 1"),
    ],
)
def test_fragments_that_cannot_be_are_refused(name, options, why):
    with pytest.raises(ValueError, match=why):
        SyncSpec(name=name, options=options)


def test_double_precision_is_refused():
    def start(comm):
        strategy = make_strategy("diloco", {"fragments": 2})
        strategy.start([nn.Parameter(torch.zeros(4).double())], comm, Generation(notes=0))

    with pytest.raises(SpecError, match=r"torch\.float64, and fragments are sent as float32"):
        run_ranks(1, start)


def test_more_fragments_than_numbers_are_refused():
    def start(comm):
        strategy = make_strategy("diloco", {"fragments": 5, "local_steps": 10})
        strategy.start([nn.Parameter(torch.zeros(4))], comm, Generation(notes=0))

    with pytest.raises(SpecError, match=r"fragments = 5: the model has 4 numbers to train"):
        run_ranks(1, start)
