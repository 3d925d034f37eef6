"""Every codec, where parameters are of all sorts, ranks have uneven work, or parts of a model."""

import pytest
import torch
from test_codecs_in_training import EVERY, OPTIONS
from test_strategies import expected_gradients, model_and_parameters, passes_of

from instep.comm.codecs import CODECS
from instep.comm.codecs.base import aligned
from instep.comm.memory import MemoryComm, run_ranks
from instep.engine.gradients import Gradients
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.records import Attempt
from instep.sync.base import make_strategy
from instep.sync.clashes import check
from instep.sync.generation import Generation
from instep.sync.reducers import reducer_of
from instep.sync.reducers.two_phase import TwoPhase
from ranks import Death, Point, Script, World

STEPS, RANKS = 5, 3


def several_steps(comm, name, vectors):
    """The last gradients; and by parameter, the sum of what was agreed on, and what is left."""
    model, names, parameters = model_and_parameters("sign_vote")  # none is wider than float32
    settings = {"encode_vectors": vectors, "bucket_mb": 0.0001}
    strategy = make_strategy("all_reduce", settings, name, OPTIONS.get(name, {}))
    strategy.start(parameters, comm, Generation(notes=0))
    gradients = Gradients(parameters, strategy.gradient)
    frozen, own = model.frozen.clone(), passes_of(comm.rank, comm.size)
    total = {
        each: torch.zeros_like(p, dtype=torch.float64)
        for each, p in zip(names, parameters, strict=True)
    }
    for step in range(1, STEPS + 1):
        strategy.begin_step(Attempt(0, step, 1))
        for number, (_, weight, rows, rarely) in enumerate(own):
            strategy.begin_pass(weight, last=number == len(own) - 1)
            model(rows, rarely=rarely).backward()
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        strategy.hand_out()
        grads = strategy.apply(lambda: [p.grad for p in parameters])
        for each, grad in zip(names, grads, strict=True):
            if grad is not None:
                assert grad.isfinite().all() if not grad.is_sparse else True
                total[each] += grad.to_dense().double()
    gradients.close()
    assert torch.equal(model.frozen, frozen)
    kept = strategy.own_state()
    left = {each: kept.get(f"residual/{slot}") for slot, each in enumerate(names)}
    return dict(zip(names, grads, strict=True)), total, left


@pytest.mark.grid
@pytest.mark.parametrize("vectors", [False, True], ids=["matrices", "vectors too"])
@EVERY
def test_parameters_of_all_sorts_get_what_they_would_and_nothing_is_lost(name, vectors):
    """Shared, frozen, unused, rarely used, sparse and 16-bit ones; rank r runs r passes."""
    every = run_ranks(RANKS, several_steps, name, vectors)
    last, agreed, _ = every[0]
    for grads, total, _ in every:
        assert grads["never"] is None
        assert all(torch.equal(total[each], agreed[each]) for each in agreed)
        assert all(g is None or g.dtype == last[n].dtype for n, g in grads.items())
    if name == "dgc":  # it limits and drops by its own rule
        return
    for each, wanted in expected_gradients("all_reduce", RANKS).items():
        if wanted is None:
            continue
        left = sum(own[each].double() for *_, own in every if own[each] is not None)
        low = last[each].dtype == torch.bfloat16  # what is agreed on is rounded to that
        rtol, atol = (2e-2, 2e-3) if low else (1e-4, 1e-5)
        torch.testing.assert_close(agreed[each] + left, STEPS * wanted, rtol=rtol, atol=atol)


IN_MESHES = []
for _name in CODECS:
    try:
        check(spec_file.build({"recipe": "a.py:f", "workers": 4, "mesh": {"shard": 2},
                               "sync": {"codec": _name}}, source="a test"))  # fmt: skip
        IN_MESHES.append(_name)
    except SpecError:
        pass


@pytest.mark.parametrize("name", [name for name in IN_MESHES if name != "none"])
def test_ranks_that_own_parts_of_a_model_come_to_one_result_though_one_dies(tmp_path, name):
    """What must hold then is asked by `World`."""
    torch.set_num_threads(1)
    world = World(tmp_path, "all_reduce", {"codec": name, "encode_vectors": True}, shard=2)
    world.train([Script(deaths=[Death(1, Point("agreed", 2))])])


class Counted(MemoryComm):
    """Counts the bytes that go to other ranks in both phases."""

    sent = 0

    def all_to_all(self, out, parts):
        self.sent += parts.numel() * (self.size - 1) // self.size
        return super().all_to_all(out, parts)

    def all_gather(self, out, part):
        self.sent += part.numel() * (self.size - 1)
        return super().all_gather(out, part)


TWO_PHASES = [n for n in CODECS if n != "none" and reducer_of(CODECS[n]()) is TwoPhase]


@pytest.mark.grid
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", TWO_PHASES)
def test_what_is_sent_is_what_the_sizes_of_codecs_say(name, ranks):
    count = 1_000_003  # a segment begins with a few bytes, which are no part of the price

    def body(comm):
        comm.__class__ = Counted
        weight = torch.nn.Parameter(torch.zeros(count, 1))
        strategy = make_strategy("all_reduce", {}, name)
        strategy.start([weight], comm, Generation(notes=0))
        strategy.begin_step(Attempt(0, 1, 1))
        before = comm.sent
        strategy.begin_pass(1.0, last=True)
        strategy.gradient(0, torch.randn(count, 1))
        strategy.exchange(torch.zeros(0, dtype=torch.float64))
        return comm.sent - before, strategy.price(4 * count, ranks).sent_bytes

    codec = CODECS[name]()
    each = aligned(codec.size(-(-count // ranks)))
    for sent, plain in run_ranks(ranks, body):
        assert sent == 2 * (ranks - 1) * each
        smaller = 4 * count / codec.size(count)
        assert sent == pytest.approx(plain / smaller, rel=0.02)
