"""A worker between hosts whose master falls silent: nothing moves, and others may write."""

import threading
import time

import pytest
import torch
from torch import nn

from instep.comm.alone import AloneComm
from instep.comm.protocol.channel import LARGEST
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.heartbeat_lease import LEASE_S
from instep.comm.protocol.hub import Hub
from instep.comm.protocol.messages import (
    Ack,
    Broken,
    Built,
    Form,
    Heartbeat,
    Hello,
    Refused,
    Welcome,
)
from instep.data.batches import Batches
from instep.data.loader import Slice
from instep.data.order import position
from instep.engine.assignment import Lockstep
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.passes import Pass
from instep.engine.step.agreement import Weighed
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import PeerError, RunError, WorkerError
from instep.events import LEDGER, read_records
from instep.job import file as spec_file
from instep.store.ledger import Ledger
from instep.sync.base import make_strategy

TIMEOUT_S = 600.0
HOSTS = {"hosts": ["ssh node1"]}
WHOLE = Pass(Slice(0, 0, 64), 0)


class Master:
    """Takes one worker in, forms its group, and answers its heartbeats while it is told to."""

    def __init__(self, folder, launch):
        table = {"recipe": "a.py:recipe", "workers": 1, "network": "private", "launch": launch}
        self.job = spec_file.dump(spec_file.build(table, source="a test"))
        self.hub, self.folder = Hub(largest=LARGEST), folder
        self.endpoint = Endpoint(self.hub.address, "token")
        self.answers, self.refuses, self.ended, self.said = True, False, False, []
        self.generation, self.peer = 1, None
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while not self.ended:
            for peer, message in list(self.hub.receive(0.02)):
                refused = self.refuses and isinstance(message, Hello)
                if message is not None and (self.answers or refused):
                    self.hear(peer, message)

    def hear(self, peer, message):
        self.said.append(message)
        match message:
            case Hello() if self.refuses:
                text = "another has its place."
                self.hub.send(peer, Refused(kind="PeerError", text=text, exit_code=5))
            case Hello():
                run, self.peer = str(self.folder), peer
                welcome = Welcome(job=self.job, run=run, started=0.0, recovers=True)
                self.hub.send(peer, welcome)
            case Built() | Broken():
                form = Form(generation=self.generation, rank=0, members=[0])
                self.generation += 1
                self.hub.send(peer, form)
            case Heartbeat(number=number):
                self.hub.send(peer, Ack(count=0, heartbeat=number))

    def close(self):
        self.ended = True
        self.thread.join()
        self.hub.close()


class Worker:
    """A member of its group, with a model of a few numbers, and statistics."""

    def __init__(self, master):
        self.member = Member(master.endpoint, 0)
        self.member.at = Heartbeat
        self.interrupts = []
        self.member.interrupt = lambda: self.interrupts.append(None)
        self.member.hold, self.engine = self.hold, None
        self.model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        self.parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        self.update = Update(
            optimizer, None, self.parameters, seed=0, max_grad_norm=None, scaler=scaler
        )
        self.form()
        self.interrupts.clear()  # before the first answer there was no lease

    def hold(self):
        if self.engine is not None:
            self.engine.records.hold()

    def form(self):
        self.member.wait_for_group()
        if self.engine is None:
            strategy = make_strategy("all_reduce", {})
            turn = TurnState("", self.parameters, self.update, strategy)
            self.engine = Engine(self.member, self.model, self.parameters, [turn])
        form = self.member.form
        self.engine.start(
            AloneComm(),
            AloneComm(),
            Lockstep(
                form, self.member.job.train, Batches.of_job(self.member.job, 640), by_speed=False
            ),
        )

    def advance(self, step):
        self.pass_and_agree(step)
        self.engine.commit()

    def pass_and_agree(self, step):
        self.engine.begin_step(step, position(step, 640, 64))
        self.engine.passes.begin(WHOLE, 1.0, last=True)
        for slot, parameter in enumerate(self.parameters):
            self.engine.turn.strategy.gradient(slot, torch.ones_like(parameter))
        self.engine.agree({0: Weighed(64.0, 64)}, stop=False, samples=64)

    def agree(self, step):
        """The passes of a step, and what comes of them: all but the update."""
        self.engine.begin_step(step, position(step, 640, 64))
        self.engine.passes.begin(WHOLE, 1.0, last=True)
        loss = self.model(torch.arange(64.0)[:, None]).square().mean()
        loss.backward()
        self.engine.passes.end(WHOLE, 1.0)
        self.engine.agree({0: Weighed(64 * float(loss.detach()), 64)}, stop=False, samples=64)

    @property
    def steps(self):
        return read_records(self.member.run / "ledger.bin", LEDGER)["step"].tolist()


def until(condition):
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def master(tmp_path):
    made = Master(tmp_path, HOSTS)
    yield made
    made.close()


@pytest.fixture
def worker(master):
    made = Worker(master)
    yield made
    made.engine.leave()
    made.member.close()


def test_while_the_master_answers_steps_are_committed_and_the_ledger_is_ours(master, worker):
    for step in (1, 2, 3):
        worker.advance(step)
    assert worker.steps == [1, 2, 3]
    with pytest.raises(RunError, match="another process writes"):
        Ledger(master.folder / "ledger.bin")
    assert worker.interrupts == []


def test_once_the_master_is_silent_nothing_moves_and_another_may_write(master, worker):
    worker.advance(1)
    master.answers = False
    until(lambda: worker.interrupts)  # an exchange under way would end
    before = [parameter.clone() for parameter in worker.parameters]
    with pytest.raises(PeerError, match="the others may continue"):
        worker.advance(2)
    assert all(map(torch.equal, before, worker.parameters))
    assert worker.steps == [1]
    Ledger(master.folder / "ledger.bin").close()


def test_statistics_move_with_the_parameters_or_not_at_all(master, worker):
    batch_norm = worker.model[1]
    worker.agree(1)
    assert batch_norm.running_mean.tolist() == [0.0]
    worker.engine.commit()
    after_one_step = batch_norm.running_mean.clone()
    assert after_one_step.tolist() != [0.0]
    worker.agree(2)
    master.answers = False
    until(lambda: worker.interrupts)
    with pytest.raises(PeerError):
        worker.engine.commit()
    worker.engine.leave()
    assert torch.equal(batch_norm.running_mean, after_one_step)
    assert int(batch_norm.num_batches_tracked) == 1


def test_it_stays_so_in_that_generation_though_the_master_be_back_and_ends_with_the_next(
    master, worker
):
    master.answers = False
    until(lambda: worker.interrupts)
    master.answers = True
    until(lambda: not worker.member._connection.lapsed)
    with pytest.raises(PeerError):
        worker.advance(1)
    worker.engine.leave()
    worker.member.broken()
    worker.form()
    worker.advance(1)
    assert worker.steps == [1]


def test_a_step_that_moved_just_before_the_lease_ran_out_is_not_written(worker):
    worker.update.optimizer.register_step_post_hook(lambda *_: worker.member.lease.fence())
    worker.advance(1)
    assert worker.steps == []
    assert worker.engine.assignment.records()  # for the worker that continues from it


def test_a_ledger_that_was_let_go_of_ends_the_generation(worker):
    worker.engine.records.hold()
    worker.advance(1)
    assert worker.steps == []
    with pytest.raises(PeerError):
        worker.member.lease.check()


def test_one_whose_place_another_has_is_told_so(master, worker):
    master.answers, master.refuses = False, True
    with pytest.raises(PeerError, match="another has its place"):
        worker.member.wait_for_group()
    assert worker.member.lease.fenced


def test_on_one_machine_a_silent_master_changes_nothing(tmp_path):
    master = Master(tmp_path, {})
    worker = Worker(master)
    try:
        master.answers = False
        time.sleep(LEASE_S + 0.5)
        worker.advance(1)
        assert worker.steps == [1]
        assert worker.interrupts == []
    finally:
        worker.engine.leave()
        worker.member.close()
        master.close()


def test_who_goes_on_after_an_update_that_raised_is_stopped(worker):
    def breaks():
        raise ValueError("no more memory")

    worker.update.optimizer.register_step_post_hook(lambda *_: breaks())
    with pytest.raises(ValueError, match="no more memory"):
        worker.advance(1)
    with pytest.raises(WorkerError, match="in the middle of a step"):
        worker.advance(1)
