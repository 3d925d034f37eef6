"""Ranks as threads under the real engine, each of which can be ended at any message.

A `World` is what outlives processes: the run's folder with its ledger, and who is a member.
`World.train` runs generation after generation until every member has come to the last
step, as the master does: who is left forms the next group, with newcomers or without.
A `Script` says what goes wrong in a generation: who dies where, and whose last result got
lost, since where one rank dies, some of the others may have what it sent, and some not.

A rank that dies leaves what a killed process leaves: what it had sent, and the ledger.
"""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.memory import MemoryComm, MemoryMessage, _Room
from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.step_sizes import StepSizes
from instep.engine.assignment import Lockstep
from instep.engine.engine import Engine
from instep.engine.membership import GenerationLease
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.step.agreement import Weighed
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import PeerError
from instep.events import LEDGER, read_records
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.store.audit import audit
from instep.store.ledger import cut_back
from instep.sync.base import make_strategy
from instep.sync.delayed import Delayed
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.streaming import Streaming
from instep.sync.servers.server_sync import ServerSync
from instep.worker.rounds.local_models import LocalModel
from instep.worker.rounds.local_optimizers import LocalOptimizers
from instep.worker.rounds.local_states import MODEL as OWN_MODEL
from instep.worker.rounds.local_states import OPTIMIZER, LocalStates

WORKERS, SAMPLES, GLOBAL_BATCH, PARTS, LAST = 3, 16, 6, 3, 4
"""The epoch's last batch is a small one, and training goes on into a second epoch."""

TIMEOUT_S = 600.0


class Killed(BaseException):
    """This rank's process ends here."""


class Point(NamedTuple):
    """A place in a generation at which a rank can be ended."""

    what: str
    """`start`: before a collective is begun; `sent`: its part is on its way; `got`: it is over.
    `gives`, `gave`, `awaits`, `took`: before and after a message to or from one other rank.
    `agreed`, `moved`, `recorded`, `committed`: between them, in the commit of a step."""
    number: int
    """Of the collective in the generation, from 1, or of the rank's message; or the step."""


class Death(NamedTuple):
    """A rank ends at a point."""

    rank: int
    at: Point


class Break(NamedTuple):
    """A rank hears at a point that its group has come apart, and lives."""

    rank: int
    at: Point


class Lapse(NamedTuple):
    """A rank's lease lapses at a point, and it lives."""

    rank: int
    at: Point


@dataclass
class Script:
    """What goes wrong in one generation."""

    deaths: Sequence[Death] = ()
    breaks: Sequence[Break] = ()
    lapses: Sequence[Lapse] = ()
    lost: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """Of a collective to the ranks that never get its result."""

    def __str__(self) -> str:
        said = [f"rank {rank} dies at {at.what} {at.number}" for rank, at in self.deaths]
        said += [f"rank {rank} breaks at {at.what} {at.number}" for rank, at in self.breaks]
        said += [f"rank {rank} lapses at {at.what} {at.number}" for rank, at in self.lapses]
        said += [f"ranks {sorted(who)} lose the result of {c}" for c, who in self.lost.items()]
        return ", ".join(said) or "nothing"


class LossyRoom(_Room):
    """A group in which the result of a collective may not arrive everywhere."""

    def __init__(self, size: int, lost: Mapping[int, frozenset[int]]) -> None:
        super().__init__(size)
        self._lost = lost

    def take(self, rank: int, call: int) -> list[Tensor]:
        """Wait as the others do, and raise."""
        given = super().take(rank, call)
        if rank in self._lost.get(call, ()):
            raise PeerError("the connection to another rank was lost.")
        return given


class WatchedComm(MemoryComm):
    """Calls `at` at each message boundary; whoever waits for a result is who takes it."""

    def __init__(self, room: _Room, rank: int, at: Callable[[str, int], None]) -> None:
        super().__init__(room, rank)
        self._at, self._told = at, 0

    def send(self, tensor: Tensor, to: int) -> MemoryMessage:
        """To one rank."""
        self._told += 1
        number = self._told
        self._at("gives", number)
        super().send(tensor, to)
        self._at("gave", number)
        return MemoryMessage()

    def receive(self, tensor: Tensor, source: int) -> MemoryMessage:
        """From one rank."""
        self._told += 1
        number, message = self._told, super().receive(tensor, source)

        def take() -> None:
            self._at("awaits", number)
            message.wait()
            self._at("took", number)

        return MemoryMessage(take)

    def _begin(self, out: Tensor, own: Tensor, combine: Callable[..., Tensor]) -> Any:
        number = self._calls + 1
        self._at("start", number)
        self._calls = number
        self._room.give(self._rank, number, own.detach().clone())
        self._at("sent", number)

        @torch.no_grad()
        def take() -> None:
            out.copy_(combine(self._room.take(self._rank, number)))
            self._at("got", number)

        return MemoryMessage(take)


class FakeMember:
    """What the engine needs of a worker's membership, without a master."""

    def __init__(self, job: Any, run: Path, number: int) -> None:
        self.job, self.run, self.number, self.started = job, run, number, 0.0
        self.form: Form | None = None
        self.regroups = False
        self.lease = GenerationLease(SimpleNamespace(lapsed=False))  # type: ignore[arg-type]
        self.records = self
        self.recorded: Callable[[], None] = lambda: None
        self.losses: dict[int, float] = {}
        """That it has recorded, by step."""

    def add(self, ledger: bytes, steps: tuple[Any, ...]) -> None:
        """The step stands in the ledger, where this worker writes it."""
        self.recorded()
        step, _, _, loss, *_ = steps
        self.losses[step] = loss

    def emit(self, name: str, **fields: Any) -> None:
        """Nobody listens."""

    def waits_for_writer(self) -> bool:
        """Whoever had the ledger is gone."""
        return False


def averaging(local_steps: int) -> JobSpec:
    """A job that averages participants after so many local steps of each."""
    options = {"local_steps": local_steps}
    return JobSpec(recipe="recipe.py:recipe", sync=SyncSpec(name="averaging", options=options))


def small_model() -> nn.Module:
    """Parameters of several sizes, statistics that move, and one parameter without a gradient."""
    torch.manual_seed(7)
    first = nn.Linear(3, 4, bias=False)  # of one, statistics would leave nothing but rounding
    model = nn.Sequential(first, nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    model.register_parameter("never", nn.Parameter(torch.ones(2)))
    return model


torch.manual_seed(11)
INPUTS, TARGETS = torch.randn(SAMPLES, 3), torch.randn(SAMPLES, 1)
MODEL = small_model()  # built once: threads draw from one generator
COLUMN = 1000
"""Added to the numbers of collectives among the ranks with one place in their replicas."""


def at_once(compute: Callable[[], Any]) -> Future[Any]:
    """What else another thread would compute."""
    future = Future[Any]()
    future.set_result(compute())
    return future


class OwnPart:
    """Each rank of a replica trains a part of the model of its own, which needs no other."""

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters themselves."""
        return list(parameters)

    def counts(self, slot: nn.Parameter) -> bool:
        """No two ranks have the same."""
        return True

    def holders(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Only this one."""
        return ()


class Rank:
    """One process of the run: its engine, and what it has done."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.member = FakeMember(world.job, world.run, number)
        self.model = copy.deepcopy(MODEL).train()
        self.place = number % world.ranks
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter *= 1 + self.place
        parameters = list(self.model.parameters())
        cut = len(parameters) // 2 if world.turns > 1 else 0
        self.kept: LocalStates | None = None
        turns = [
            self._turn(name if cut else "", part)
            for name, part in (("first", parameters[:cut]), ("last", parameters[cut:]))
            if part
        ]
        self.strategy = turns[-1].strategy
        self.engine = Engine(
            self.member,  # type: ignore[arg-type]
            self.model,
            parameters,
            turns,
            ends=lambda step, *_: step == LAST,
            votes=world.votes,
        )
        self._prepare, self._prepared = self.engine._prepare, -1
        self.engine._prepare = self._note  # type: ignore[method-assign]
        self.member.recorded = lambda: self._at("recorded", self.commit)
        self.assignment: Lockstep | None = None
        self.trace: list[Point] = []
        self.formed = False

    def _turn(self, name: str, parameters: list[nn.Parameter]) -> TurnState:
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cuda", enabled=False)
        kind = ServedUpdate if self.world.servers else Update
        limit = 0.1 if self.world.ranks > 1 else None
        update = kind(optimizer, scheduler, parameters, seed=0, max_grad_norm=limit, scaler=scaler)
        advance = update.advance

        def moved() -> None:
            self._at("moved", self.commit + 1)
            advance()

        update.advance = moved  # type: ignore[method-assign]
        options = dict(self.world.options)
        codec = options.pop("codec", "none")
        kept = options.pop("local_optimizers", "reset") == "kept"
        strategy = make_strategy(self.world.strategy, options, codec)
        if isinstance(strategy, Delayed | Streaming):
            strategy.last = LAST
        if isinstance(strategy, Streaming):
            strategy.begin = at_once  # as ranks run one at a time
            strategy.participants, model = PARTS, LocalModel(parameters, strategy.agreed_since)
            strategy.kept = self.kept = LocalStates(
                {OWN_MODEL: model}, parameters[0].device, stays=True
            )
        if kept:
            assert isinstance(strategy, Averaging)
            self.local = torch.optim.SGD(parameters)
            strategy.kept = self.kept = LocalStates(
                {OPTIMIZER: LocalOptimizers(self.local)}, parameters[0].device
            )
        number, split = int(name == "last"), OwnPart() if self.world.ranks > 1 else None
        return TurnState(name, parameters, update, strategy, number=number, split=split)

    def _note(self, staged: Any) -> None:
        """Which commit was prepared last, beside the engine's own account."""
        self._prepared = staged.number
        self._prepare(staged)

    # ---- what the world asks

    @property
    def commit(self) -> int:
        """The number of the last; that of its step, unless each has several turns."""
        return self.engine.state.number

    @property
    def ready(self) -> int:
        """The commit that this rank has prepared, and of which it does not know more; else -1.

        It does once it has heard from where the next generation continues.
        """
        return self._prepared if self._prepared > self.commit else -1

    def tensors(self) -> dict[str, Tensor]:
        """All that a commit has left here, by name."""
        groups = self.engine.state.capture().tensors
        return {f"{g} {n}": t for g, named in groups.items() for n, t in named.items()}

    def digest(self) -> str:
        """Of the commit: its number, tensors and counters, to the bit."""
        snapshot = self.engine.state.capture()
        text = hashlib.sha256(repr((snapshot.step, snapshot.facts)).encode())
        for name, tensor in sorted(self._completed().items()):
            text.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return text.hexdigest()

    def _completed(self) -> dict[str, Tensor]:
        """The same as `tensors`; a server's part of the parameters within those of a worker."""
        own = self.tensors()
        if not isinstance(self.strategy, ServerSync) or self.strategy.whole:
            return own
        worker = self.world.members[0]
        names = [f"model {name}" for name, _ in self.model.named_parameters()]
        whole = {name: worker.tensors()[name].clone() for name in names}
        for slot, start, stop in self.engine.turn.update.held:  # type: ignore[attr-defined]
            part = own[names[slot]].reshape(-1)[start:stop]
            whole[names[slot]].view(-1)[start:stop] = part
        return own | whole

    # ---- its life

    def _at(self, what: str, number: int) -> None:
        point = Point(what, number)
        self.trace.append(point)
        rank, script = self._rank, self.world.script
        if self.assignment and not self.formed and point == Point("got", 1):
            self._prepared = -1  # the members have compared what they hold
        if Lapse(rank, point) in script.lapses:
            self.member.lease.fence()
        if Death(rank, point) in script.deaths:
            raise Killed
        if Break(rank, point) in script.breaks:
            raise PeerError("the members have changed.")

    def live(self, rooms: Sequence[_Room], form: Form) -> str:
        """Be a member of one generation, to its end: `done`, `left` or `killed`.

        Args:
            rooms: of all members; and of those with the same place in their replicas.
            form: of the generation.
        """
        self.member.form, self._rank = form, form.rank
        self.trace, self.formed = [], False
        comms = [WatchedComm(rooms[0], form.rank, self._at)]
        if self.world.ranks > 1:
            place = form.rank // self.world.ranks
            comms.append(WatchedComm(rooms[1], place, lambda what, n: self._at(what, n + COLUMN)))
        try:
            self._generation(comms[0], comms[-1], form)
        except Killed:
            if self.engine.records._ledger is not None:  # files go with their process
                self.engine.records._ledger.close()
            for comm in comms:
                comm.close()
            return "killed"
        except PeerError:
            self._leave(comms)
            return "left"
        self._leave(comms)
        return "done"

    def _leave(self, comms: Sequence[MemoryComm]) -> None:
        self.engine.leave()
        for comm in comms:
            comm.close()

    def _generation(self, comm: MemoryComm, column: MemoryComm, form: Form) -> None:
        given = self.engine.begin(comm, column)
        comm.all_reduce(torch.zeros(1)).wait()  # the loop agrees on something of its own here
        job = self.world.job
        batches = self.world.batches
        assignment = Lockstep(form, job.train, batches, by_speed=False, mesh=job.mesh)
        self.engine.start(comm, column, assignment, compare=not given)
        self.assignment, self.formed = assignment, True
        self.world.entered(self, form.generation)
        begun = self.engine.state.progress.step
        for step, (where, share) in enumerate(
            assignment.plan(begun + 1, LAST, merge=False), begun + 1
        ):
            while self.engine.state.progress.step < step:
                while not self._agree(step, where, share):
                    pass
                self._at("agreed", self.commit + 1)
                self.engine.commit()
                self.world.committed(self)
                self._at("committed", self.commit)
                self.member.lease.check()

    def _agree(self, step: int, where: Any, share: Any) -> bool:
        self.engine.begin_step(step, where)
        passes, batch = {}, where.stop - where.first
        strategy: object = self.strategy
        if isinstance(strategy, Streaming):
            strategy.recall([part.number for part in share.passes])
        for number, part in enumerate(share.passes):
            weight = 0.0 if part.repeats else part.size / batch
            if isinstance(strategy, Streaming):
                passes[part.number] = self._take_local_step(strategy, part, weight)
                continue
            self.engine.passes.begin(part, weight, last=number == len(share.passes) - 1)
            rows = slice(part.samples.first, part.samples.stop)
            loss = nn.functional.mse_loss(self.model(INPUTS[rows]), TARGETS[rows])
            self._remember(part.number, loss)
            loss.backward(inputs=self.engine.trained)
            self.engine.passes.end(part, weight)
            if weight:
                passes[part.number] = Weighed(float(loss.detach()) * part.size, float(part.size))
        samples = sum(part.size for part in share.passes if not part.repeats)
        return self.engine.agree(passes, stop=False, samples=samples) is not None

    def _take_local_step(self, strategy: Streaming, part: Any, weight: float) -> Weighed:
        """Of a participant with a model of its own; the rank's parameters are the shared ones."""
        assert self.kept is not None, "with fragments"
        parameters, model = self.engine.parameters, self.kept.parts[OWN_MODEL]
        shared = [parameter.detach().clone() for parameter in parameters]
        self.kept.resume(part.number)
        if strategy.delay and (found := strategy.landed()) is not None:
            assert isinstance(model, LocalModel)
            model.take(*found, strategy.mixing)
        rows = slice(part.samples.first, part.samples.stop)
        loss = nn.functional.mse_loss(self.model(INPUTS[rows]), TARGETS[rows])
        ways = torch.autograd.grad(loss, parameters, allow_unused=True)
        with torch.no_grad():
            for parameter, way in zip(parameters, ways, strict=True):
                parameter.sub_(0.1 * way if way is not None else 0.0)
            self.kept.computed(part.number, self.kept.pack())
            self.engine.passes.begin(part, weight, last=False, unit=part.number)
            for slot, (parameter, begin) in enumerate(zip(parameters, shared, strict=True)):
                self.engine.passes.gradient(slot, begin - parameter)
                parameter.copy_(begin)
        self.engine.passes.end(part, weight)
        return Weighed(float(loss.detach()) * part.size, float(part.size))

    def _remember(self, participant: int, loss: Tensor) -> None:
        """What a participant's optimizer might: a sum over all its rounds, and how many."""
        if self.kept is None:
            return
        self.local.state.clear()
        self.kept.resume(participant)
        own = self.local.state[self.local.param_groups[0]["params"][0]]
        own["rounds"] = own.get("rounds", 0) + 1
        own["sum"] = own.get("sum", 0.0) + loss.detach() * own["rounds"]
        self.kept.computed(participant, self.kept.pack())


class World:
    """A run: its folder, its members, and what has been seen of it.

    Args:
        run: the folder.
        strategy: its name, with `options`; one of them may be the job's codec, how many of the
            members are servers, or whether participants remember something.
        determinism: of the job.
        votes: whether every commit is voted for.
        turns: updates in each step, one or two; commits are numbered by them.
        shard: ranks of a replica, each with a part of the model of its own; a replica that loses
            one is replaced whole. Then there are two replicas.
        sizes: of steps, where they are not all of one.
        invariant: called when all members of a generation hold the state and none has computed a
            step, and at the end; asserts. `generations` has the members of former ones, with
            those that died.
    """

    def __init__(
        self,
        run: Path,
        strategy: str = "all_reduce",
        options: Mapping[str, Any] | None = None,
        *,
        determinism: str = "order",
        votes: bool = False,
        turns: int = 1,
        shard: int = 1,
        sizes: StepSizes | None = None,
        invariant: Callable[[World], None] = lambda _: None,
    ) -> None:
        table = {
            "recipe": "a.py:recipe",
            "workers": WORKERS,
            "train": {
                "global_batch": GLOBAL_BATCH,
                "micro_batches": PARTS,
                "determinism": determinism,
                "steps": LAST,
            },
        }
        self.ranks, workers = shard, WORKERS
        if shard > 1:
            workers = 2 * shard
            table |= {"workers": workers, "mesh": {"shard": shard}}
            table["train"] |= {"global_batch": 4 * shard + 4, "micro_batches": 2 * shard}
        self.job = spec_file.build(table, source="a test")
        self.batches = Batches(SAMPLES, self.job.train.global_batch, sizes=sizes)
        self.run, self.strategy, self.options = Path(run), strategy, dict(options or {})
        self.servers = self.options.pop("servers", 0)
        self.votes, self.turns, self._invariant = votes, turns, invariant
        self.run.mkdir(parents=True, exist_ok=True)
        (self.run / "ledger.bin").unlink(missing_ok=True)
        self._ranks, self._loses_hosts = 0, False
        self.members = [self._newcomer() for _ in range(workers)]
        self.script = Script()
        self.generation = 0
        self.generations: list[list[Rank]] = []
        self._entered: defaultdict[int, dict[tuple[int, str], list[int]]] = defaultdict(dict)
        self._committed: defaultdict[int, set[int]] = defaultdict(set)  # its number to generations
        self._lock = threading.Lock()

    def _newcomer(self) -> Rank:
        self._ranks += 1
        return Rank(self, self._ranks - 1)

    def _replacement(self, dead: Rank) -> Rank:
        """In the place of one that died, with the memory of its host; or on another host, the first
        time, where another server has a copy."""
        newcomer = Rank(self, dead.number)
        if not (self._loses_hosts and dead in self.members[-self.servers :]):
            newcomer.engine.own.memory = dead.engine.own.memory
        return newcomer

    # ---- what ranks tell

    def entered(self, rank: Rank, generation: int) -> None:
        """A rank's steps are about to begin."""
        with self._lock:
            entered = self._entered[generation]
            entered.setdefault((rank.place, rank.digest()), []).append(rank.commit)
            if sum(map(len, entered.values())) == len(self.members):
                self._invariant(self)

    def committed(self, rank: Rank) -> None:
        """A rank has committed."""
        with self._lock:
            self._committed[rank.commit].add(self.generation)

    # ---- the run

    def train(self, scripts: Sequence[Script] = (), *, replace: bool = True) -> None:
        """Run generations until all members have come to the last step.

        Args:
            scripts: of the first generations; nothing goes wrong in later ones.
            replace: whether a newcomer takes the place of each that died; else the others go on.

        Raises:
            AssertionError: a promise was broken.
        """
        for number in range(len(scripts) + 3):
            self.script = scripts[number] if number < len(scripts) else Script()
            expected = self._expected()
            fates = self._one_generation()
            self._check_generation(expected)
            if "killed" not in fates and "left" not in fates:
                break
            alive = [r for r, fate in zip(self.members, fates, strict=True) if fate != "killed"]
            assert alive, "nobody is left"
            if self.ranks > 1:
                self.members = self._whole_replicas(fates, replace=replace)
                continue
            ended = fates[len(fates) - self.servers :] if self.servers else []
            copied = bool(self.options.get("copy"))
            self._loses_hosts = copied and number == 0 and ended.count("killed") == 1
            if self.strategy_votes and (replace or self.servers):
                workers = len(self.members) - self.servers
                spared = "killed" in fates[:workers] and set(fates[:workers]) != {"killed"}
                self.members = [
                    self._replacement(rank) if fate == "killed" else rank
                    for place, (rank, fate) in enumerate(zip(self.members, fates, strict=True))
                    if replace or not spared or place >= workers or fate != "killed"
                ]
                continue
            missing = len(self.members) - len(alive)
            self.members = alive + [self._newcomer() for _ in range(missing if replace else 0)]
        else:
            raise AssertionError("the run does not come to its end")
        self._check_end()

    def _whole_replicas(self, fates: Sequence[str], *, replace: bool) -> list[Rank]:
        """The members of the next generation: a replica that lost a rank is begun anew, or gone."""
        members = list[Rank]()
        for begin in range(0, len(fates), self.ranks):
            replica = self.members[begin : begin + self.ranks]
            if "killed" not in fates[begin : begin + self.ranks]:
                members += replica
            elif self.strategy_votes:  # what each of its ranks remembers outlives them
                members += map(self._replacement, replica)
            elif replace or fates.count("killed") > 1:
                members += [Rank(self, rank.number) for rank in replica]
        held = {rank.place for rank in members if rank.engine.state.held}
        if len(held) < self.ranks:  # a part of the model is nowhere: the run begins again
            members = [Rank(self, rank.number) for rank in members]
        return members

    def _one_generation(self) -> list[str]:
        self.generation += 1
        origin = None if any(rank.engine.state.held for rank in self.members) else ""
        if origin == "":  # the run begins, or nobody is left who has its state
            cut_back(self.run / "ledger.bin", 0)
            self._committed.clear()
        room = LossyRoom(len(self.members), self.script.lost)
        lost = {call - COLUMN: ranks for call, ranks in self.script.lost.items()}
        columns = [
            LossyRoom(
                len(self.members) // self.ranks,
                {
                    c: frozenset(r // self.ranks for r in w if r % self.ranks == place)
                    for c, w in lost.items()
                },
            )
            for place in range(self.ranks)
        ]
        for column in columns:  # whoever waits, waits in one place
            column.changed = room.changed
        numbers = [rank.number for rank in self.members]
        fates: list[Any] = [None] * len(numbers)

        def live(place: int, rank: Rank) -> None:
            form = Form(
                generation=self.generation,
                rank=place,
                members=numbers,
                servers=tuple(numbers[len(numbers) - self.servers :]),
                checkpoint=origin,
            )
            try:
                with room.changed:  # one runs at a time, until it waits: quicker, and repeatable
                    fates[place] = rank.live((room, columns[rank.place]), form)
            except BaseException as error:
                fates[place] = error
                for each in (room, *columns):
                    each.shatter()

        self.generations.append(list(self.members))
        threads = [
            threading.Thread(target=live, args=one, daemon=True) for one in enumerate(self.members)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(TIMEOUT_S)
            assert not thread.is_alive(), "a rank waits for ever"
        for fate in fates:
            if isinstance(fate, BaseException):
                raise fate
        return fates

    # ---- what must hold

    def _expected(self) -> int | None:
        """The commit from which the members must continue; None where nobody has one.

        Written from the promise: a commit that somebody has happened. One that all who were
        in the newest generation had prepared happened too, where they voted. No other did.
        """
        held = [rank for rank in self.members if rank.engine.state.held]
        if not held:
            return None
        highest = max(rank.commit for rank in held)
        newest = max(rank.engine.state.generation for rank in held)
        inside = [rank for rank in held if rank.engine.state.generation == newest]
        voted = self.votes or self.strategy_votes or self.ranks > 1
        if voted and all(rank.ready == highest + 1 for rank in inside):
            highest += 1
        if voted:  # a vote that came back anywhere, if only to a rank that is gone
            assert highest >= max(self._committed, default=0), "a voted commit was lost"
        return highest

    @property
    def strategy_votes(self) -> bool:
        """Whether the strategy asks for votes by itself."""
        return bool(self.members[0].strategy.laws)

    def _check_generation(self, expected: int | None) -> None:
        entered = self._entered[self.generation]
        assert len(entered) <= self.ranks, "the members of a generation hold different states"
        steps = {step for each in entered.values() for step in each}
        if entered and expected is not None:
            assert steps == {expected}, f"continued from {steps}, and not from {expected}"

    def _check_end(self) -> None:
        assert {rank.commit for rank in self.members} == {LAST * self.turns}
        ends = {(rank.place, rank.digest()) for rank in self.members}
        assert len(ends) == self.ranks, "different states at the end"
        self._invariant(self)
        records = read_records(self.run / "ledger.bin", LEDGER)
        found = audit(records, self.batches, last_step=LAST)
        assert found.exact, found
        steps = records["step"].tolist()
        assert steps == sorted(steps), steps
        ever = {rank for members in (*self.generations, self.members) for rank in members}
        noted = {step for rank in ever for step in rank.member.losses}
        assert noted >= set(range(1, LAST + 1)), f"only {noted} have a loss in the records"
        for step in range(1, LAST + 1):  # of one deal, in one piece
            rows = records[records["step"] == step]
            assert len({int(each) for each in rows["generation"]}) == 1, rows
