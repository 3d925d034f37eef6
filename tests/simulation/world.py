"""A story: one run of a job, and what befalls it. From a seed to a verdict.

`tell(seed)` draws a job and its faults, lets everything happen, and raises
`Violation` at the first promise that does not hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from instep.comm.protocol import messages as m
from instep.control.decisions.actions import Finish
from instep.control.master import Outcome
from instep.job import file as spec_file

from .engine import TIME, Death, Engine, Listener, Process, Violation
from .groups import End, Wait
from .owning import Memory
from .roles import Client, Host, MasterProcess, Wisher, staged
from .truth import Lineage, Truth
from .workers import Worker

TIMEOUT_S = 120.0
"""How long a run may take after the last fault; twice as long for each time that a worker was
lost at one place, since as much longer it may be silent there."""


@dataclass(frozen=True)
class Plan:
    """What is run, and how much befalls it."""

    workers: int
    steps: int
    step_s: float
    passes: int
    save_every: int
    validate_every: int
    figures: bool
    fires_at: int
    faults: int
    until_s: float
    """When the last fault comes."""
    eager: float
    """How likely a worker is killed at each of the places where that matters most."""
    eager_master: float
    """How likely the master is killed with a decision, having carried out a part of it."""
    drains: bool
    """Whether members own state, and hand it over before they leave."""
    participants: int
    """Of a round of averaging; 0 where a commit is a step."""
    joined: bool
    """Whether the workers were started by another program, and none can be replaced."""
    servers: int
    samples: int
    """Of the dataset: the last batch of an epoch may be a small one."""
    ranks: int
    """Processes of one replica; each computes micro-batches of its own."""
    together: bool
    """Whether all workers start again where one is lost, as on GPUs."""


def drawn(engine: Engine) -> Plan:
    """A job, and how much befalls it."""
    random = engine.random
    kind = random.choices(
        ["drains", "rounds", "joined", "plain", "mesh", "gpus"], [8, 5, 2, 5, 6, 3]
    )[0]
    drains, rounds, joined, mesh = (kind == k for k in ("drains", "rounds", "joined", "mesh"))
    gpus = kind == "gpus"
    steps = random.randint(3, 24) + (12 if drains else 0)  # for changes of members take time
    figures = random.random() < 0.3 and not rounds
    workers = random.choice([1, 2, 2, 3, 3, 4])
    ranks = random.choice([2, 2, 4]) if mesh or (gpus and random.random() < 0.5) else 1
    if ranks > 1:
        workers = ranks * random.choice([1, 2, 2, 3])
    return Plan(
        workers=workers,
        steps=steps,
        step_s=random.choice([0.02, 0.1, 0.1, 0.4]),
        passes=random.choice([1, 2]),
        save_every=random.choice([0, 0, 2, 5]),
        validate_every=random.choice([0, 0, 1, 3]),
        figures=figures,
        fires_at=random.randint(1, steps) if figures and random.random() < 0.5 else 0,
        faults=random.choice([0, 1, 2, 3, 4, 6, 8]),
        until_s=random.uniform(2.0, 10.0),
        eager=0.0 if joined else random.choice([0.0, 0.0, 0.01, 0.03]),
        eager_master=random.choice([0.0, 0.0, 0.03, 0.1]),
        drains=drains,
        participants=max(workers, random.choice([2, 3, 5, 8])) if rounds else 0,
        joined=joined,
        servers=0 if rounds or joined or mesh or gpus else random.choice([0, 0, 1, 2]),
        samples=random.randint(3, 6) * 64 + random.choice([0, 8, 24]),
        ranks=ranks,
        together=gpus,
    )


class World:
    """Everything of one story."""

    def __init__(self, seed: int, *, verbose: bool = False) -> None:
        self.engine = Engine(seed)
        if verbose:
            self.engine.story = []
        self.plan = drawn(self.engine)
        self.job = _job(self.plan)
        portions, samples = self.job.per_commit, self.plan.samples
        plan = self.plan
        self.truth = Truth(plan.steps, portions, samples, plan.servers, ranks=plan.ranks)
        self.processes: dict[int, Process] = {}
        self.ends: dict[int, End] = {}
        self.memory: defaultdict[int, Memory] = defaultdict(Memory)
        """Of the host, by the number of a worker."""
        self.dismissed: set[Process] = set()
        """Who was told to end, or was ended."""
        self.listener = Listener(Process(self.engine, 0, "listener"))
        self._pids = 100
        self.master: MasterProcess | None = None
        self.hosts: list[Host] = []
        self.fuse = self.masters = 0
        self.looping: set[Process] = set()
        self.losses = 0
        self.interrupts = 0
        self.outcome: Outcome | None = None
        self._over_at: float | None = None
        self._left: list[Worker] = []
        self._wanted_s: dict[Process, float] = {}

    # ---- processes

    def _pid(self) -> int:
        self._pids += 1
        return self._pids

    def start_master(self) -> None:
        """The client brings up a master."""
        if self._over_at is None:
            self.fuse = 0
            self.masters += 1
            self.master = MasterProcess(self, self._pid())

    def start_host(self, *, fresh: bool = False) -> None:
        """A host comes: the first, its spare, or another."""
        if self._over_at is None:
            host = Host(self, self._pid(), fresh=fresh)
            self.processes[host.pid] = host
            self.hosts.append(host)
            if fresh:
                self.launched = host

    def joins(self, number: int) -> None:
        """A process that another program has started joins."""
        self.engine.tell(self.start_worker(number), "was started by another program")

    def start_worker(self, number: int) -> Worker:
        """A host forks a worker."""
        worker = Worker(self, self._pid(), number)
        self.processes[worker.pid] = worker
        self.engine.tell(worker, "is forked")
        return worker

    def workers(self) -> list[Worker]:
        """Those that live."""
        return [p for p in self.processes.values() if isinstance(p, Worker) and p.alive]

    # ---- what the processes do to the world

    def takes_effect(self) -> None:
        """The master is about to do something that others may see; it may die right here."""
        if self.fuse and self.outcome is None:
            self.fuse -= 1
            if not self.fuse:
                raise Death

    def decides(self) -> None:
        """The master has written down what it makes of some news."""
        kills = self.plan.eager_master and TIME.now < self.plan.until_s and self.masters < 6
        if kills and not self.fuse and self.engine.chance(self.plan.eager_master):
            self.fuse = self.engine.random.randint(1, 6)

    def kills_at(self, name: str) -> bool:
        """Whether a worker is killed at one of the places where that matters."""
        kills = self.plan.eager and TIME.now < self.plan.until_s and self.losses < 8
        likely = {"taken over": 10, "handed over": 40}.get(name, 1)
        if kills and self.engine.chance(self.plan.eager * likely):
            self.losses += 1
            return True
        return False

    def hangs(self, worker: Worker) -> Wait:
        """The user's code does not come back; the process shows signs of life."""
        if worker in self.looping:
            while True:
                yield None

    def checkpoint(self, path: str) -> Lineage:
        """What a checkpoint holds."""
        return self.truth.checkpoints[int(path)] if path else ()

    def saves(self, worker: Worker, lineage: Lineage) -> None:
        """A checkpoint is published, if its writer still lives and the run still has that step."""
        written = [record.generation for record in self.truth.ledger[: len(lineage)]]
        if worker.alive and worker not in self.truth.forgotten and written == list(lineage):
            self.truth.checkpoints.append(lineage)

    def goes_back(self) -> Any:
        """As `resume.go_back`."""
        self.takes_effect()
        assert self.truth.journal is not None
        joined = self.truth.journal.ready
        known = {w for w in self.workers() if w.number in joined}
        step = self.truth.go_back(known - self.dismissed)
        self.engine.tell("master", f"goes back to step {step}")
        newest = [n for n, c in enumerate(self.truth.checkpoints) if len(c) == step and step]
        return _StartPoint(step, newest[-1] if newest else None)

    def told_to_form(self, process: Process, form: m.Form) -> None:
        """A worker is told to form a group."""
        assert isinstance(process, Worker)
        if not process.built:
            raise Violation(f"{process} is told to form a group, and is not built")
        self.truth.form(process.number, process, form)

    def killed_at_the_end(self, workers: set[Process]) -> None:
        """Whatever is left is killed; who has finished was released, and not left to that."""
        known = self.truth.journal
        if known is not None and known.done and known.done.keys() >= set(known.group):
            left = [
                str(worker)
                for worker in workers
                if isinstance(worker, Worker) and worker.number in known.group
                if worker.alive and not worker.stopped and worker not in self.dismissed
            ]
            if left:
                raise Violation(f"{left} have to be killed, since nobody has released them")
        self.dismissed |= workers

    def told_to_end(self, process: Process) -> None:
        """A worker is told that the run has no more use for it."""
        training = self.truth.journal is not None and self.truth.journal.phase == "training"
        if training and self.plan.drains and process in self.truth.owning:
            raise Violation(f"{process} is released, and has not handed over what it owns")
        self.dismissed.add(process)

    # ---- the end

    def finished(self, outcome: Outcome) -> None:
        """The master says how the run ended."""
        self.outcome = outcome
        assert self.master is not None
        known = self.master.watched()  # the client ends whoever has not joined
        self._left = [worker for worker in self.workers() if worker.pid in known]
        finish = outcome.finish
        self.engine.tell("master", f"ends the run: {finish}")
        self._check_end(finish, outcome)

    def _check_end(self, finish: Finish, outcome: Outcome) -> None:
        plan = self.plan
        if finish.outcome == "completed" or finish.outcome == "stopped":
            self.truth.completed(finish.step)
        fires = 0 < plan.fires_at < plan.steps
        at_its_end = finish.outcome == "completed" and finish.step == plan.steps
        if at_its_end and (not fires or plan.fires_at == plan.steps - 1):
            return
        if finish.outcome == "stopped" and fires and finish.step == plan.fires_at + 1:
            return
        if finish.outcome == "interrupted" and self.interrupts:
            return
        cause = outcome.blame.failed.cause if outcome.blame else ""
        told = f" (a rule fires at step {plan.fires_at})" if fires else ""
        raise Violation(f"the run ended with {finish}{told}: {cause}")

    def over(self, over: m.Over) -> None:
        """The client has heard of the end; whoever is left was told to end before."""
        self._over_at = TIME.now
        left = [str(w) for w in self._left if w.alive and w not in self.dismissed]
        if left:
            raise Violation(f"the run is over, and nobody has told {left} to end")

    def look(self, master: MasterProcess) -> None:
        """After each turn of the master: what it knows is what its journal says."""
        known = self.truth.journal
        if known is not None and master.state != known:
            raise Violation(f"the master knows {master.state}, its journal {known}")

    def run(self) -> None:
        """Until it is over, or can not be any more."""
        with staged(self):
            self.client = Client(self, self._pid())
            self.processes[self.client.pid] = self.client
            self.client.begin()
            misfortunes(self)
            while self._over_at is None:
                if not self.engine.turn():
                    raise Violation("nothing happens any more, and the run is not over")
                if TIME.now > self.plan.until_s + TIMEOUT_S and self._takes_too_long():
                    raise Violation(f"the run does not end: {self._where()}")

    def _takes_too_long(self) -> bool:
        lost = self.truth.journal.lost if self.truth.journal is not None else {}
        times = max((times for _, times in lost.values()), default=0)
        return TIME.now > self.plan.until_s + TIMEOUT_S * 2**times

    def _where(self) -> str:
        state = self.master.state if self.master is not None and self.master.alive else None
        doing = {str(w): (w.phase, len(self.truth.held.get(w, ()))) for w in self.workers()}
        return f"{doing}, {state}"


class _StartPoint:
    """As `folder.StartPoint`, of a run that went back."""

    figures = warnings = ()

    def __init__(self, step: int, checkpoint: int | None) -> None:
        self.step, self.checkpoint = step, None if checkpoint is None else str(checkpoint)


def _job(plan: Plan) -> Any:
    stop = {"gradient_norm": 0.5} if plan.figures else {}
    sync: dict[str, Any] = {"codec": "int8"} if plan.drains else {}
    if plan.servers:
        sync |= {"name": "server_sync", "servers": plan.servers}
    if plan.participants:
        sync = {"name": "averaging", "participants": plan.participants}
        sync["options"] = {"local_steps": 2}
    table = {
        "name": "story",
        "recipe": "story.py:recipe",
        "workers": plan.workers,
        "train": {
            "steps": plan.steps,
            "global_batch": 64,
            "micro_batches": 8 if plan.ranks == 1 else 16,
        },
        "mesh": {"shard": plan.ranks},
        "stop": stop,
        "sync": sync,
    }
    return spec_file.build(table, source="a story")


# ---- what befalls a run


def misfortunes(world: World) -> None:
    """Draw what happens, and when."""
    engine, plan = world.engine, world.plan
    names = [name for name in KINDS if name in SURVIVED or not plan.joined]
    names = [name for name in names if name not in OF_A_MESH or plan.ranks > 1]
    weights = [KINDS[name][1] for name in names]
    bursts = [engine.between(0.2, plan.until_s) for _ in range(engine.random.randint(1, 3))]
    for name in engine.random.choices(names, weights, k=plan.faults):
        when = engine.random.choice(bursts) + engine.random.expovariate(3.0)
        engine.after(min(when, plan.until_s), _befalls, world, name)
    engine.after(plan.until_s, _ends, world)


def _befalls(world: World, name: str) -> None:
    if world.outcome is None:
        world.engine.tell("-- fate", name)
        KINDS[name][0](world)


def _ends(world: World) -> None:
    world.engine.tell("-- fate", "no more faults")


def _some_worker(world: World) -> Worker | None:
    workers = world.workers()
    return world.engine.random.choice(workers) if workers else None


def _kill_worker(world: World) -> None:
    if (worker := _some_worker(world)) is not None:
        worker.die(-9)


def _kill_server(world: World) -> None:
    servers = [worker for worker in world.workers() if worker.is_server]
    if servers:
        world.engine.random.choice(servers).die(-9)


def _kill_one_of_each_replica(world: World) -> None:
    ranks = world.plan.ranks
    for replica in {worker.number // ranks for worker in world.workers()}:
        number = replica * ranks + world.engine.random.randrange(ranks)
        for worker in world.workers():
            if worker.number == number:
                world.engine.after(world.engine.between(0.0, 0.3), worker.die, -9)


def _kill_fellows(world: World) -> None:
    """One process of a replica, then another: while the first is replaced, or builds."""
    if (worker := _some_worker(world)) is None:
        return
    replica = worker.number // world.plan.ranks
    worker.die(-9)
    for _ in range(2):
        world.engine.after(world.engine.between(0.0, 1.0), _kill_one_of, world, replica)


def _kill_one_of(world: World, replica: int) -> None:
    living = [w for w in world.workers() if w.number // world.plan.ranks == replica]
    if living:
        world.engine.random.choice(living).die(-9)


def _break_replica(world: World) -> None:
    """The connections inside a replica break, and its processes live."""
    if (worker := _some_worker(world)) is not None:
        worker.loses_fellows()


def _kill_all_workers(world: World) -> None:
    for worker in world.workers():
        world.engine.after(world.engine.between(0.0, 0.05), worker.die, -9)


def _kill_master(world: World) -> None:
    if world.master is not None and world.master.alive and world.masters < 6:
        if world.engine.chance(0.3):
            world.master.die(-9)
        else:
            world.fuse = world.engine.random.randint(1, 25)


def _stall_master(world: World) -> None:
    if world.master is not None:
        world.master.stalled_until = TIME.now + world.engine.between(0.2, 2.5)


def _hang_master(world: World) -> None:
    """It was stopped; the client ends it once it has been silent for too long."""
    if world.master is not None and world.master.alive and world.masters < 6:
        world.master.stalled_until = TIME.now + 1000.0
        world.engine.after(world.engine.between(1.2, 3.0), world.master.die, -9)


def _stop_worker(world: World) -> None:
    worker = _some_worker(world)
    if worker is not None and worker.shows_itself:  # before, nobody could tell
        worker.stop()
        worker.deaf = world.engine.chance(0.5)


def _pause_worker(world: World) -> None:
    if (worker := _some_worker(world)) is not None:
        worker.stop()
        world.engine.after(world.engine.between(0.1, 1.5), worker.go_on)


def _pause_all_workers(world: World) -> None:
    """A machine that sleeps, or a shared disk that stalls: all of them stand still at once."""
    seconds = world.engine.between(0.5, 20.0)
    for worker in world.workers():
        worker.stop()
        world.engine.after(seconds, worker.go_on)


def _loop_worker(world: World) -> None:
    if (worker := _some_worker(world)) is not None:
        world.looping = world.looping | {worker}


def _notice(world: World) -> None:
    if (worker := _some_worker(world)) is not None:
        worker.told_to_leave()
        world.engine.after(world.engine.between(2.0, 10.0), worker.die, -9)


def _scale(world: World) -> None:
    ranks, random = world.plan.ranks, world.engine.random
    workers = random.randint(1, 5) if ranks == 1 else random.choice([1, 2, 3, 1.5]) * ranks
    wisher = Wisher(world, world._pid(), int(workers))
    world.processes[wisher.pid] = wisher


def _kill_host(world: World) -> None:
    living = [host for host in world.hosts if host.alive]
    if living:
        living[-1].spare &= world.engine.chance(0.7)
        living[-1].die(-9)


def _interrupt(world: World) -> None:
    world.interrupts += 1
    world.client.interrupt()


def _cut(world: World, who: Callable[[Process, Process], bool]) -> None:
    seconds = world.engine.random.choice([0.1, 0.5, 1.0, 2.5, 4.0])
    world.engine.cuts.append((TIME.now + seconds, who))


def _cut_master(world: World) -> None:
    apart = {p for p in world.processes.values() if world.engine.chance(0.4)}
    place = world.listener.place
    _cut(world, lambda a, b: (a is place and b in apart) or (b is place and a in apart))


def _cut_workers(world: World) -> None:
    apart = {w for w in world.workers() if world.engine.chance(0.5)}
    _cut(
        world,
        lambda a, b: (
            isinstance(a, Worker) and isinstance(b, Worker) and (a in apart) != (b in apart)
        ),
    )


KINDS: dict[str, tuple[Callable[[World], None], float]] = {
    "a worker is killed": (_kill_worker, 5),
    "a server is killed": (_kill_server, 2),
    "all workers are killed": (_kill_all_workers, 1),
    "one of each replica is killed": (_kill_one_of_each_replica, 2),
    "fellows are killed": (_kill_fellows, 5),
    "a replica comes apart": (_break_replica, 2),
    "the master is killed": (_kill_master, 5),
    "the master stalls": (_stall_master, 1),
    "the master hangs": (_hang_master, 1),
    "a worker hangs": (_stop_worker, 1),
    "a worker pauses": (_pause_worker, 2),
    "all workers pause": (_pause_all_workers, 1),
    "a worker gets nowhere": (_loop_worker, 1),
    "a worker has to leave": (_notice, 8),
    "the run is scaled": (_scale, 6),
    "the host is killed": (_kill_host, 2),
    "a stop is asked for": (_interrupt, 0.3),
    "the master is cut off": (_cut_master, 2),
    "workers are cut off": (_cut_workers, 5),
}
"""What may befall a run, and how often relative to the rest."""

OF_A_MESH = ("one of each replica is killed", "fellows are killed", "a replica comes apart")
"""What needs replicas of several processes."""

SURVIVED = (
    "the master is killed",
    "the master stalls",
    "the master hangs",
    "a worker pauses",
    "all workers pause",
    "a stop is asked for",
    "the master is cut off",
    "workers are cut off",
)
"""What a run survives whose workers cannot be replaced."""


def tell(seed: int, *, verbose: bool = False) -> World:
    """Tell the story of a seed.

    Raises:
        Violation: a promise was broken.
    """
    world = World(seed, verbose=verbose)
    try:
        world.run()
    except Violation as broken:
        broken.world = world  # type: ignore[attr-defined]
        raise
    except Exception as error:
        broken = Violation(f"something raised: {error!r}")
        broken.world = world  # type: ignore[attr-defined]
        raise broken from error
    return world
