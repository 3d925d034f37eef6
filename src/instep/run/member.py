"""A worker's tie to its run: what it hears from the master, and what it tells.

Step records are gathered and sent a few times a second, so that a step costs
the master nothing; listening costs a step a microsecond. It knows nothing of
models or training.
"""

from __future__ import annotations

import os
import time
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from instep import spec_file
from instep.comm.channel import Channel
from instep.comm.channel_store import ChannelStore
from instep.comm.messages import Done, Emit, Failed, Form, Hello, Records, Release, Stop, Welcome
from instep.comm.metered import tcp_traffic
from instep.events import STEPS
from instep.run.launch.base import Seat

FLUSH_S = 0.25
"""How often records leave for the master."""

TRAFFIC_S = 1.0
"""How often the kernel is asked for the bytes sent and received."""


class Member:
    """One worker's membership in a run.

    Args:
        seat: where the master is.
        number: this worker's, for as long as it lives.
        phases: seconds that parts of the start took, so far.
    """

    def __init__(self, seat: Seat, number: int, phases: Mapping[str, float] | None = None) -> None:
        self.number = number
        self.master_host = seat.address.host
        self._channel = Channel.connect(seat.address)
        self._channel.send(Hello(token=seat.token, role="worker", number=number, pid=os.getpid()))
        welcome = self._channel.wait_for(Welcome)
        self.job = spec_file.build(tomllib.loads(welcome.job), source="the master")
        self.run = Path(welcome.run)
        self.started = welcome.started
        self.checkpoint = Path(welcome.checkpoint) if welcome.checkpoint else None
        self.phases = dict(phases or {})
        self.form: Form | None = None
        self._stop: Stop | None = None
        self._ledger = bytearray()
        self._steps: list[tuple[Any, ...]] = []
        self._flushed = self._metered = time.monotonic()

    def wait_for_group(self) -> Form:
        """The members of the generation that is about to begin, once all have come."""
        self.form = self._channel.wait_for(Form)
        return self.form

    def store(self) -> ChannelStore:
        """The meeting place of the present generation."""
        assert self.form is not None, "no generation yet"
        return ChannelStore(self._channel, f"generation-{self.form.generation}/")

    @property
    def stop_rule(self) -> str | None:
        """Why the master wants to stop, if it has said so; listens without waiting."""
        while (message := self._channel.poll()) is not None:
            if isinstance(message, Stop):
                self._stop = message
        return self._stop.rule if self._stop else None

    def emit(self, name: str, **fields: Any) -> None:
        """An event for the run's log, after whatever was recorded before it."""
        self.flush()
        self._channel.send(Emit(name=name, fields=fields))

    def record(self, ledger: bytes, steps: tuple[Any, ...]) -> None:
        """One committed step, for whoever watches.

        Args:
            ledger: its records, from the worker that has written them; else empty.
            steps: how long it took, values in the order of `STEPS`'s fields.
        """
        self._ledger += ledger
        self._steps.append(steps)
        if time.monotonic() - self._flushed > FLUSH_S:
            self.flush()

    def flush(self) -> None:
        """Send what has been recorded, and now and then the traffic."""
        now = time.monotonic()
        self._flushed = now
        if self._steps:
            ledger, steps = bytes(self._ledger), np.array(self._steps, STEPS).tobytes()
            self._ledger.clear()
            self._steps.clear()
            self._channel.send(Records(ledger=ledger, steps=steps))
        if now - self._metered > TRAFFIC_S:
            self.meter()

    def meter(self) -> None:
        """Tell how much has gone over the network so far."""
        self._metered = time.monotonic()
        fields = {"worker": self.number, **tcp_traffic()._asdict()}
        self._channel.send(Emit(name="traffic", fields=fields))

    def failed(self, word: Failed) -> None:
        """The last word of a worker that cannot go on."""
        self.flush()
        self._channel.send(word)

    def done(self, step: int, rule: str) -> None:
        """Say that all is done, and wait until everyone else is: peers may still read from us."""
        self.flush()
        self.meter()
        self._channel.send(Done(step=step, rule=rule))
        self._channel.wait_for(Release)

    def close(self) -> None:
        """Hang up."""
        self._channel.close()
