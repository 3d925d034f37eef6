"""Which commit the processes of a replica find in memory of their host."""

import os

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.data.order import position
from instep.engine.state.committed import Commit, CommittedState
from instep.engine.state.host_copy import HostCopy
from instep.engine.turns import TurnState
from instep.records import Attempt
from instep.state.snapshot import Snapshot, tied_names
from instep.sync.rounds.averaging import Averaging
from instep.system import memory_files
from instep.worker.rounds.local_optimizers import LocalOptimizers
from instep.worker.rounds.local_states import OPTIMIZER, LocalStates
from instep.worker.rounds.round_update import RoundUpdate
from ranks import averaging

CPU = torch.device("cpu")


def snapshot(step):
    return Snapshot(step=step, tensors={"own": {"a": torch.full((5,), float(step))}}, facts={})


@pytest.fixture
def files():
    """A memory file for each of two ranks, which a fork server keeps."""
    files = [os.memfd_create(f"rank-{rank}") for rank in range(2)]
    yield files
    for file in files:
        os.close(file)


def copies_of(files, monkeypatch):
    """One for each rank, as new processes have them."""
    found = []
    for file in files:
        monkeypatch.setattr(memory_files, "_given", file)
        found.append(HostCopy())
    return found


def left(copies):
    """What each rank finds: the commit, and the values of its tensor."""
    found = run_ranks(2, lambda comm: copies[comm.rank].of_all(comm, CPU))
    return [
        one and (one[0], one[1].step, set(one[1].tensors["own"]["a"].tolist())) for one in found
    ]


def keep(copy, number, generation=1):
    copy.keep(snapshot(number), Attempt(0, number, generation))


def test_all_ranks_take_the_newest_commit_of_which_all_have_a_copy(files, monkeypatch):
    first, second = copies_of(files, monkeypatch)
    for number in (1, 2, 3):
        keep(first, number)
        keep(second, number)
    assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 1), 3, {3.0})]
    keep(first, 4)  # the second is killed before
    for _ in range(2):  # and again before the next commit
        assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 1), 3, {3.0})]


def test_a_copy_that_was_forgotten_never_counts_again(files, monkeypatch):
    """Another attempt at its commit may have given other values."""
    first, second = copies_of(files, monkeypatch)
    for number in (1, 2):
        keep(first, number)
        keep(second, number)
    keep(first, 3)
    first, second = copies_of(files, monkeypatch)
    assert left([first, second])[0][1] == 2
    keep(first, 3, generation=2)
    assert left(copies_of(files, monkeypatch))[1][1] == 2
    first, second = copies_of(files, monkeypatch)
    keep(first, 3, generation=3)
    keep(second, 3, generation=3)
    assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 3), 3, {3.0})]


def test_tied_weights_are_one_tensor_again(files, monkeypatch):
    """A model whose own are tied refuses two."""
    weight = torch.arange(6.0).view(2, 3)
    model = {"embedding": weight, "bias": torch.ones(3), "output": weight, "same": weight.clone()}
    at = Attempt(0, 1, 1)
    copies_of(files, monkeypatch)[0].keep(Snapshot(step=1, tensors={"model": model}, facts={}), at)
    found = copies_of(files, monkeypatch)[0].back_to(at).tensors["model"]
    assert list(found) == list(model)
    assert all(torch.equal(found[name], model[name]) for name in model)
    assert tied_names(found) == {"output": "embedding"}


def test_without_a_common_commit_there_is_none(files, monkeypatch):
    first, second = copies_of(files, monkeypatch)
    assert left([first, second]) == [None, None]
    keep(first, 1)
    assert left(copies_of(files, monkeypatch)) == [None, None]
    keep(second, 2)
    assert left(copies_of(files, monkeypatch)) == [None, None]


class Rank:
    """A process that averages, and keeps what the optimizers of participants remember."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.model = nn.Linear(3, 2)
        parameters = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        settings = {"seed": 0, "max_grad_norm": None, "scaler": scaler}
        update = RoundUpdate(
            self.optimizer, None, parameters, job=averaging(local_steps=1), **settings
        )
        self.strategy = Averaging()
        self.strategy.kept = self.local = LocalStates(
            {OPTIMIZER: LocalOptimizers(self.optimizer)}, torch.device("cpu")
        )
        self.state = CommittedState(self.model, [TurnState("", parameters, update, self.strategy)])

    def commit_round(self):
        for participant in (0, 2):
            self.optimizer.state.clear()
            self.local.resume(participant)
            self.model(torch.full((4, 3), 1.0 + participant)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.local.computed(participant, self.local.pack())
        self.optimizer.state.clear()
        self.local.apply()

    def kept(self):
        """By participant, what its optimizer resumes."""
        found = []
        for participant in (0, 2):
            self.local.resume(participant)
            found.append([dict(each) for each in self.optimizer.state.values()])
        return found


def test_a_copy_has_what_the_optimizers_of_participants_keep(files, monkeypatch):
    ranks = [Rank(seed) for seed in range(2)]
    copies = copies_of(files, monkeypatch)
    for number in (1, 2, 3):
        for rank, copied in zip(ranks, copies, strict=True):
            rank.commit_round()
            copied.keep(rank.state.for_another(), Attempt(0, number, 1))
    ranks[0].commit_round()  # the second is killed before
    copies[0].keep(ranks[0].state.for_another(), Attempt(0, 4, 1))
    again = copies_of(files, monkeypatch)
    found = run_ranks(2, lambda comm: again[comm.rank].of_all(comm, CPU))
    for seed, (at, snapshot) in enumerate(found):
        assert at.number == 3
        fresh, wanted = Rank(seed), Rank(seed)
        fresh.state.take(snapshot, "the memory of this host")
        for _ in range(3):
            wanted.commit_round()
        torch.testing.assert_close(fresh.kept(), wanted.kept(), rtol=0, atol=0)
        assert fresh.kept()[0][0]["step"] == 3


def test_a_copy_has_the_rows_that_the_writer_of_the_ledger_may_not_have_written(files, monkeypatch):
    rank, fresh = Rank(), Rank(1)
    rows = [(1, 0, 0, 1, worker, 0, 4 * worker, 4) for worker in range(2)]
    done = Commit(1, 0.5, None, told=False, ends=False)
    rank.state.commit(done, position(1, 64, 8), rows)
    copy, other = copies_of(files, monkeypatch)
    for each in (copy, other):
        each.keep(rank.state.for_another(), Attempt(0, 1, 1))
    again = copies_of(files, monkeypatch)
    (_, snapshot), _ = run_ranks(2, lambda comm: again[comm.rank].of_all(comm, CPU))
    fresh.state.take(snapshot, "the memory of this host")
    assert (fresh.state.last, fresh.state.rows) == (done, rows)
