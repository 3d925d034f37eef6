"""Sums by a gather: as plain ones where nothing is dropped, and else nothing is lost."""

import pytest
import torch
from torch.nn import Parameter

from helpers import run_processes
from instep.comm.codecs import CODECS
from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.generation import Generation
from instep.sync.reducers import Place, reducer_of
from instep.sync.reducers.gather import Gather

SHAPES = [(50, 40), (7,), (300,), (1,), (20, 5, 4)]


def drawn(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    made = [torch.randn(shape, generator=generator) for shape in SHAPES]
    made[0][torch.rand(50, generator=generator) < 0.9] = 0  # few rows
    if rank == 1:
        made[2].zero_()
    return made


def trained(comm, codec, steps=3, bucket_mb=0.001):
    strategy = make_strategy("all_reduce", {"bucket_mb": bucket_mb, "encode_vectors": True}, codec)
    parameters = [Parameter(torch.zeros(shape)) for shape in SHAPES]
    strategy.start(parameters, comm, Generation(notes=1))
    results = []
    for step in range(1, steps + 1):
        strategy.begin_step(Attempt(0, step, 1))
        strategy.begin_pass(1 / comm.size, last=True)
        for slot, gradient in reversed(list(enumerate(drawn(comm.rank, step)))):
            strategy.gradient(slot, gradient)
        strategy.exchange(torch.zeros(1, dtype=torch.float64))
        strategy.hand_out()
        results.append(strategy.apply(lambda: [p.grad.clone() for p in parameters]))
    return results, strategy.laws, strategy.own_state()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_nonzero_gives_the_sum_of_plain_numbers_in_the_order_of_the_ranks(size):
    for results, laws, own in run_ranks(size, trained, "nonzero"):
        assert not laws  # nothing that a commit would have to be voted for
        assert not own
        for step, got in enumerate(results, 1):
            given = [drawn(rank, step) for rank in range(size)]
            for slot, one in enumerate(got):
                total = torch.zeros(SHAPES[slot])
                for each in given:
                    total += each[slot] * (1 / size)
                assert torch.equal(one, total)


@pytest.mark.process
def test_processes_give_what_threads_give(tmp_path):
    threads = run_ranks(2, trained, "nonzero")
    processes = run_processes(2, trained, tmp_path, "nonzero")
    for (one, *_), (other, *_) in zip(threads, processes, strict=True):
        for got, wanted in zip(one, other, strict=True):
            assert all(map(torch.equal, got, wanted))


def test_few_values_are_few_bytes():
    class Counts:
        """Counts the bytes that a rank gives to gathers."""

        def __init__(self, comm):
            self.comm, self.bytes = comm, 0

        def __getattr__(self, name):
            return getattr(self.comm, name)

        def all_gather(self, out, part):
            self.bytes += part.nbytes
            return self.comm.all_gather(out, part)

    def body(comm):
        comm = Counts(comm)
        codec = CODECS["nonzero"]()
        layout = Gather.layout([[Place("rows", (1000, 100))]], comm.size, ())
        reducer = reducer_of(codec)(codec, comm, layout)
        flat = torch.zeros(1000, 100)
        flat[comm.rank] = 1.0
        reducer.begin(0, flat.view(-1), key=1)
        reducer.finish()
        assert flat[:3].tolist() == [[1.0] * 100] * 3
        assert not flat[3:].any()
        return comm.bytes

    for sent in run_ranks(3, body):
        assert 400 < sent < 400 + 100 * 1.5 + 100


def test_a_codec_that_cannot_be_cut_has_its_residuals_carried_over():
    """The same codec by both ways gives the same total in the long run."""

    class Uncut(CODECS["int4"]):
        segmentable = False

    def body(comm):
        codec = Uncut()
        layout = Gather.layout([[Place("a", (600,))], [Place("b", (5,))], []], comm.size, ())
        reducer = reducer_of(codec)(codec, comm, layout)
        assert isinstance(reducer, Gather)
        given, agreed = torch.zeros(605, dtype=torch.float64), torch.zeros(605, dtype=torch.float64)
        for step in range(60):
            values = torch.randn(605, generator=torch.Generator().manual_seed(step + comm.rank))
            flats = [values[:600].clone(), values[600:].clone(), torch.zeros(0)]
            for number, flat in enumerate(flats):
                reducer.begin(number, flat, key=step)
            reducer.finish()
            if step % 7 == 3:
                reducer.abandon()
                continue
            reducer.apply()
            given += values
            agreed += torch.cat(flats)
        own = reducer.own_state()
        return given, agreed, torch.cat([own["residual/a"], own["residual/b"]]).double()

    ranks = run_ranks(3, body)
    given, left = (sum(each[n] for each in ranks) for n in (0, 2))
    torch.testing.assert_close(ranks[0][1] + left, given, rtol=0, atol=2e-5)
    assert left.abs().max() > 0.1
    assert all(torch.equal(agreed, ranks[0][1]) for _, agreed, _ in ranks)
