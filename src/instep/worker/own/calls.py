"""What the user's code between two steps has done, so that a worker that comes later can do it too.

A worker that takes another's place runs the script from its top. The code between the
last commit and the next step may talk (`session.sum`), and the others may be past it. So
results are kept, by the section of the code in which they were made. Who comes to the same call
later is answered from there. All processes make the same calls in the same order; so of two
members the one with more results has all that the other has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from instep.comm.base import Comm
from instep.engine.sections import Sections
from instep.errors import SpecError
from instep.state.broadcast import broadcast_snapshot
from instep.state.packing import pack_state, unpack_state
from instep.state.snapshot import Snapshot
from instep.worker.own.evaluation import EvaluationPiece, exchange

EVALUATION = "the loop over an evaluation loader"
"""The call with which an evaluation begins; its result is how many parts it has."""


class UserCall(NamedTuple):
    """One call of the user's code."""

    name: str
    """Such as `session.sum`."""
    result: Any
    """The same on every process: numbers, tensors, and lists and dicts of them."""


class UserCalls(Sections[list[UserCall]]):
    """The calls since the last commit, and at which of them this process is."""

    def __init__(self) -> None:
        super().__init__()
        self._part = ""  # of an evaluation that this process is in, by its call
        self.part = 0
        """Which part of the evaluation under way this process has."""
        self._given: tuple[str, int] = ("", 0)

    def answered(self, name: str) -> UserCall | None:
        """The result of the present call, if it is known; the next call is the one after.

        Raises:
            SpecError: another call has been made in this place.
        """
        done = self.done.get(self._section, [])
        if self._at >= len(done):
            return None
        call = done[self._at]
        if call.name != name:
            raise SpecError(
                f"{name} was called where the other processes called {call.name}: every process "
                "needs to make the same calls in the same order."
            )
        self._at += 1
        return call

    def add(self, call: UserCall) -> None:
        """The present call has its result."""
        self.done.setdefault(self._section, []).append(call)
        self._at += 1

    @property
    def count(self) -> int:
        """Calls with a result."""
        return sum(map(len, self.done.values()))

    # ---- parts of an evaluation

    def take_part(self, rank: int) -> int:
        """Which part of the evaluation this process has whose begin was the last call.

        Args:
            rank: the part of a process that begins together with all others.
        """
        self._part = self._key(self._section, self._at - 1)
        given, part = self._given
        self.part = part if given == self._part else rank
        return self.part

    @staticmethod
    def _key(section: str, number: int) -> str:
        return f"{section}: {number}"

    def _evaluations(self) -> Iterator[tuple[str, int]]:
        """The begin of each, and how many parts it has."""
        for section, calls in self.done.items():
            for number, call in enumerate(calls):
                if call.name == EVALUATION:
                    yield self._key(section, number), int(call.result)

    # ---- a generation

    def agree(self, comm: Comm, step: int, device: torch.device) -> None:
        """Give those that lack results those of the others; every member of a generation calls it.

        Raises:
            PeerError: a member went away meanwhile.
        """
        if comm.size == 1:
            return
        counts = torch.zeros(comm.size, dtype=torch.int64, device=device)
        counts[comm.rank] = self.count
        comm.all_reduce(counts).wait()
        most = int(counts.max())
        if int(counts.min()) < most:
            self._take(comm, counts.tolist().index(most), step, device)
        self._deal_parts(comm, device)

    def _take(self, comm: Comm, root: int, step: int, device: torch.device) -> None:
        mine = None
        if comm.rank == root:
            plain = {name: [list(call) for call in calls] for name, calls in self.done.items()}
            tensors, facts = pack_state(plain)
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
            mine = Snapshot(step=step, tensors={"calls": tensors}, facts={"calls": facts})
        taken = broadcast_snapshot(mine, comm, root, device)
        if comm.rank != root:
            tensors = {name: tensor.cpu() for name, tensor in taken.tensors["calls"].items()}
            log = unpack_state(tensors, taken.facts["calls"])
            self.done = {name: [UserCall(*call) for call in calls] for name, calls in log.items()}

    def _deal_parts(self, comm: Comm, device: torch.device) -> None:
        """In the evaluation that is under way, newcomers have the parts that were lost."""
        key, parts = ([("", 0), *self._evaluations()])[-1]
        held = torch.zeros(comm.size, dtype=torch.int64, device=device)
        held[comm.rank] = 1 + self.part if key and self._part == key else 0
        comm.all_reduce(held).wait()
        free = iter(sorted(set(range(max(parts, comm.size))) - {n - 1 for n in held.tolist()}))
        for rank, number in enumerate(held.tolist()):
            part = number - 1 if number else next(free)
            if rank == comm.rank:
                self._given = key, part


class Waits:
    """Where this process waits for the others; so that a wait in vain has a cause with a name."""

    def __init__(self) -> None:
        self._done = 0  # calls of all processes since the last commit, or since the group formed
        self._now: tuple[int, int, str] | None = None  # the last commit, `_done`, and the call

    def commit(self) -> None:
        """A step counts."""
        self._done = 0

    @contextmanager
    def call(self, name: str, step: int) -> Iterator[None]:
        """All processes are in this call at the same time, after the commit of this step."""
        self._now = step, self._done, name
        yield
        self._now, self._done = None, self._done + 1

    def compare(self, comm: Comm, device: torch.device) -> None:
        """Look whether the last group came apart since processes waited in different calls.

        Of two that had come equally far, that can only be where their code is not alike. Every
        member of the new group calls this.

        Raises:
            SpecError: they waited in different calls.
            PeerError: a member went away meanwhile.
        """
        text = json.dumps(self._now).encode()
        own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        every = exchange(comm, device, "a new group", EvaluationPiece(0, [own]))
        self._now, self._done = None, 0
        waited = dict[tuple[int, int], tuple[int, str]]()
        for rank, piece in enumerate(every):
            found = json.loads(bytes(piece.leaves[0].numpy()))
            if found is None:
                continue
            step, done, name = found
            other, called = waited.setdefault((step, done), (rank, name))
            if called != name:
                raise SpecError(
                    f"process {other} waited in {called} while process {rank} waited in {name}: "
                    "every process needs to make the same calls in the same order."
                )
