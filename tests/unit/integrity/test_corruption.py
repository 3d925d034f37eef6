"""Workers as threads, one of them with a fault: it is found, in time, and it is named."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.comm.memory import run_ranks
from instep.data.order import position
from instep.engine.gradients import Gradients
from instep.engine.passes import parts_of, share_of
from instep.engine.update import Update
from instep.errors import PeerError, Unrepeatable, WorkerError
from instep.integrity.corruption import CorruptionCheck
from instep.integrity.rollback import MOST_IN_DOUBT
from instep.job import file as spec_file
from instep.sync.all_reduce import AllReduce
from instep.sync.generation import Generation
from instep.worker.loop.observed import Observed
from marks import tail

PARTS, BATCH, SAMPLES = 24, 24, 120
FAULTY = 1
BIT = 1 << 20

torch.manual_seed(4)
MODEL = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
INPUTS = torch.randn(SAMPLES, 3, generator=torch.Generator().manual_seed(1))
JOB = spec_file.build(
    {
        "recipe": "a.py:recipe",
        "train": {"determinism": "bits", "micro_batches": PARTS, "global_batch": BATCH},
        "check": {"corruption": True},
    },
    source="a test",
)


class MasterConnection:
    """A member that writes down what it is told, and has nobody to take its place."""

    def __init__(self, size, told, recovers=False):
        self.job, self.number, self.recovers, self.told = JOB, 0, recovers, told
        self.records = self
        self.form = SimpleNamespace(members=[10 * (rank + 1) for rank in range(size)])

    def emit(self, name, **fields):
        self.told.append((name, fields))

    def flush(self):
        pass


class Copy:
    """Counts instead of copying."""

    step = 0

    def __init__(self):
        self.kept = self.given = 0

    def keep(self):
        self.kept += 1

    def give_back(self):
        self.given += 1


class Rank:
    """The middle of a worker's loop: passes, agreement, update, with a check; no data layer."""

    def __init__(self, comm, fault, told, recovers=False):
        self.comm, self.fault, self.step, self.asked = comm, fault, 0, False
        self.aside = False
        self.model = copy.deepcopy(MODEL)
        self.parameters = list(self.model.parameters())
        self.update = Update(
            torch.optim.AdamW(self.parameters, lr=0.01),
            None,
            self.parameters,
            seed=0,
            max_grad_norm=None,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self.member, self.copy = MasterConnection(comm.size, told, recovers), Copy()
        self.dropped = []
        self.check = self.new_guard()
        self.strategy = AllReduce()
        self.parameters[0].register_hook(lambda g: fault(self, "gradient", g))
        self.enter()

    def new_guard(self):
        observed = Observed(
            member=self.member,
            model=self.model,
            update=self.update,
            state=SimpleNamespace(progress=SimpleNamespace(step=self.step)),
            run_pass=self.run_aside,
            set_aside=self.dropped.append,
            drop_after=lambda step: None,
        )
        return CorruptionCheck(observed, self.copy)

    def enter(self):
        self.check.generation(self.parameters, self.comm)
        self.strategy.start(
            self.parameters, self.comm, Generation(notes=self.check.size, parts=PARTS)
        )
        self.gradients = Gradients(self.parameters, self.hear)

    def leave(self):
        self.gradients.close()
        self.check.over()
        self.strategy.stop()

    def hear(self, slot, gradient):
        self.check.gradient(slot, gradient)
        if not self.aside:
            self.strategy.gradient(slot, gradient)

    def run_aside(self, part, factor):
        self.aside = True
        self.run_pass(part, factor)
        self.aside = False

    def run_pass(self, part, factor=1.0):
        self.part = part
        for parameter in self.parameters:
            parameter.grad = None
        rows = INPUTS[part.samples.first : part.samples.stop]
        (self.model(rows).square().mean() * factor).backward()

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            where = position(self.step, SAMPLES, BATCH)
            share = share_of(
                where, parts_of(where, JOB.train), self.comm.size, self.comm.rank, merge=False
            )
            plan = self.check.plan(iter([(where, share)]), self.step, None)
            self.one_step(where, next(plan)[1].passes)
        return self.step

    def one_step(self, where, passes):
        self.fault(self, "begin", None)
        notes = None
        while notes is None:
            self.check.begin_step(self.step, where)
            for part in passes:
                weight = 0.0 if part.repeats else 1 / PARTS
                self.strategy.begin_pass(weight, last=part is passes[-1])
                self.check.begin_pass(part)
                self.run_pass(part)
                self.check.end_pass(part)
            self.check.passes_done()
            own = torch.tensor(self.check.notes(), dtype=torch.float64)
            try:
                notes = self.strategy.exchange(own)
            except Unrepeatable as error:
                self.check.unrepeatable(error)
                raise
        self.check.judge(notes.tolist())
        self.strategy.hand_out()
        self.strategy.apply(self.move)
        self.check.committed()

    def move(self):
        self.fault(self, "agreed", None)
        self.update.apply(self.step)


def sound(rank, moment, gradient):
    return None


def flip(tensor):
    tensor.data.view(-1).view(torch.int32)[2] ^= BIT


def faulty(rank, moment, wanted, steps):
    return moment == wanted and rank.step in steps and rank.comm.rank == FAULTY


def weight_flips(rank, moment, gradient):
    if faulty(rank, moment, "begin", [13]):
        flip(rank.parameters[0])


def moment_flips(rank, moment, gradient):
    if faulty(rank, moment, "begin", [13]):
        flip(rank.update.optimizer.state[rank.parameters[2]]["exp_avg"])


def agreed_flips(rank, moment, gradient):
    if faulty(rank, moment, "agreed", [13]):
        flip(rank.parameters[0].grad)


def gradient_is_stuck(rank, moment, gradient):
    if not faulty(rank, moment, "gradient", range(13, 99)):
        return None
    spoilt = gradient.clone()
    spoilt.view(torch.int32)[0, 0] |= BIT
    return spoilt


def gradient_lacks_a_bit(rank, moment, gradient):
    if not faulty(rank, moment, "gradient", range(13, 99)):
        return None
    spoilt = gradient.clone()
    spoilt.view(torch.int32)[:] &= ~BIT
    return spoilt


def once(rank):
    """Whether it is the first time that this is asked."""
    asked, rank.asked = rank.asked, True
    return not asked


def gradient_flips_once(rank, moment, gradient):
    """In a pass that is computed twice, the first of all of them."""
    if not (faulty(rank, moment, "gradient", [20]) and rank.part.repeats and once(rank)):
        return None
    spoilt = gradient.clone()
    spoilt.view(torch.int32)[0, 0] ^= BIT
    return spoilt


def gradient_leaps_once(rank, moment, gradient):
    """By so much that it does not fit its lattice, in a pass that nobody repeats."""
    leaps = faulty(rank, moment, "gradient", [15]) and once(rank)
    return gradient * 2.0**20 if leaps else None


def train(comm, fault, told, steps=40):
    rank = Rank(comm, fault, told)
    try:
        return rank.train(steps), rank.copy.kept
    except WorkerError as error:
        if "in memory" in str(error):  # of which only this rank knows: the others wait for it
            comm.interrupt()
        return str(error), rank.step
    except PeerError:
        return "", rank.step


@pytest.mark.parametrize("size", [2, *map(tail, (1, 3, 5))])
def test_where_nothing_is_wrong_nothing_is_found(size):
    told = []
    done = run_ranks(size, train, sound, told, 80)
    copies = {1: 0, 2: 3, 3: 3, 5: 2}[size]  # the first, and one of every four with repetitions
    assert done == [(80, copies)] * size
    assert told == []


NAMED, DOUBT = [10 * (FAULTY + 1)], [10, 20]


@pytest.mark.grid(4)
@pytest.mark.parametrize(
    ("fault", "size", "what", "where", "workers", "found_in"),
    [
        (weight_flips, 1, None, None, None, None),  # the faulty one is not there
        (weight_flips, 2, "parameter", "0.weight", NAMED, 13),
        (weight_flips, 3, "parameter", "0.weight", NAMED, 13),
        (moment_flips, 2, "state", "2.weight", [], 20),
        (moment_flips, 3, "state", "2.weight", NAMED, 20),
        (agreed_flips, 3, "state", "0.weight", NAMED, 20),
        (gradient_is_stuck, 2, "gradient", None, NAMED, 20),
        (gradient_is_stuck, 3, "gradient", None, NAMED, 20),
        (gradient_lacks_a_bit, 2, "gradient", None, [], 20),
        (gradient_lacks_a_bit, 3, "gradient", None, NAMED, 20),
        (gradient_flips_once, 2, "gradient", None, NAMED, 20),
        (gradient_flips_once, 3, "gradient", None, NAMED, 20),
        (gradient_leaps_once, 2, "gradient", "all passes", NAMED, 15),
        (gradient_leaps_once, 3, "gradient", "all passes", NAMED, 15),
    ],
)
def test_a_fault_is_found_within_ten_steps_and_its_worker_named(
    fault, size, what, where, workers, found_in, monkeypatch
):
    monkeypatch.setattr(
        "instep.integrity.corruption.WATCH_SHARE", 1e9
    )  # threads take turns at any speed
    told = []
    done = run_ranks(size, train, fault, told)
    if what is None:
        assert (told, done) == ([], [(40, 0)])
        return
    ((name, fields),) = told
    assert name == "corruption_found"
    assert fields["step"] == found_in
    assert (fields["what"], fields["workers"]) == (what, workers)
    assert fields["suspects"] == ([] if workers else DOUBT)
    assert where in (None, fields["where"])
    assert [step for _, step in done] == [found_in] * size
    texts = [text for text, _ in done]
    if what == "parameter":
        assert [bool(text) for text in texts] == [rank == FAULTY for rank in range(size)]
    else:
        assert all(f"worker {NAMED[0]}" in text for text in texts)


def go_on(comm, fault, told):
    """As `train`, but in a run that replaces workers: in doubt, all go back and try again."""
    rank = Rank(comm, fault, told, recovers=True)
    rounds = 0
    while True:
        try:
            rank.train(40)
            return rounds, rank.copy.given
        except PeerError:
            rounds += 1
            rank.leave()
            rank.check.go_back()
            rank.step -= rank.step % 10 or 10
            rank.enter()
        except WorkerError as error:
            return str(error), rank.copy.given


def test_in_doubt_all_go_back_and_in_lasting_doubt_the_run_ends():
    told = []
    done = run_ranks(2, go_on, gradient_lacks_a_bit, told)
    assert len(told) == MOST_IN_DOUBT
    for text, given in done:
        assert "worker 10 or worker 20, it is not known which" in text
        assert "--check-determinism" in text
        assert given == MOST_IN_DOUBT - 1


def drifts(rank, moment, gradient):
    """A model that never gives the same again, on every rank."""
    if moment != "gradient":
        return None
    rank.asked += 1
    return gradient + rank.asked * 1e-6


def test_a_model_that_does_not_give_the_same_again_is_no_worker_s_fault():
    told = []
    done = run_ranks(3, train, drifts, told)
    assert told == []
    assert all("--check-determinism" in text for text, _ in done)


def lose_the_state(comm, fault, told, copied):
    """All but the last rank are new after step 12, and nobody has a copy unless `copied`."""
    rank = Rank(comm, fault, told, recovers=True)
    rank.copy.step = 0 if copied else -1
    rank.train(12)
    rank.leave()
    if comm.rank < comm.size - 1:
        rank.check = rank.new_guard()
    rank.enter()
    rank.check.formed(anew=False)
    with pytest.raises(PeerError):
        rank.train(40)
    at_once = list(rank.dropped)
    rank.member.recovers = False  # else it ends itself
    if copied:
        rank.check.go_back()
    else:
        with pytest.raises(WorkerError):
            rank.check.go_back()
    return at_once, rank.dropped


@pytest.mark.grid(1)
@pytest.mark.parametrize(("copied", "right"), [(False, 9), (True, 0)])
def test_checkpoints_since_all_was_right_are_set_aside_before_anybody_ends_itself(copied, right):
    told = []
    done = run_ranks(2, lose_the_state, gradient_lacks_a_bit, told, copied)
    found = [fields for name, fields in told if name == "corruption_found"]
    assert [fields["clean_step"] for fields in found] == [0 if copied else -1]
    again = [] if copied else [right]  # each once more before it ends: rank 0 may be lost
    assert done == [([right], [right, *again]), ([], again)]


def end(comm, fault, told):
    """In a run that replaces nobody: what it ends with, and after which step nothing is kept."""
    rank = Rank(comm, fault, told)
    with pytest.raises(WorkerError, match="was found to have a wrong gradient"):
        rank.train(40)
    return rank.dropped


def test_checkpoints_since_all_was_right_are_set_aside_where_nobody_is_replaced_too():
    told = []
    assert run_ranks(2, end, gradient_lacks_a_bit, told) == [[9], []]
    assert told[0][1]["clean_step"] == 0  # of the copy, which goes with the run
