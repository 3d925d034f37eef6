"""Parameters shared out over servers move as those of one, and none is ahead of another for long.

The servers are threads behind real connections. One is killed by closing its door for good; what
it kept is in a memory file that the next one gets.
"""

import copy
import errno
import os
import queue
import random
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.served.written import put_together
from instep.engine.state.host_copy import HostCopy
from instep.errors import PeerError, WorkerError
from instep.job.train import TrainSpec
from instep.server.coding import Coding, Held, WorkerPushes
from instep.server.commits import Commits, Push
from instep.server.door import Door
from instep.server.first_server import Serving
from instep.server.messages import (
    Apply,
    End,
    Give,
    Prepare,
    Pull,
    Question,
    ServerAnswer,
    Stage,
    Write,
)
from instep.server.micro_batches import Parcel, Portions, buffers_of, changes
from instep.server.other_server import Following
from instep.server.peer_servers import Others
from instep.server.shard import Holding
from instep.server.shard_service import Further, path_of, write_shard, written_by
from instep.server.tensor_channel import Line
from instep.state.pieces import SHARD
from instep.sync.servers.leases import Unit
from instep.sync.servers.server_async import ServerAsync
from instep.system import memory_files
from instep.worker.passes.activity import Activity
from instep.worker.replica.fellows import NoFellows

SAMPLES, TRAIN = 90, TrainSpec(global_batch=16, micro_batches=4, steps=40)
STEPS, FIRST = 9, 100

torch.manual_seed(4)
INPUTS, TARGETS = torch.randn(SAMPLES, 300).double(), torch.randn(SAMPLES, 1).double()


class Net(nn.Module):
    """Tensors of four blocks and of one element; frozen, shared and unused ones."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(300, 300).requires_grad_(False)
        self.first = nn.Linear(300, 200, bias=False)
        self.norm = nn.BatchNorm1d(200)
        self.inner = nn.Linear(200, 200)
        self.again = self.inner
        self.unused = nn.Linear(30, 20)
        self.last = nn.Linear(200, 1)

    def forward(self, inputs):
        hidden = torch.tanh(self.norm(self.first(inputs + 0.1 * self.frozen(inputs))))
        return self.last(torch.tanh(self.again(self.inner(hidden))))


MODEL = Net().double()
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-3),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.8, 0.9)),
}


class Part:
    """What a server process has, whichever it is."""

    def __init__(self, make, limit, servers, place, memory, *, model=MODEL, **options):
        self.model = copy.deepcopy(model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        optimizer = make(self.parameters)
        self.strategy = ServerAsync(**options)
        self.update = LeasedUpdate(
            optimizer,
            torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
            self.parameters,
            seed=1,
            max_grad_norm=limit,
            scaler=torch.amp.GradScaler("cuda", enabled=False),
        )
        self.holding = Holding(
            self.parameters,
            self.update,
            self.strategy,
            servers=servers,
            place=place,
            buffers=[] if place else buffers_of(self.model),
        )
        memory_files.give(memory)
        self.copy = HostCopy()
        memory_files.give(-1)


class Thread:
    """A server that has no leases."""

    def __init__(self, place, part, at=(0, 0)):
        names = [name for name, p in part.model.named_parameters() if p.requires_grad]
        room, sums = part.holding.room, part.holding.coded
        self.door = Door("127.0.0.1", room, asks=Question, sums=sums)
        self.further = Further(
            part.holding, part.copy, place=place, first=FIRST, names=names, at=at
        )
        self.script = lambda question: None
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            while not self.ends.is_set():
                if (arrived := self.door.next(0.02)) is not None:
                    self.script(arrived[1])
                    self.further.take_in(*arrived)
                    self.script((arrived[1], "done"))
        except InterruptedError:
            self.ends.set()
        self.door.close()
        for guest in list(self.further._guests.values()):
            guest.close()

    def kill(self):
        self.ends.set()
        self.thread.join()


class Run:
    """All servers of a run, and lines to them; the first is this thread."""

    def __init__(self, servers, make, limit=None, **options):
        self.given = make, limit, servers
        self.options, self.servers, self.now = options, servers, 0.0
        self.memories = [os.memfd_create(f"server-{place}") for place in range(servers)]
        self.threads, self.lines = {}, []
        for place in range(1, servers):
            self.begin(place)
        self.portions = Portions(SAMPLES, TRAIN)
        self.others, self.done, self.tokens = None, [], 1
        self.serve()

    def begin(self, place, at=(0, 0)):
        part = Part(*self.given, place, self.memories[place], **self.options)
        self.threads[place] = Thread(place, part, at)

    def reach(self, place, number=FIRST):
        door = self.threads[place].door
        sums = self.part.holding.coded
        self.lines.append(Line.to(door.address, place, door.secret, number, sums=sums))
        return self.lines[-1]

    def serve(self, left=None):
        self.part = part = Part(*self.given, 0, self.memories[0], **self.options)
        if self.others is not None:
            self.others.close()
        self.others = Others(
            self.servers - 1,
            self.reach,
            lambda: None,
            lambda: (0, self.commits.leases.version),
        )
        buffers = buffers_of(part.model)
        if left is not None:
            part.holding.take(left["held"])
            for buffer, before in zip(buffers, left["buffers"], strict=True):
                buffer.copy_(before)
            part.update.scheduler.load_state_dict(left["scheduler"])
            part.update.optimizer.param_groups[0].update(left["group"])
        self.tokens += 1000
        self.commits = Commits(
            part.holding,
            buffers,
            part.update,
            self.portions,
            staleness=None,
            others=self.others,
            undo=self.undo,
            left=left and left["commits"],
            first_token=self.tokens,
        )
        self.commits.leases.stop_after(STEPS)
        if left is None:
            self.keep()
        self.others.meet()

    def notice(self):
        """As the first server does when nothing arrives."""
        for each in self.threads.values():
            if each.ends.is_set():
                each.thread.join()
        self.others.meet(idle=True)

    def keep(self):
        part, group = self.part, dict(self.part.update.optimizer.param_groups[0])
        del group["params"]
        self.kept = {
            "held": {name: each.clone() for name, each in part.holding.kept().items()},
            "buffers": [buffer.clone() for buffer in buffers_of(part.model)],
            "scheduler": part.update.scheduler.state_dict(),
            "group": group,
            "commits": self.commits.state(),
        }

    def undo(self):
        self.part.holding.take(self.kept["held"])

    def take(self, push):
        committed = self.commits.take(push, 0.0)
        if committed is None:
            self.others.meet()
            return None
        self.keep()
        self.done.append(committed)
        return committed

    def whole(self):
        """The model, with the parts of all servers."""
        model = copy.deepcopy(self.part.model)
        parameters = [p for p in model.parameters() if p.requires_grad]
        for place in range(1, self.servers):
            holding = self.threads[place].further._holding
            given, into = holding.give(FIRST, 0, 0), Parcel(parameters, holding.shares[place])
            holding.leave(FIRST)
            into.flats[0].copy_(given.flats[0])
            into.store()
        return model

    def close(self):
        for line in self.lines:
            line.close()
        for each in self.threads.values():
            each.kill()
        for memory in self.memories:
            os.close(memory)


class Worker:
    def __init__(self, run, number):
        self.run, self.number, self.lease = run, number, None
        self.model = copy.deepcopy(run.options.get("model", MODEL))
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        shares = run.part.holding.shares
        buffers = [buffers_of(self.model), *[[]] * (len(shares) - 1)]
        coding = Coding(run.part.strategy, self.parameters)
        self.held = [Held(coding, *each) for each in zip(shares, buffers, strict=True)]
        self.pushes = WorkerPushes(coding, shares, buffers)
        self.lines = {}

    def line(self, place):
        if place not in self.lines:
            self.lines[place] = self.run.reach(place, self.number)
        return self.lines[place]

    def ask(self):
        granted = self.run.commits.grant(self.number, 0.0)
        if granted is None:
            return False
        self.lease, given = granted
        take(self.held[0], self.lease.token, given)
        for place in range(1, self.run.servers):
            held, line = self.held[place], self.line(place)
            line.send(Pull(self.lease.token), [])
            told = line.receive(ServerAnswer, lambda told, at=held: at.room(told.since))
            held.take(self.lease.token, told.since)
        return True

    def compute(self):
        self.model.zero_grad()
        loss, weight = loss_of(self.model, self.run.portions, self.lease.unit)
        loss.backward()
        gradients = [parameter.grad for parameter in self.parameters]
        self.pushes.pack(self.lease.token, self.lease.unit, gradients)
        changes(buffers_of(self.model), self.held[0].parcel.buffers, self.pushes.rooms[0].buffers)
        return loss.item() * weight, weight, [each is not None for each in gradients]

    def stage(self, present):
        for place in range(1, self.run.servers):
            room = self.pushes.rooms[place]
            self.line(place).send(Stage(self.lease.token, present), room.flats)
            self.line(place).receive(ServerAnswer, [])

    def push(self):
        total, weight, present = self.compute()
        self.stage(present)
        token, self.lease = self.lease.token, None
        first = self.pushes.rooms[0]
        push = Push(token, total, weight, 0, present, first.pieces, first.buffers)
        committed = self.run.take(push)
        self.pushes.settle(committed is not None)
        return committed

    def turn(self):
        """Ask or push; after a connection broke, from the beginning."""
        try:
            return self.ask() if self.lease is None else self.push()
        except PeerError:
            for line in self.lines.values():
                line.close()
            self.lines, self.lease = {}, None
            self.run.commits.leave(self.number)
            self.pushes.settle(self.run.commits.counted(self.number, self.pushes.unsettled))
            self.run.notice()
            return None


def loss_of(model, portions, unit):
    """Of a micro-batch, and how many samples it has."""
    first, stop = portions.of(unit)
    kind = next(model.parameters()).dtype
    inputs, targets = INPUTS[first:stop].to(kind), TARGETS[first:stop].to(kind)
    return nn.functional.mse_loss(model(inputs), targets), stop - first


def take(held, token, given):
    """As over a connection."""
    for mine, sent in zip(held.room(given.since), given.flats, strict=True):
        mine.copy_(sent)
    held.take(token, given.since)


@contextmanager
def making():
    """Runs, which are ended with it."""
    made = []

    def make(*given, **options):
        made.append(Run(*given, **options))
        return made[-1]

    try:
        yield make
    finally:
        for run in made:
            run.close()


@pytest.fixture
def runs():
    with making() as make:
        yield make


def train(run, workers, draw, each=lambda: None):
    members = [Worker(run, number) for number in range(workers)]
    while run.commits.leases.complete < STEPS:
        draw.choice(members).turn()
        each()
    return run.whole()


def plain(make, limit=None):
    """A plain PyTorch loop over the micro-batches."""
    model, portions = copy.deepcopy(MODEL), Portions(SAMPLES, TRAIN)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make(parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(1, STEPS + 1):
        for number in range(portions.count(step)):
            optimizer.zero_grad()
            loss_of(model, portions, Unit(step, number))[0].backward()
            if limit:
                nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.step()
        scheduler.step()
    return model


def check_close(model, wanted):
    for (name, one), other in zip(
        model.state_dict().items(), wanted.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, msg=name)


def check_same_bits(model, wanted):
    for one, other in zip(model.state_dict().values(), wanted.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.grid(2)
@pytest.mark.parametrize("limit", [None, 0.4], ids=["", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_worker_gets_what_a_plain_loop_does_and_the_same_bits_from_any_number_of_servers(
    runs, name, limit
):
    wanted = plain(OPTIMIZERS[name], limit)
    found = [
        train(runs(servers, OPTIMIZERS[name], limit), 1, random.Random(0)) for servers in (1, 2, 3)
    ]
    for model in found:
        check_close(model, wanted)
        check_same_bits(model, found[0])


def test_a_message_has_room_for_the_squares_of_a_gradient_of_any_size(runs, monkeypatch):
    """Here of 100,000 elements in blocks of 4, and up to 4 kB in a message."""
    monkeypatch.setattr("instep.sync.norm.BLOCK", 4)
    one = train(runs(1, OPTIMIZERS["sgd"], 0.4), 1, random.Random(0))
    monkeypatch.setattr("instep.server.tensor_channel.MOST_HEAD", 4096)
    check_same_bits(train(runs(3, OPTIMIZERS["sgd"], 0.4), 1, random.Random(0)), one)


def test_large_parameters_are_cut_and_bytes_are_shared_out_evenly(runs):
    shares = runs(3, OPTIMIZERS["sgd"]).part.holding.shares
    sizes = [sum(piece.stop - piece.start for piece in each) for each in shares]
    assert max(sizes) - min(sizes) <= 2 * 16384
    pieces = [piece for each in shares for piece in each]
    assert len({piece.slot for piece in pieces}) < len(pieces)


@pytest.mark.grid(1)
@pytest.mark.parametrize("options", [{"compensation": 0.7}, {"slow_late": True}], ids=str)
def test_late_gradients_of_several_workers_move_all_parts_as_one_server_would(runs, options):
    """Each server by the parameters and the version that it gave: without a pull in between, the
    same on all."""
    found = [
        train(runs(servers, OPTIMIZERS["sgd"], **options), 4, random.Random(1))
        for servers in (1, 3)
    ]
    check_same_bits(*found)


def test_a_push_without_its_parts_does_not_count_and_its_micro_batch_is_leased_again(runs):
    run = runs(3, OPTIMIZERS["sgd"])
    worker, before = Worker(run, 0), copy.deepcopy(run.whole())
    worker.ask()
    unit, token = worker.lease.unit, worker.lease.token
    total, weight, present = worker.compute()
    worker.line(1).send(Stage(token, present), worker.pushes.rooms[1].flats)  # to one of two
    worker.line(1).receive(ServerAnswer, [])
    first = worker.pushes.rooms[0]
    assert run.take(Push(token, total, weight, 0, present, first.pieces, first.buffers)) is None
    check_same_bits(run.whole(), before)
    worker.ask()
    assert worker.lease.unit == unit
    assert worker.push() is not None


def test_parts_of_an_older_lease_do_not_count(runs):
    run = runs(2, OPTIMIZERS["sgd"])
    worker = Worker(run, 0)
    worker.ask()
    total, weight, present = worker.compute()
    worker.stage(present)
    worker.ask()
    push = Push(worker.lease.token, total, weight, 0, present, worker.pushes.rooms[0].pieces, [])
    assert run.take(push) is None


def test_what_was_computed_with_an_update_that_did_not_happen_does_not_count(runs):
    run = runs(2, OPTIMIZERS["sgd"])
    worker, other = Worker(run, 0), Worker(run, 1)
    for _ in range(4):
        worker.turn()
    worker.ask()
    _, _, present = worker.compute()
    worker.stage(present)
    (told,) = run.others.ask(Prepare(worker.lease.token, 0, 3))
    assert told.fine
    run.others.ask(Apply(3, True, 1.0, run.part.update.options(), True))
    other.ask()  # and gets the part of an update that is not made by all
    unit = other.lease.unit
    run.others.close()
    run.others.meet()
    assert run.threads[1].further.at == (0, 2)
    assert other.push() is None
    other.ask()
    assert other.lease.unit == unit
    assert other.push().version == 3


def test_states_of_all_servers_are_those_of_one_optimizer_in_a_checkpoint(runs, tmp_path):
    make = OPTIMIZERS["adamw"]
    run, one = runs(3, make), runs(1, make)
    for each in (run, one):
        worker = Worker(each, 0)
        for _ in range(8):
            worker.turn()
    asked = Write(str(tmp_path / "shard-"), "-0")
    names = [name for name, p in MODEL.named_parameters() if p.requires_grad]
    told = [write_shard(asked, 0, run.part.holding, names), *run.others.must(asked)]
    assert all(each.fine and each.size_bytes for each in told)
    shards = {}
    for place in range(3):
        shards |= load_file(path_of(asked, place))
    model = copy.deepcopy(one.part.model)
    whole = put_together(shards, model)
    for own, other in zip(model.parameters(), one.part.model.parameters(), strict=True):
        wanted = one.part.update.optimizer.state.get(other, {})
        assert whole.get(own, {}).keys() == wanted.keys()
        for name, value in wanted.items():
            assert torch.equal(whole[own][name], value)


def test_a_server_that_cannot_write_says_why(runs, tmp_path):
    (told,) = runs(2, OPTIMIZERS["adamw"]).others.must(Write(str(tmp_path / "no" / "shard-"), ""))
    assert told.size_bytes == 0  # there is no state yet
    run = runs(2, OPTIMIZERS["adamw"])
    worker = Worker(run, 0)
    for _ in range(2):
        worker.turn()
    (told,) = run.others.must(Write(str(tmp_path / "no" / "shard-"), ""))
    assert not told.fine
    assert told.errno == errno.ENOENT


def test_where_one_server_cannot_write_no_file_of_another_stays(runs, tmp_path):
    run = runs(4, OPTIMIZERS["adamw"])
    worker = Worker(run, 0)
    for _ in range(2):
        worker.turn()
    asked = Write(str(tmp_path / "shard-"), "-0")
    names = [name for name, p in MODEL.named_parameters() if p.requires_grad]

    def write():
        return [write_shard(asked, 0, run.part.holding, names), *run.others.must(asked)]

    shards, failed = written_by(asked, write())
    assert failed is None
    assert sorted(shards) == [f"{SHARD}{place}" for place in range(4)]
    assert {shard.path for shard in shards.values()} == {*tmp_path.iterdir()}
    for shard in shards.values():
        shard.path.unlink()
    path_of(asked, 1).symlink_to("/dev/full")
    assert written_by(asked, write()) == ({}, 1)
    assert not [*tmp_path.iterdir()]


class Dies:
    """A script: kill the server at the n-th question of a kind, before or after it is done."""

    def __init__(self, kind, count, *, done):
        self.kind, self.count, self.done = kind, count, done

    def __call__(self, question):
        done = isinstance(question, tuple)
        asked = question[0] if done else question
        if done == self.done and isinstance(asked, self.kind):
            self.count -= 1
            if not self.count:
                raise InterruptedError


@pytest.mark.grid(3)
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", [Prepare, Apply, Stage, Pull])
def test_a_server_that_is_killed_at_any_moment_loses_nothing(runs, kind, done):
    """Another process takes its place; what it had alone, no other keeps."""
    make = OPTIMIZERS["adamw"]
    run = runs(3, make, 0.4)
    run.threads[2].script = Dies(kind, 7, done=done)
    killed = run.threads[2]
    run.reach, reach = lambda *given: revived(run, killed) or reach(*given), run.reach
    run.others._reach = run.reach
    check_same_bits(train(run, 1, random.Random(0)), train(runs(1, make, 0.4), 1, random.Random(0)))
    assert run.threads[2] is not killed
    units = [each.lease.unit for each in run.done]
    assert units == sorted(set(units))


def revived(run, killed):
    """Start another server in place of one that has ended."""
    if run.threads[2] is killed and not killed.thread.is_alive():
        run.begin(2, at=(-1, -1))


@pytest.mark.grid(1)
@pytest.mark.parametrize("after", [1, 6, 11])
def test_where_the_first_server_is_lost_the_others_go_back_to_what_it_has(runs, after):
    make = OPTIMIZERS["adamw"]
    run, draw = runs(3, make), random.Random(0)
    worker = Worker(run, 0)
    while len(run.done) < after:
        worker.turn()
    if worker.lease is None:
        worker.ask()
    before = run.kept
    worker.push()  # all have made this update, and nothing of it is left on the first
    assert {each.further.at for each in run.threads.values()} == {(0, after + 1)}
    run.done.pop()
    run.serve(before)
    assert {each.further.at for each in run.threads.values()} == {(0, after)}
    check_same_bits(train(run, 1, draw), train(runs(1, make), 1, draw))


def test_a_server_that_lost_its_memory_ends_the_run_with_a_remedy(runs):
    run = runs(2, OPTIMIZERS["sgd"])
    worker = Worker(run, 0)
    for _ in range(4):
        worker.turn()
    run.threads[1].kill()
    os.close(run.memories[1])
    run.memories[1] = os.memfd_create("another")
    run.begin(1)
    with pytest.raises(WorkerError, match=r"server 1, one of 2, was lost .*Resume the run"):
        run.others.meet(idle=True)


def test_a_first_server_that_cannot_take_an_update_back_is_not_said_to_be_lost():
    serving = Serving.__new__(Serving)
    serving._copy, serving._servers = HostCopy(), 3
    with pytest.raises(WorkerError, match=r"not all of 3 servers .* no memory for copies") as error:
        serving._undo()
    assert "lost with" not in str(error.value)


def test_a_server_goes_without_copies_where_another_does(runs):
    run = runs(3, OPTIMIZERS["sgd"])
    run.threads[2].further._copy.drop()
    worker = Worker(run, 0)
    for _ in range(6):
        worker.turn()
    assert not run.commits.keeps
    assert not run.threads[1].further._copy.lasts


def test_an_update_that_was_sent_before_the_first_server_came_back_is_not_made(runs):
    """Not by a server that has it or is behind it, which go on; and what follows counts once."""
    found = []
    for late in ((), (1, 2, 3, 4, 9)):
        run = runs(2, OPTIMIZERS["sgd"])
        worker = Worker(run, 0)
        while run.commits.leases.version < 3:
            worker.turn()
        for version in late:
            at, line = run.threads[1].further.at, run.reach(1)
            line.send(Apply(version, True, 1.0, run.part.update.options(), True), ())
            told = line.receive(ServerAnswer, ())
            assert told.fine == (version == 4)
            assert run.threads[1].further.at == ((0, 4) if version == 4 else at)
        found.append(train(run, 1, random.Random(0)))
    check_same_bits(*found)


def test_an_update_that_another_server_cannot_make_is_made_by_none(runs):
    run = runs(3, OPTIMIZERS["sgd"])
    worker = Worker(run, 0)
    for _ in range(4):
        worker.turn()
    before = copy.deepcopy(run.whole())
    worker.ask()
    run.threads[2].further.at = 0, 9
    assert worker.push() is None
    assert [each.further.at for each in run.threads.values()] == [(0, 2), (0, 2)]
    check_same_bits(run.whole(), before)
    worker.ask()
    assert worker.push() is not None


def test_only_the_first_server_may_have_others_update(runs):
    run = runs(2, OPTIMIZERS["sgd"])
    line = run.reach(1, number=3)
    line.send(Apply(1, False, 1.0, [], True), ())
    with pytest.raises(PeerError):
        line.receive(ServerAnswer, ())
    assert run.threads[1].further.at == (0, 0)


def test_after_the_end_a_server_turns_workers_away_and_still_hears_the_first(runs):
    run = runs(2, OPTIMIZERS["sgd"])
    worker, server = Worker(run, 0), run.threads[1]
    worker.ask()
    run.others.must(End(3, "steps", True, 1))
    server.door.end(server.further.late)  # as `Following` does
    worker.line(1).send(Stage(worker.lease.token, [True]), worker.pushes.rooms[1].flats)
    with pytest.raises(PeerError):
        worker.line(1).receive(ServerAnswer, [])
    run.others.close()  # its connection breaks, and it asks again
    run.others.meet()
    run.others.must(End(3, "steps", True, 1))
    server.door.go_on()
    server.further.go_on(2)
    run.others.must(Give(), bodies=[server.further._holding.room().flats[:2]])


class Ending(Thread):
    """A server as `Following` runs it, in generations that a test begins."""

    regroups = False
    form = SimpleNamespace(generation=1, checkpoint=None, members=[0])
    lease = SimpleNamespace(check=lambda: None)
    records = SimpleNamespace(flush=lambda: None)

    def run(self):
        self.said, self.news, self.begun = queue.SimpleQueue(), queue.SimpleQueue(), None
        state = SimpleNamespace(generation=1)
        state.inside = lambda generation: setattr(state, "generation", generation)
        server = Following.__new__(Following)
        server._door, server._further, server.member = self.door, self.further, self
        server.engine, server.activity = SimpleNamespace(state=state), Activity()
        server.fellows, server.sized, server.close = NoFellows(), lambda count: None, lambda: None
        list(server.steps())
        self.door.close()

    def formed(self):
        pass

    @property
    def superseded(self):
        with suppress(queue.Empty):
            self.begun = self.begun or self.news.get_nowait()
        return self.begun is not None

    def wait_for_group(self):
        self.form, self.begun = self.begun or self.news.get(), None
        return self.form

    def done(self, step, rule, *, finite, meanwhile):
        """As of `Member`: the master releases all once each is done in the newest generation."""
        self.said.put(self.form.generation)
        while not self.superseded:
            meanwhile()
        return self.begun == "released"

    def begin(self, generation):
        self.news.put(SimpleNamespace(generation=generation, checkpoint=None, members=[0]))


@pytest.mark.parametrize(
    ("happens", "said"),
    [
        (["end 2", "generation 2"], [2]),
        (["end 1", "said", "generation 2", "end 2"], [1, 2]),
        (["end 1", "said", "end 2", "generation 2"], [1, 2]),
        (["generation 2", "end 1", "end 2"], [2]),
        (["generation 2", "end 1", "said", "asks", "end 2"], [2]),
    ],
)
def test_all_servers_end_in_one_generation_whoever_hears_of_it_first(runs, happens, said):
    run = runs(2, OPTIMIZERS["sgd"])
    run.threads[1].kill()
    run.others.close()
    part = Part(*run.given, 1, run.memories[1], **run.options)
    server = run.threads[1] = Ending(1, part)
    heard = []
    for each in happens:
        match each.split():
            case "end", generation:
                run.others.must(End(3, "steps", True, int(generation)))
            case "generation", generation:
                server.begin(int(generation))
            case ["asks"]:  # it does again what follows the last step
                run.others.must(Give(), bodies=[part.holding.room().flats[:2]])
            case _:
                heard.append(server.said.get(timeout=600))
    if heard != said:
        heard.append(server.said.get(timeout=600))
    server.news.put("released")
    server.thread.join(600)
    assert not server.thread.is_alive()
    assert heard == said


def test_the_first_server_tells_of_the_end_again_where_a_generation_has_begun_meanwhile():
    server, told = Serving.__new__(Serving), []
    state = SimpleNamespace(generation=4)

    def must(question):
        told.append(question.generation)
        state.generation = 5

    server.engine, server.step = SimpleNamespace(state=state), 3
    server.after = SimpleNamespace(rule="steps", finite=True)
    server._others = SimpleNamespace(must=must)
    server._end_others()
    assert told == [4, 5]


def test_more_servers_than_there_is_to_share_out_have_nothing_and_go_along(runs):
    shares = runs(12, OPTIMIZERS["sgd"]).part.holding.shares
    assert [] in shares
    check_same_bits(
        train(runs(12, OPTIMIZERS["sgd"]), 1, random.Random(0)),
        train(runs(1, OPTIMIZERS["sgd"]), 1, random.Random(0)),
    )
