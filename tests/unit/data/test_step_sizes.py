"""Steps of unequal size: ranges of one sequence, in plans, in the ledger, and after a death."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.order import CutPosition, Order
from instep.data.step_sizes import DrawnSizes, RecordedSizes
from instep.engine.assignment import Lockstep
from instep.events import LEDGER
from instep.job.train import TrainSpec
from instep.report.figures.proof import untiled
from instep.store.audit import audit
from ranks import LAST, PARTS, SAMPLES, Death, Point, Script, World

SIZES = st.lists(st.lists(st.integers(0, 9), min_size=3, max_size=3), min_size=4, max_size=4)


def of(sizes, parts=4, total=None):
    return DrawnSizes(len(sizes[0]), parts, lambda epoch: np.array(sizes[epoch]), total)


@given(sizes=SIZES, last=st.integers(1, 12))
def test_steps_are_ranges_that_follow_each_other_through_epochs_of_any_length(sizes, last):
    batches = Batches(15, 5, sizes=of(sizes))
    ends = [0, *np.cumsum(np.ravel(sizes)[:last]).tolist()]
    assert [batches.of(n).size for n in range(1, last + 1)] == np.diff(ends).tolist()
    assert batches.taken(last) == ends[-1] == sum(batches.due(last))
    assert batches.due(last)[:-1] == [sum(sizes[n]) for n in range((last - 1) // 3)]
    assert [batches.ends_epoch(n) for n in range(1, last + 1)] == [
        n % 3 == 0 for n in range(1, last + 1)
    ]
    assert (batches.epochs(last), batches.in_epochs(4)) == (last // 3, 12)


@given(sizes=SIZES, workers=st.integers(1, 5), merge=st.booleans())
def test_a_ledger_of_such_steps_is_proved_by_itself_and_a_lost_record_shows(sizes, workers, merge):
    train, rows = TrainSpec(global_batch=5, micro_batches=4), []
    for rank in range(workers):
        form = Form(generation=1, rank=rank, members=list(range(workers)))
        lockstep = Lockstep(form, train, Batches(15, 5, sizes=of(sizes)), by_speed=False)
        for step, (where, share) in enumerate(lockstep.plan(1, 11, merge=merge), 1):
            assert all(part.size for part in share.passes)  # an empty micro-batch is no pass
            lockstep.prepared(0, step, where)
            rows += lockstep.records() if rank == 0 else []
    ledger = np.array(rows, LEDGER)
    derived = Batches(15, 5, sizes=of(sizes))
    read = Batches(15, 5, sizes=RecordedSizes(3, None, ledger))
    for known in (derived, read):
        assert audit(ledger, known, last_step=11).exact
        assert not len(untiled(ledger, known, 11))
    real = np.flatnonzero(ledger["stop"] > ledger["first"])
    for lost in real[: len(real) - 1 : max(1, len(real) // 3)]:
        rest = np.delete(ledger, lost)
        stop = ledger["stop"][lost]
        if not any((rest["epoch"] == ledger["epoch"][lost]) & (rest["first"] >= stop)):
            continue  # the last one of its epoch: who cannot derive the sizes cannot miss it
        again = Batches(15, 5, sizes=RecordedSizes(3, None, rest))
        assert len(untiled(rest, again, 11)) or not audit(rest, again, last_step=11).exact


class Uneven:
    """Epochs of two steps; one of them is empty at times, and a micro-batch too."""

    steps, total = 2, SAMPLES
    cuts = (((0, 6, 6, 14), (14, 14, 14, 16)), ((0, 0, 0, 0), (0, 9, 14, 16)))

    def positions(self, epoch):
        return SAMPLES

    def of(self, epoch, number):
        cuts = self.cuts[epoch][number]
        assert len(cuts) == PARTS + 1
        return CutPosition(epoch, cuts[0], cuts[-1], cuts)


@pytest.mark.parametrize("determinism", ["order", "bits"])
def test_a_run_of_uneven_and_empty_steps_survives_deaths_with_the_same_result(
    tmp_path, determinism
):
    whole = World(tmp_path / "whole", determinism=determinism, sizes=Uneven())
    whole.train()
    for step in range(1, LAST + 1):
        broken = World(tmp_path / f"{step}", determinism=determinism, sizes=Uneven())
        broken.train([Script([Death(step % 3, Point("agreed", step))])], replace=False)
        for name, tensor in whole.members[0].tensors().items():
            exact = {"rtol": 0, "atol": 0} if determinism == "bits" else {}
            torch.testing.assert_close(broken.members[0].tensors()[name], tensor, **exact)


def test_a_permutation_cut_at_multinomial_sizes_puts_each_sample_into_a_step_of_its_own():
    samples, steps, epochs = 12, 4, 3000
    rng = np.random.default_rng(1)
    drawn = [rng.multinomial(samples, [1 / steps] * steps) for _ in range(epochs)]
    sizes, order = of(drawn, total=samples), Order(samples, 3)
    counts = np.zeros((samples, steps))
    together = 0
    for epoch in range(epochs):
        step_of = np.empty(samples, np.int64)
        for number in range(steps):
            _, first, stop = sizes.of(epoch, number)
            step_of[order.indices(epoch, first, stop)] = number
        counts[np.arange(samples), step_of] += 1
        together += step_of[0] == step_of[1]
    expected = epochs / steps
    assert ((counts - expected) ** 2 / expected).sum() < 75  # 36 degrees of freedom: p = 1e-4
    assert abs(together / epochs - 1 / steps) < 0.03  # independent: 1/4; without: 2/11
