"""With a codec both ends hold the same, nothing of a gradient is lost, and little is sent.

Runs are those of `test_several_servers.py`: threads behind real connections.
"""

import copy
import math
import random
import threading
from contextlib import suppress

import pytest
import torch
from test_several_servers import (
    MODEL,
    OPTIMIZERS,
    SAMPLES,
    STEPS,
    TRAIN,
    Worker,
    check_same_bits,
    loss_of,
    making,
    take,
    train,
)
from torch import nn

from instep.comm.codecs import CODECS
from instep.comm.codecs.base import aligned, draw_key
from instep.errors import PeerError, SpecError
from instep.server.coding import Coding, Held, WorkerPushes
from instep.server.commits import Push
from instep.server.door import Door
from instep.server.messages import Pull, ServerAnswer, Stage
from instep.server.micro_batches import Portions, buffers_of, pieces_of, whole_pieces
from instep.server.request_queue import Desk
from instep.server.tensor_channel import Ask, Grant, Line
from instep.sync import norm
from instep.sync.base import make_strategy
from instep.sync.generation import Piece
from instep.sync.servers.leases import Unit
from instep.sync.servers.server_async import ServerAsync


@pytest.fixture
def runs():
    with making() as make:
        yield make


NARROW = copy.deepcopy(MODEL).float()
FIXED = ["bfloat16", "float16", "int8", "int4", "sign", "top_k"]


def codec_of(name, **options):
    return CODECS[name](**options)


def sent(codec, values, *, left=None, key=0):
    """What values are decoded to; what is left out goes into `left`."""
    flat, decoded = values.reshape(-1).contiguous(), torch.zeros(values.numel())
    payload = torch.zeros(codec.size(flat.numel()), dtype=torch.uint8)
    used = codec.encode(flat, payload, key=key, left=left)
    assert used == len(payload)
    codec.add_into(decoded, payload)
    return decoded.view(values.shape)


def trained(*models):
    """The parameters of each that are trained, by their number."""
    every = [[p for p in model.parameters() if p.requires_grad] for model in models]
    return enumerate(zip(*every, strict=True))


@torch.no_grad()
def follow(seen, model, codec, version, *, vectors):
    """Have a worker's model follow the server's."""
    for slot, (one, other) in trained(seen, model):
        if one.dim() > 1 or vectors:
            one += sent(codec, other - one, key=draw_key(0, slot, 0, version, 0))
        else:
            one.copy_(other)
    for one, other in zip(seen.buffers(), model.buffers(), strict=True):
        one.copy_(other)


@torch.no_grad()
def hand_over(seen, model, codec, carried, before, unit, *, vectors, compensation=0.0):
    """Give the server's model the gradients of a worker's, and what its pass did to buffers."""
    for slot, (one, other) in trained(seen, model):
        other.grad = one.grad
        if one.grad is None:
            continue
        if one.dim() > 1 or vectors:
            whole, key = one.grad.reshape(-1).clone(), draw_key(1, slot, 0, *unit)
            left = None
            if not codec.unbiased:
                whole += (left := carried.setdefault(slot, torch.zeros(one.numel())))
            other.grad = sent(codec, whole, left=left, key=key).view(one.shape)
        if compensation:
            other.grad.add_(other.grad * other.grad * (other - one), alpha=compensation)
    for buffer, then, now in zip(model.buffers(), before, seen.buffers(), strict=True):
        buffer += now - then


def plain(make, codec, *, limit=None, vectors=False):
    """A plain PyTorch loop over the micro-batches, which rounds where the run does."""
    model, seen, portions = copy.deepcopy(NARROW), copy.deepcopy(NARROW), Portions(SAMPLES, TRAIN)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, carried, version = make(parameters), {}, 0
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(1, STEPS + 1):
        for number in range(portions.count(step)):
            seen.zero_grad()
            before = [buffer.clone() for buffer in seen.buffers()]
            loss_of(seen, portions, Unit(step, number))[0].backward()
            hand_over(seen, model, codec, carried, before, Unit(step, number), vectors=vectors)
            if limit:
                gradients = [p.grad for p in parameters if p.grad is not None]
                found = norm.factor(norm.norm(norm.squares(gradients).tolist()), limit)
                for gradient in gradients if found != 1.0 else ():
                    gradient.mul_(found)
            optimizer.step()
            version += 1
            follow(seen, model, codec, version, vectors=vectors)
        scheduler.step()
    return model


def check_parameters(model, wanted):
    for one, other in zip(model.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(model.buffers(), wanted.buffers(), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("name", "make", "limit", "vectors"),
    [
        ("int8", "adamw", 0.4, False),
        pytest.param("int4", "adamw", None, True, marks=pytest.mark.slow),
        *(pytest.param(name, "sgd", None, False, marks=pytest.mark.slow) for name in FIXED),
    ],
)
def test_one_worker_is_a_plain_loop_that_rounds_likewise_with_any_number_of_servers(
    runs,
    name,
    make,
    limit,
    vectors,
):
    wanted = plain(OPTIMIZERS[make], codec_of(name), limit=limit, vectors=vectors)
    options = {"model": NARROW, "codec": codec_of(name), "encode_vectors": vectors}
    found = [
        train(runs(servers, OPTIMIZERS[make], limit, **options), 1, random.Random(0))
        for servers in (1, 2, 3)
    ]
    for model in found:
        check_parameters(model, wanted)
        check_same_bits(model, found[0])


@pytest.mark.parametrize("compensation", [pytest.param(0.0, marks=pytest.mark.slow), 0.7])
def test_late_gradients_of_several_workers_are_of_what_each_was_given(runs, compensation):
    """Also the delay compensation: it takes what the gradient was computed with."""
    codec, make = codec_of("int8"), OPTIMIZERS["sgd"]
    options = {"model": NARROW, "codec": codec, "compensation": compensation}
    done, found = [], []
    for servers in (1, 3):
        run = runs(servers, make, **options)
        found.append(train(run, 3, random.Random(2)))
        done.append([(each.lease.unit, each.lease.worker, each.lease.version) for each in run.done])
    check_same_bits(*found)
    assert done[0] == done[1]
    assert max(n - version for n, (_, _, version) in enumerate(done[0])) > 1

    model, portions = copy.deepcopy(NARROW), Portions(SAMPLES, TRAIN)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer, seen, carried = make(parameters), {}, {}
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    ahead, step = 0, 0
    for number in range(len(done[0]) + 1):
        for _, worker, version in done[0]:
            if version == number:  # it is given what there is after so many updates
                if worker in seen:
                    follow(seen[worker], model, codec, number, vectors=False)
                else:
                    seen[worker] = copy.deepcopy(model)
        if number == len(done[0]):
            break
        unit, worker, version = done[0][number]
        seen[worker].zero_grad()
        before = [buffer.clone() for buffer in seen[worker].buffers()]
        loss, samples = loss_of(seen[worker], portions, unit)
        loss.backward()
        own, late = carried.setdefault(worker, {}), compensation * (version < number)
        given = seen[worker], model, codec, own, before, unit
        hand_over(*given, vectors=False, compensation=late)
        optimizer.step()
        ahead += samples
        while ahead >= portions.size(step + 1):
            ahead -= portions.size(step + 1)
            step += 1
            scheduler.step()
    check_parameters(found[0], model)


def test_random_rounding_carries_nothing_over_and_is_that_of_a_plain_loop(runs):
    codec = codec_of("int8", rounding="random")
    run = runs(1, OPTIMIZERS["sgd"], model=NARROW, codec=codec)
    worker = Worker(run, 0)
    while run.commits.leases.complete < STEPS:
        worker.turn()
    assert not worker.pushes.carried
    check_parameters(run.whole(), plain(OPTIMIZERS["sgd"], codec))


# ---- both ends of a server's pieces


class Mixed(nn.Module):
    """What lies in other orders, in other types, and what is no matrix."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(40, 30).t())
        self.last = nn.Parameter(torch.randn(4, 8, 3, 3).to(memory_format=torch.channels_last))
        self.short = nn.Parameter(torch.randn(50, 7).to(torch.bfloat16))
        self.narrow = nn.Parameter(torch.randn(9, 9).to(torch.float16))
        self.none = nn.Parameter(torch.zeros(0, 4))
        self.vector = nn.Parameter(torch.randn(33))
        self.register_buffer("count", torch.tensor(7))


def coding_of(model, name="int8", *, vectors=False, **options):
    strategy = ServerAsync(codec=codec_of(name, **options), encode_vectors=vectors)
    return Coding(strategy, list(model.parameters()))


def ends(model, other, **options):
    """A server's end and a worker's, of all of a model."""
    return [
        Held(coding_of(each, **options), whole_pieces(list(each.parameters())), buffers_of(each))
        for each in (model, other)
    ]


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("vectors", [False, True], ids=["", "vectors"])
def test_a_worker_holds_to_the_bit_what_its_server_says_that_it_does(name, vectors):
    """And that is soon what the server has, once that rests."""
    model, other = Mixed(), Mixed()
    server, worker = ends(model, other, name=name, vectors=vectors)
    for turn in range(60):
        if turn < 6:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter += 0.1 * torch.randn(parameter.shape)
                model.count += 1
        take(worker, turn, server.give(turn, (turn, 0)))
        for one, two, own in zip(
            server.parcel.pieces, worker.parcel.pieces, other.parameters(), strict=True
        ):
            assert torch.equal(one, two)
            assert torch.equal(two, own)
        assert torch.equal(model.count, other.count)
        assert vectors or torch.equal(model.vector, other.vector)
    if name not in ("sign", "top_k"):
        for one, own in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, own, rtol=2e-2, atol=1e-4)


def test_a_pull_has_the_bytes_of_its_payloads_and_the_first_is_whole():
    model = copy.deepcopy(NARROW)
    parameters = [p for p in model.parameters() if p.requires_grad]
    strategy = ServerAsync(codec=codec_of("int8"))
    server, worker = (Held(Coding(strategy, parameters), whole_pieces(parameters)) for _ in "12")
    first = server.give(5, (1, 0))
    assert first.since == -1
    assert sum(each.nbytes for each in first.flats) >= sum(p.nbytes for p in parameters)
    take(worker, 5, first)
    then = server.give(6, (2, 0))
    assert then.since == 5
    matrices = sum(aligned(codec_of("int8").size(p.numel())) for p in parameters if p.dim() > 1)
    vectors = sum(-(-p.nbytes // 64) * 64 for p in parameters if p.dim() < 2)
    assert sum(each.nbytes for each in then.flats) == matrices + vectors


def test_differences_from_what_a_worker_does_not_hold_are_refused():
    model = Mixed()
    server, worker = ends(model, Mixed())
    take(worker, 1, server.give(1, (1, 0)))
    server.give(2, (2, 0))  # and does not arrive
    given = server.give(3, (3, 0))
    with pytest.raises(PeerError, match=r"differ from those of lease 2 .* has those of 1"):
        worker.room(given.since)
    _, fresh = ends(model, Mixed())
    with pytest.raises(PeerError, match=r"has those of -1"):
        fresh.room(given.since)


def test_a_worker_that_got_half_of_a_pull_holds_nothing():
    server, worker = ends(Mixed(), Mixed())
    take(worker, 1, server.give(1, (1, 0)))
    given = server.give(2, (2, 0))
    worker.room(given.since)
    with pytest.raises(PeerError, match=r"has those of -1"):
        worker.room(server.give(3, (3, 0)).since)


# ---- a worker's gradients


def pushes_of(model, servers=1, **options):
    coding = coding_of(model, **options)
    shares = pieces_of(coding.parameters, servers, by_element=True)
    return coding, shares, WorkerPushes(coding, shares, [[] for _ in shares])


def decoded(coding, shares, pushes):
    """By piece, what servers make of a push."""
    return {
        piece: coding.decode(piece, room).clone() if coding.encodes(piece) else room.clone()
        for pieces, each in zip(shares, pushes.rooms, strict=True)
        for piece, room in zip(pieces, each.pieces, strict=True)
    }


def drawn(parameters, scale=1.0):
    return [scale * torch.randn(p.shape) for p in parameters]


@pytest.mark.parametrize("name", FIXED)
def test_nothing_of_what_counts_is_lost_and_nothing_of_what_does_not_is_carried_over(name):
    model = nn.Sequential(nn.Linear(300, 200), nn.Linear(200, 3))
    coding, shares, pushes = pushes_of(model, servers=3, name=name)
    wanted, arrived, draw = {}, {}, random.Random(name)
    for token in range(40):
        gradients = drawn(coding.parameters)
        if token % 5 == 0:
            gradients[2] = None
        pushes.pack(token, Unit(1, token), gradients)
        counts = draw.random() < 0.6
        if counts:
            for piece, values in decoded(coding, shares, pushes).items():
                if (gradient := gradients[piece.slot]) is None:
                    continue
                flat = gradient.reshape(-1)[piece.start : piece.stop].double()
                wanted[piece] = wanted.get(piece, 0.0) + flat
                arrived[piece] = arrived.get(piece, 0.0) + values.reshape(-1).double()
        pushes.settle(counts)
        pushes.settle(counts)  # nothing is under way
    assert {piece for piece in wanted if coding.encodes(piece)} == {*pushes.carried}
    for piece, values in wanted.items():
        left = pushes.carried.get(piece, torch.zeros(1)).double()
        torch.testing.assert_close(arrived[piece] + left, values, rtol=0, atol=1e-4)


def test_random_rounding_is_drawn_by_unit_whoever_computes_it():
    model, other = nn.Linear(30, 20), nn.Linear(30, 20)
    gradients, payloads = drawn(model.parameters()), []
    for each, unit in ((model, Unit(4, 1)), (other, Unit(4, 1)), (model, Unit(4, 2))):
        _, _, pushes = pushes_of(each, rounding="random")
        pushes.pack(1, Unit(1, 1), gradients)  # of something else before
        pushes.settle(True)
        pushes.pack(2, unit, gradients)
        payloads.append(pushes.rooms[0].flats[-1].clone())
    assert torch.equal(payloads[0], payloads[1])
    assert not torch.equal(payloads[0], payloads[2])


@pytest.mark.parametrize("name", FIXED)
def test_a_gradient_that_is_not_finite_arrives_so_and_the_next_one_is_right_again(runs, name):
    model = nn.Linear(30, 20)
    for bad in (math.nan, math.inf):
        coding, shares, pushes = pushes_of(model, name=name)
        gradients = drawn(coding.parameters)
        gradients[0][3, 4] = bad
        pushes.pack(1, Unit(1, 1), gradients)
        (weight, _) = decoded(coding, shares, pushes).values()
        assert not weight.isfinite().all()
        pushes.settle(True)
        pushes.pack(2, Unit(1, 2), drawn(coding.parameters))
        assert decoded(coding, shares, pushes)[Piece(0, 0, 600)].isfinite().all()
    run = runs(2, OPTIMIZERS["sgd"], model=NARROW, codec=codec_of(name))
    worker = Worker(run, 0)
    worker.ask()
    with torch.no_grad():
        worker.model.first.weight[3, 4] = math.nan  # what its loss is computed with
    worker.push()
    assert all(p.isnan().any() for n, p in run.whole().named_parameters() if n == "first.weight")


# ---- connections


class Served:
    """The first server's desk in a thread, behind a real door."""

    def __init__(self, run):
        self.run, self.lines = run, []
        holding = run.part.holding
        self.door = Door("127.0.0.1", holding.room, sums=holding.coded)
        self.pushed = threading.Event()
        self.answers = threading.Event()
        self.answers.set()
        self.desk = Desk(self.door, run.commits, self.take, list)
        self.ends = threading.Event()
        self.thread = threading.Thread(target=self.turn, daemon=True)
        self.thread.start()

    def take(self, guest, ask):
        figures = ask.token, ask.total, ask.weight, ask.skipped, ask.present
        committed = self.run.take(Push(*figures, guest.body.pieces, guest.body.buffers))
        self.pushed.set()
        return committed is not None

    def turn(self):
        while not self.ends.is_set():
            self.desk.take_in(self.door.next(0.02))
            if self.answers.is_set():
                self.desk.answer()

    def line(self):
        self.lines.append(Line.to(self.door.address, 0, self.door.secret, 0, sums=True))
        return self.lines[-1]

    def close(self):
        for line in self.lines:
            line.close()
        self.ends.set()
        self.thread.join()
        self.desk.close()


@pytest.fixture
def served():
    made = []

    def make(run):
        made.append(Served(run))
        return made[-1]

    yield make
    for each in made:
        each.close()


def asked(line, worker, ask, body=()):
    """As `Working` does: ask, settle, take."""
    line.send(ask, body)
    held = worker.held[0]
    grant = line.receive(Grant, lambda told: held.room(told.since))
    worker.pushes.settle(grant.counted)
    held.take(grant.token, grant.since)
    worker.lease = worker.run.commits.leases.find(grant.token)
    return grant


def computed(worker):
    total, weight, present = worker.compute()
    ask = Ask(worker.lease.token, total, weight, present=present)
    return ask, worker.pushes.rooms[0].flats


@pytest.mark.parametrize("restarts", [False, True], ids=["", "and the server too"])
@pytest.mark.parametrize("committed", [True, False], ids=["committed", "not"])
def test_a_worker_whose_connection_broke_is_told_whether_its_push_counts(
    runs,
    served,
    committed,
    restarts,
):
    run = runs(1, OPTIMIZERS["sgd"], model=NARROW, codec=codec_of("int8"))
    at, worker = served(run), Worker(run, 0)
    line = at.line()
    grant = asked(line, worker, Ask())
    for _ in range(2):
        ask, body = computed(worker)
        grant = asked(line, worker, ask, body)
        assert grant.counted
        assert grant.since == ask.token
    before = {piece: each.clone() for piece, each in worker.pushes.carried.items()}
    unit = worker.lease.unit
    ask, body = computed(worker)
    staged = {piece: each.clone() for piece, each in worker.pushes._staged.items()}
    at.answers.clear()
    at.pushed.clear()
    if committed:
        line.send(ask, body)
        assert at.pushed.wait(600)
    line.close()
    if restarts:
        at.close()
        run.serve(run.kept)
        at = served(run)
    at.answers.set()
    line = at.line()
    grant = asked(line, worker, Ask(unsure=worker.pushes.unsettled))
    assert grant.counted is committed
    assert grant.since == -1  # what it held is not known on a new connection
    assert ((grant.step, grant.number) == unit) is not committed
    wanted = staged if committed else before
    for piece, each in worker.pushes.carried.items():
        assert torch.equal(each, wanted[piece])
    assert not asked(line, worker, Ask()).counted, "it was sure"


def test_a_push_that_comes_after_its_worker_has_come_again_does_not_count(runs, served):
    """It has been told so."""
    run = runs(1, OPTIMIZERS["sgd"], model=NARROW, codec=codec_of("int8"))
    at, worker = served(run), Worker(run, 0)
    old, new = at.line(), at.line()
    asked(old, worker, Ask())
    (guest,) = at.desk._guests.values()
    ask, body = computed(worker)
    for into, part in zip(guest.body.flats, body, strict=True):
        into.copy_(part)
    assert not asked(new, worker, Ask(unsure=ask.token)).counted
    at.door.arrived(guest, ask)  # its thread was slower
    assert at.pushed.wait(600)
    assert not run.done


def test_a_server_that_has_no_leases_begins_anew_with_each_connection(runs):
    run = runs(2, OPTIMIZERS["sgd"], model=NARROW, codec=codec_of("int8"))
    worker = Worker(run, 0)
    for _ in range(4):
        worker.turn()
    line = worker.line(1)
    line.send(Pull(77), ())
    assert line.receive(ServerAnswer, lambda told: worker.held[1].room(told.since)).since >= 0
    fresh = run.reach(1, 0)
    fresh.send(Pull(78), ())
    assert fresh.receive(ServerAnswer, lambda told: worker.held[1].room(told.since)).since == -1


@pytest.mark.parametrize("what", ["short", "long", "changed"])
def test_what_arrives_otherwise_than_it_was_sent_is_refused(runs, what):
    run = runs(2, OPTIMIZERS["sgd"], model=NARROW, codec=codec_of("int8"))
    worker = Worker(run, 0)
    worker.ask()
    _, _, present = worker.compute()
    body, line = worker.pushes.rooms[1].flats, worker.line(1)
    if what == "changed":
        line._wire = Flips(line._wire)
    elif what == "long":
        body = [*body, torch.zeros(1, dtype=torch.uint8)]
    else:
        body = [*body[:-1], body[-1][:-16]]
    with suppress(PeerError):
        line.send(Stage(worker.lease.token, present), body)
    with pytest.raises(PeerError):
        line.receive(ServerAnswer, ())
    assert not run.threads[1].further._staged


class Flips:
    """A socket that changes one bit of the largest part that is sent."""

    def __init__(self, connection):
        self._connection = connection

    def sendall(self, data):
        data = bytearray(data)
        if len(data) > 10_000:
            data[len(data) // 2] ^= 4
        self._connection.sendall(data)

    def __getattr__(self, name):
        return getattr(self._connection, name)


# ---- what is refused


@pytest.mark.parametrize("strategy", ["server_async", "bounded_stale"])
@pytest.mark.parametrize("name", [*FIXED, "nonzero", "powersgd", "dgc"])
def test_codecs_are_those_that_are_cut_and_have_a_fixed_size(strategy, name):
    if name in FIXED:
        assert make_strategy(strategy, {"encode_vectors": True}, name).encode_vectors
    else:
        with pytest.raises(SpecError, match=r"segmentable and of fixed size. Use int8."):
            make_strategy(strategy, {}, name)


def test_parameters_that_no_codec_takes_are_refused():
    with pytest.raises(SpecError, match=r"parameters of torch.float64, which sync.codec cannot"):
        Coding(ServerAsync(codec=codec_of("int8")), list(nn.Linear(3, 2).double().parameters()))


def test_whether_vectors_are_encoded_is_true_or_false():
    with pytest.raises(SpecError, match=r"encode_vectors = 'all': needs to be true or false"):
        ServerAsync(encode_vectors="all")
