"""What one worker alone has: as `Engine` and `AllReduce` keep what a codec has not sent yet.

Instead of numbers there are names: each step leaves one thing over with each worker, named by
step, generation and worker. Nothing may get lost, and nothing may be there twice: that is the
law of a sum. Things lie in two slots of memory, which outlives the process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from instep.comm.protocol.messages import Form

from .groups import End, Wait

Things = frozenset[tuple[int, int, int]]


class Stamp(NamedTuple):
    """What a slot is of."""

    step: int
    generation: int


class Memory:
    """As `system.host_memory.HostMemory`."""

    def __init__(self) -> None:
        self._slots: list[tuple[Stamp, Things] | None] = [None, None]
        self._slot = 0

    def stage(self, stamp: Stamp) -> None:
        """The slot with the older contents counts for nothing from here on."""
        nothing = Stamp(-1, -1)
        kept = [each[0] if each and each[0] < stamp else nothing for each in self._slots]
        self._slot = int(kept[1] < kept[0])
        self._slots[self._slot] = None

    def staged(self, stamp: Stamp, things: Things) -> None:
        """All that was to be written is."""
        self._slots[self._slot] = stamp, things

    def stamped(self) -> list[tuple[Stamp, Things]]:
        """The newest first."""
        return sorted((each for each in self._slots if each), reverse=True)

    def clear(self) -> None:
        """What was here is of no use."""
        self._slots = [None, None]


class Own:
    """What a worker has, from one generation to the next."""

    def __init__(self, number: int, memory: Memory) -> None:
        self._number, self._memory = number, memory
        self.things: Things = frozenset()
        self._next: tuple[int, Things] | None = None
        self.made: dict[int, int] = {}
        """The last step that was committed in each generation, as `CommittedState` knows it."""
        self.tried = -1

    @property
    def start_in_doubt(self) -> int:
        """The generation whose start it is in doubt about; else -1."""
        return self._next[0] if self._next is not None else -1

    def load(self, things: Things) -> None:
        """Begin from a checkpoint."""
        self.things, self._next = things, None
        self._memory.clear()

    def resolve(self, generation: int, step: int) -> None:
        """What was handed over counts, or does not, everywhere alike."""
        if generation >= 0:
            self.made[generation] = step
        if self._next is not None and self._next[0] == generation:
            self.things = self._next[1]
        self._next = None

    def take_what_was_left(self, step: int) -> None:
        """As `Engine._take_what_was_left`."""
        for stamp, things in self._memory.stamped():
            if stamp.step == step and step <= self.made.get(stamp.generation, -1):
                self.things = things
                return

    def start(self, form: Form, end: End, step: int, point: Callable[[str], None]) -> Wait:
        """As `AllReduce._carry_over`: those that leave give theirs to the lowest other.

        Args:
            form, end: of the generation.
            step: the last that is committed.
            point: called with the name of a place at which the worker may be killed.
        """
        draining, at = set(form.draining), Stamp(step, form.generation)
        carried = self.things
        if draining:
            leaves = self._number in draining
            given = yield from end.exchange("handed over", carried if leaves else frozenset())
            taker = next(n for n in form.members if n not in draining)
            got = frozenset().union(*given) if self._number == taker else frozenset()
            carried = frozenset() if leaves else carried | got
        self._memory.stage(at)
        self._memory.staged(at, carried)
        yield from end.exchange("laid out")
        self._next = form.generation, carried
        yield from end.exchange("known")
        point("taken over")
        self.begin_step(Stamp(step + 1, form.generation))
        point("taken over")  # again: what was there before is gone by now
        self.things, self._next = carried, None
        self.made[form.generation] = step

    def begin_step(self, stamp: Stamp) -> None:
        """What is left over from here on is of this step."""
        self._memory.stage(stamp)

    def after(self, stamp: Stamp, *, works: bool) -> Things:
        """What it will have after a step, which may not happen."""
        left = {(*stamp, self._number)} if works else frozenset()
        things = self.things | left
        self._memory.staged(stamp, things)
        return things
