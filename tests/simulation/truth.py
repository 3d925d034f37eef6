"""What really happened in a story, which nobody in it can see, and what must hold of it.

The disk is here too: ledger, checkpoints, events, journal. The content of a
step is told by its lineage: the generation in which each step so far was
computed. Two workers hold the same state if and only if their lineages are
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from instep.comm.protocol.messages import Form
from instep.control.decisions.state import State
from instep.data.order import position
from instep.engine.passes import Pass, parts_of, positions_of
from instep.job.train import TrainSpec

from .engine import Process, Violation
from .owning import Things

Lineage = tuple[int, ...]


class Part(NamedTuple):
    """Units of a step that follow each other, as one worker has computed them."""

    worker: int
    units: range
    step: int
    upon: Lineage
    """The state that it began from."""


class Record(NamedTuple):
    """A committed step, as the ledger has it."""

    step: int
    generation: int
    rows: tuple[tuple[int, ...], ...]
    """Records of `events.LEDGER`."""


def with_work(form: Form) -> tuple[int, ...]:
    """The members of a generation that compute."""
    return tuple(n for n in form.members if n not in form.servers and n not in form.draining)


@dataclass
class Truth:
    """All that the invariants look at."""

    steps: int
    """Of the job."""
    train: TrainSpec
    """The portions of a commit."""
    samples: int
    servers: int = 0
    """That every generation must have."""
    ranks: int = 1
    """Processes of one replica."""
    owning: set[Process] = field(default_factory=set)
    """Who owns state that it must hand over before it may leave."""
    held: dict[Process, Lineage] = field(default_factory=dict)
    """What each living worker holds."""
    forgotten: set[Process] = field(default_factory=set)
    """Who holds what no longer counts: the run went back, or was told to do without it."""
    number: dict[Process, int] = field(default_factory=dict)
    """Of each worker that was told to form a group."""
    forms: dict[int, Form] = field(default_factory=dict)
    formed: dict[tuple[int, Process], int] = field(default_factory=dict)
    """The rank that each process was told, by generation."""
    by_all: dict[int, int] = field(default_factory=dict)
    """Step to the generation whose members have all committed it."""
    there: dict[int, int] = field(default_factory=dict)
    """The newest step that a living process held when a generation was told to form."""
    committed: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """Generation and step to the members that have committed it."""
    parts: dict[Process, dict[int, Part]] = field(default_factory=dict)
    """What each process has computed of the step that it is at, by number of the first unit."""
    agreed: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Generation and step to the worker whose computing of each unit counts."""
    owned: dict[tuple[int, int], dict[int, Things]] = field(default_factory=dict)
    """Generation and step to what each worker alone has there."""
    ledger: list[Record] = field(default_factory=list)
    writer: Process | None = None
    """Who has the ledger open."""
    checkpoints: list[Lineage] = field(default_factory=list)
    went_back: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    timed: list[Any] = field(default_factory=list)
    """Arrays of `events.STEPS`."""
    journal: State | None = None
    keys: dict[str, bytes] = field(default_factory=dict)
    """That the journal has."""
    done: set[tuple[int, int]] = field(default_factory=set)
    """Generation and worker that has said that it has nothing left to do."""

    # ---- generations

    def form(self, worker: int, process: Process, form: Form) -> None:
        """A worker is told to form a group."""
        first = self.forms.setdefault(form.generation, form)
        self.number[process] = worker
        held = [len(self.held[process]) for process in self.living_holders()]
        self.there.setdefault(form.generation, max(held, default=0))
        same = ("members", "checkpoint", "servers", "draining")
        if any(getattr(form, name) != getattr(first, name) for name in same):
            raise Violation(f"generation {form.generation} was told twice: {first} and {form}")
        order = sorted(set(form.members), key=lambda n: (n in form.servers, n))
        ranked = order == form.members and form.rank < len(form.members)
        if not ranked or form.members[form.rank] != worker:
            raise Violation(f"worker {worker} was told a rank that is not its own: {form}")
        if (form.role == "server") != (worker in form.servers):
            raise Violation(f"member {worker} was told a role that is not its own: {form}")
        if len(form.servers) < self.servers or not with_work(form):
            raise Violation(f"a generation lacks servers, or workers: {form}")
        if self.replicas(form.members) * self.ranks != len(form.members):
            raise Violation(f"a generation has a part of a replica: {form}")
        if any(process is not other and self.ranks_clash(form, other) for other in self.held):
            raise Violation(f"two processes were told rank {form.rank} of {form.generation}")
        self.formed[form.generation, process] = form.rank

    def replicas(self, workers: Iterable[int]) -> int:
        """How many replicas are whole among these."""
        count = Counter(worker // self.ranks for worker in {*workers})
        return sum(processes == self.ranks for processes in count.values())

    def meets(self, form: Form, worker: int, fellows: Iterable[Process]) -> None:
        """A worker is in a generation, with its fellows: those that it met when it started."""
        replica, known = worker // self.ranks, set(fellows)
        told = {
            process
            for (generation, process), rank in self.formed.items()
            if generation == form.generation and form.members[rank] // self.ranks == replica
        }
        if told != known:
            raise Violation(
                f"worker {worker} is in generation {form.generation} with {[*map(str, told)]}, and "
                f"shares its replica with {[*map(str, known)]}"
            )

    def ranks_clash(self, form: Form, other: Process) -> bool:
        """Whether another living process was told the same rank of the same generation."""
        return other.alive and self.formed.get((form.generation, other)) == form.rank

    # ---- steps

    def computes(self, process: Process, worker: int, form: Form, step: int, part: Pass) -> Part:
        """A worker has computed a pass of a step; nobody in its group has it yet."""
        units = range(part.number, part.number + part.micro_batches)
        done = Part(worker, units, step, self.held[process])
        for other, parts in self.parts.items():
            if other.alive and (form.generation, other) in self.formed:
                there = [p for p in parts.values() if (p.step, p.upon) == (step, done.upon)]
                if any(not set(units).isdisjoint(p.units) for p in there):
                    raise Violation(f"{process} computes {done}, and {other} has it: {there}")
        return done

    def agrees(self, form: Form, step: int, upon: Lineage, parts: Iterable[Part]) -> None:
        """What all members have given to a step: each unit once, from the same state."""
        given = [(unit, part) for part in parts for unit in part.units]
        units = sorted(unit for unit, _ in given)
        if units != list(range(self.units(step))):
            raise Violation(f"step {step} counts units {units} of {self.units(step)}")
        if wrong := [part for _, part in given if (part.step, part.upon) != (step, upon)]:
            raise Violation(
                f"step {step} upon {upon} counts what was computed for another: {wrong}"
            )
        if idle := {part.worker for _, part in given} - set(with_work(form)):
            raise Violation(
                f"step {step} counts what {idle} computed, and they get no work: {form}"
            )
        self.agreed[form.generation, step] = {unit: part.worker for unit, part in given}

    def units(self, step: int) -> int:
        """How many a step has."""
        return parts_of(position(step, self.samples, self.train.global_batch), self.train)

    def commits(self, process: Process, worker: int, generation: int, step: int) -> Lineage:
        """A step counts for a worker; gives back its lineage."""
        before = self.held.get(process, ())
        if len(before) != step - 1:
            raise Violation(f"{process} commits step {step} upon step {len(before)}")
        form, lineage = self.forms[generation], (*before, generation)
        if worker not in form.draining:
            self.owning.add(process)
        self.held[process] = lineage
        for other, theirs in self.held.items():
            counts = other.alive and other not in self.forgotten
            if counts and len(theirs) >= step and theirs[:step] != lineage:
                raise Violation(
                    f"step {step} was committed twice: by {other} in {theirs[:step]}, "
                    f"by {process} in {lineage}"
                )
        again = self.by_all.get(step, generation) != generation
        if again and self.there[generation] >= step:  # else all who had committed it were lost
            raise Violation(f"step {step} is computed again, though all had committed it")
        who = self.committed.setdefault((generation, step), set())
        who.add(worker)
        if who >= set(form.members):
            self.by_all[step] = generation
        return lineage

    def takes(self, process: Process, lineage: Lineage) -> None:
        """A worker has been given a state."""
        self.held[process] = lineage
        self.forgotten.discard(process)

    def living_holders(self) -> list[Process]:
        """Who has a state that counts."""
        return [p for p in self.held if p.alive and p not in self.forgotten]

    def owns(self, form: Form, worker: int, lineage: Lineage, things: Things) -> None:
        """What a worker has alone at a step: with all others of its group, all that there is."""
        there = self.owned.setdefault((form.generation, len(lineage)), {})
        there[worker] = things
        if there.keys() < set(form.members):
            return
        every = sorted(thing for each in there.values() for thing in each)
        if every != sorted(self.left_over(lineage)):
            lost, again = self.left_over(lineage) - {*every}, len(every) - len({*every})
            raise Violation(
                f"of what workers alone have at step {len(lineage)} of generation "
                f"{form.generation}, {sorted(lost)} is lost and {again} is there twice: {there}"
            )

    def left_over(self, lineage: Lineage) -> Things:
        """All that the steps of a lineage have left over."""
        steps = enumerate(lineage, 1)
        return frozenset((s, g, worker) for s, g in steps for worker in with_work(self.forms[g]))

    # ---- the ledger

    def open_ledger(self, process: Process) -> None:
        """Only one process may."""
        if self.writer is not None and self.writer.alive and self.writer is not process:
            raise Violation(f"{process} opens the ledger, which {self.writer} still has open")
        self.writer = process

    def close_ledger(self, process: Process) -> None:
        """Let another open it."""
        if self.writer is process:
            self.writer = None

    def append(self, record: Record) -> None:
        """A committed step is written."""
        if record.step != len(self.ledger) + 1:
            raise Violation(f"the ledger has {len(self.ledger)} steps, and {record} follows")
        form = self.forms[record.generation]
        where = position(record.step, self.samples, self.train.global_batch)
        units = range(self.units(record.step))
        named: dict[int, list[int]] = {unit: [] for unit in units}
        covered = 0
        for *_, worker, _, _, first, stop in record.rows:
            covered += stop - first
            for unit in units:
                low, high = positions_of(where, range(unit, unit + 1), len(units))
                if first <= low and high <= stop:
                    named[unit].append(worker)
        agreed = self.agreed[record.generation, record.step]
        rows_of = {worker for *_, worker, _, _, _, _ in record.rows}
        if (
            named != {unit: [worker] for unit, worker in agreed.items()}
            or covered != where.stop - where.first
            or rows_of != set(form.members) - set(form.servers)
        ):
            raise Violation(f"{record} is not what was computed: {agreed}")
        self.ledger.append(record)

    def mend(self, newest: int, record: Record | None) -> None:
        """As `ledger.mend`: it ends with the newest step that counts."""
        self.cut(newest)
        if newest and len(self.ledger) < newest:
            if record is None:
                raise Violation(f"nobody can write step {newest} into the ledger")
            self.append(record)

    def cut(self, step: int) -> None:
        """Take back what follows a step."""
        for record in self.ledger[step:]:
            for holder in self.living_holders():
                lineage = self.held[holder]
                if len(lineage) >= record.step and lineage[record.step - 1] == record.generation:
                    raise Violation(f"{record} is taken from the ledger, and {holder} holds it")
        del self.ledger[step:]

    # ---- the end

    def go_back(self, members: Iterable[Process]) -> int:
        """The run begins again at its newest checkpoint, since nobody holds more."""
        lineage = max(self.checkpoints, key=len, default=())
        members = set(members)
        more = [
            holder
            for holder in self.living_holders()
            if holder in members and len(self.held[holder]) > len(lineage)
        ]
        if self.replicas(self.number[holder] for holder in more):
            steps = {str(holder): len(self.held[holder]) for holder in more}
            raise Violation(f"the run goes back to step {len(lineage)}, and is held at {steps}")
        if self.writer is not None and self.writer.alive:
            raise Violation(f"the run goes back while {self.writer} has the ledger open")
        self.went_back += 1
        self.forgotten |= set(self.held)
        self.by_all = {s: g for s, g in self.by_all.items() if s <= len(lineage)}
        self.cut(len(lineage))
        return len(lineage)

    def completed(self, steps: int) -> None:
        """The run says that all is done."""
        if [record.step for record in self.ledger] != list(range(1, steps + 1)):
            raise Violation(f"the ledger of {steps} steps has {[r.step for r in self.ledger]}")
        generations = tuple(record.generation for record in self.ledger)
        last = max(self.forms)
        if missing := [n for n in self.forms[last].members if (last, n) not in self.done]:
            raise Violation(f"the run is completed, and workers {missing} are not done")
        for process, lineage in self.held.items():
            there = (last, process) in self.formed and process.code in (None, 0)
            if there and lineage != generations:
                raise Violation(f"{process} ends with {lineage}, the ledger has {generations}")
