"""One process that reads, as the process that started it sees it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec

from instep.comm.protocol.messages import Whereabouts
from instep.data.reading.fetch import Fetch, Slice
from instep.data.reading.process import STOP, Reply, Slot, Task, receive
from instep.data.reading.stuck import HUNG_S, IDLE_S, LOOK_S, StuckWatch
from instep.data.reading.template import Say
from instep.data.reading.threads import ask_stack, deepest_line
from instep.data.samples import last_read
from instep.data.samples.last_read import describe_read, is_reading
from instep.data.samples.unreadable import MAX_CRASHES, SKIP_HINT
from instep.errors import DataError

SLOTS = 2
"""Batches that each process may be ahead."""

_MAX_LOST = 5
"""Processes in a row that may die on one slice: the next would meet the same."""

_GRACE_S = 1.0
"""How long `close` waits for a process in the middle of a slice before it kills it."""


class Stuck(Exception):
    """A loader process can never go on; the text says where it waits."""


class NoFork(Exception):
    """No process can be forked any more in which nothing has read; the text says why."""


class LoaderProcess:
    """A process that reads what it is asked for; another takes its place when it dies."""

    def __init__(
        self,
        fork: Callable[[int, Connection, list[int]], int],
        ending: Callable[[int], tuple[str, Whereabouts | None]],
        reads: Callable[[int], Whereabouts | None],
        number: int,
        fetch: Fetch,
        say: Say,
    ) -> None:
        self._fork, self._ending_of, self._number, self._fetch = fork, ending, number, fetch
        self._reads, self._named = reads, False
        self._say, self._stack = say, last_read.memory_file()
        self._slots = [Slot() for _ in range(SLOTS)]
        self._outstanding: dict[int, Task] = {}
        self._lost = 0  # processes that have died since the last reply
        self._crashes: dict[int, int] = {}  # how many of them, by the sample that they read
        self._ending = ""
        self._start()

    @property
    def has_room(self) -> bool:
        return len(self._outstanding) < SLOTS

    def post(self, ticket: int, part: Slice) -> None:
        used = {task.slot for task in self._outstanding.values()}
        slot = next(number for number in range(SLOTS) if number not in used)
        self._outstanding[ticket] = Task(ticket, slot, part)
        self._send(self._outstanding[ticket])

    def receive(self) -> tuple[Reply, Slot]:
        """The next reply, and where its tensors are until the next `post`."""
        while (body := self._message()) is None:
            self._replace()
        self._clear_suspects()
        reply = msgspec.msgpack.decode(body, type=Reply)
        return reply, self._slots[self._outstanding.pop(reply.ticket).slot]

    def _message(self) -> bytes | None:
        watch = StuckWatch()
        while not self._connection.poll(LOOK_S):
            found = watch.turn(self.pid, time.monotonic(), self._reads(self.pid))
            if self._fetch.waits and found != "stuck":
                continue
            match found:
                case "stuck":
                    raise Stuck(f"it waits for a lock that no thread of it holds{self._place()}")
                case "hung":
                    raise Stuck(f"it has waited for {HUNG_S:g} s in one read{self._place()}")
                case "idle" if not self._named:
                    self._named = True  # of slow storage once is enough
                    self._say(
                        f"loader process {self.pid} has waited for {IDLE_S:g} s{self._place()}. If "
                        "that never ends, set data.loaders = 0."
                    )
        return receive(self._connection)

    def _place(self) -> str:
        """Where its thread is, as the end of a sentence."""
        line = deepest_line(ask_stack(self.pid, self._stack))
        return f" ({line})" if line else ""

    def start_again(self) -> None:
        """Start another process for the same slices, after the one before was killed."""
        self._ending_of(self.pid)
        self._lost, self._ending = 0, ""
        self._connection.close()
        self._start()
        for task in self._outstanding.values():
            self._send(task)

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(STOP)

    def end(self) -> None:
        if not self._ending:
            try:
                while self._connection.poll(_GRACE_S):
                    self._connection.recv_bytes()
                os.kill(self.pid, signal.SIGKILL)
            except (EOFError, OSError):
                pass
            self._ending_of(self.pid)
        self._release()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        try:
            files = [self._stack, *(slot.file for slot in self._slots)]
            self.pid = self._fork(self._number, theirs, files)
        except DataError:
            self._ending = "could not be started"
            self._release()
            raise
        finally:
            theirs.close()

    def _release(self) -> None:
        self._connection.close()
        for slot in self._slots:
            slot.close()
        if self._stack >= 0:
            os.close(self._stack)
        self._stack = -1

    def _clear_suspects(self) -> None:
        """A slice was read: samples suspected of crashes before it did not cause them."""
        self._lost = 0
        for sample in self._crashes:
            self._fetch.note(sample, None)
        self._crashes.clear()

    def _count_crash(self, place: Whereabouts) -> None:
        """Count a crash at a sample; at the third, skip the sample or raise."""
        sample = place.sample
        self._fetch.note(sample, "")  # from now on it is read alone
        # of many in one call it may have been another
        self._crashes[sample] = 0 if place.count > 1 else self._crashes.get(sample, 0) + 1
        if (times := self._crashes[sample]) < MAX_CRASHES:
            return
        if not self._fetch.skip:
            memory = " Memory may have run out." if "SIGKILL" in self._ending else ""
            raise DataError(
                f"a loader process (pid {self.pid}) {self._ending} {describe_read(place)}."
                f"{memory} It happened {times} times at this sample.{SKIP_HINT}"
            )
        self._fetch.note(sample, f"each of {times} processes that read it {self._ending}")
        del self._crashes[sample]
        self._lost = 0

    def _replace(self) -> None:
        self._lost += 1
        if not self._ending:
            self._ending, place = self._ending_of(self.pid)
            if is_reading(place):
                self._count_crash(place)
        if self._lost >= _MAX_LOST:
            part = min(self._outstanding.values(), key=lambda task: task.ticket).part
            positions = f"positions {part.first} to {part.stop - 1} of epoch {part.epoch + 1}"
            which = "the first samples" if part.epoch < 0 else f"the samples at {positions}"
            raise DataError(
                f"{self._lost} loader processes in a row died while they read {which}; the last "
                f"(pid {self.pid}) {self._ending}. SIGKILL often means that memory ran out: set "
                "data.loaders to 0 or to a smaller number."
            )
        self._ending = ""
        self._connection.close()
        self._start()
        for task in self._outstanding.values():
            self._send(task)

    def _send(self, task: Task) -> None:
        task.marks, task.changes = self._fetch.marks, self._fetch.told.changes
        with contextlib.suppress(OSError):  # `receive` notices
            self._connection.send_bytes(msgspec.msgpack.encode(task))
