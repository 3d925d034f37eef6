"""`instep host`: a machine that joins a run by itself, and starts its fork server when told to.

It tries until the run is there. While it is part of a run it has one connection to the machine of
`instep run` (`gate.py`); when that breaks, all that was started here ends, and it tries again.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from instep.comm.encryption.tls import context
from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Address, Channel, why_failed
from instep.comm.protocol.connection import GIVE_UP_S
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import InstepError, JoinError, PeerError, SpecError, StrangerError
from instep.launch.gate import REFUSED
from instep.launch.join_token import ANSWER_S, credentials, refusal, stranger
from instep.launch.local import LocalLauncher
from instep.launch.node import Needs, enter

PAUSES_S = (0.2, 0.4, 0.8, 1.6, 3.0)
"""Between two attempts; the last one repeats."""

LOST_S = 60.0
"""How long a run that was lost is looked for, unless this machine stays for the next one."""

LOOK_S, HEARTBEAT_S = 0.1, 0.5


class Attends(Protocol):
    """Has this machine be a host of several runs at once, as a pool's scheduler asks for it."""

    def want(self, runs: Mapping[str, str]) -> None:
        """Be a host of these runs, and of no others; each has the address of its client."""

    def turn(self) -> Mapping[str, int]:
        """Start and end what is missing or too much; workers of each run that have not ended."""

    @property
    def leaving(self) -> bool:
        """Whether this machine will soon be gone."""


@dataclass(frozen=True)
class Machine:
    """One that joins.

    Args:
        master: where `instep run` listens.
        token_file: looked at in each attempt; the certificate is kept beside it.
        say: told what happens.
        attends: for the scheduler of a pool; None if this machine is only for one run at a time.
        wait_s: how long the first run is waited for.
    """

    master: Address
    token_file: Path
    say: Callable[[str], None]
    attends: Attends | None = None
    wait_s: float = float("inf")

    def serve(self, *, stay: bool = False) -> int:
        """Be part of a run to its end, or with `stay` of each that comes; returns how many.

        Raises:
            JoinError: it is refused, or has lost the run.
        """
        runs, deadline = 0, time.monotonic() + self.wait_s
        while True:
            channel, place = self._join(deadline)
            self.say(f"joined {self.master.host}:{self.master.port} as {place}")
            over, begun, stopped = self._take_part(channel)
            runs += over and begun
            if stopped:
                self.say("the pool, which had this started, needs it no more; its runs go on")
            if stopped or (over and not stay):
                return runs
            if over:
                self.say("the run is over; waiting for the next one")
            deadline = float("inf") if stay else time.monotonic() + LOST_S

    def _join(self, deadline: float) -> tuple[Channel, str]:
        """Try until a run is there, and say why it is not; connection and place."""
        said, where = "", f"{self.master.host}:{self.master.port}"
        for pause_s in _pauses():
            found = self._try()
            if not isinstance(found, str):
                return found
            if time.monotonic() > deadline:
                raise JoinError(
                    f"the run at {where} is gone ({found}). Start this again when it is resumed, "
                    "or stay for the next one with --stay."
                )
            if found != said:
                said = found
                self.say(f"no run at {where} yet ({found}); trying again until there is one")
            time.sleep(pause_s)
        raise AssertionError

    def _try(self) -> tuple[Channel, str] | str:
        """One attempt: connection and place; or why nobody answers."""
        try:
            return self._asked()
        except StrangerError:
            raise JoinError(stranger(self.master, self.token_file)) from None
        except (PeerError, TimeoutError, FileNotFoundError) as error:
            return why_failed(error)

    def _asked(self) -> tuple[Channel, str] | str:
        shown = credentials(self.master, self.token_file)
        channel = Channel.connect(self.master, ANSWER_S, context(shown, server=False))
        try:
            channel.send(m.Join(who=f"process {os.getpid()} of {platform.node()}"))
            answer = channel.receive(ANSWER_S)
        except (PeerError, TimeoutError):
            channel.close()
            raise
        match answer:
            case m.Joined(place=place):
                channel.give_up_after(GIVE_UP_S)
                return channel, place
            case m.Refused(text=text):
                channel.close()
                wrong = text == REFUSED
                raise JoinError(refusal(self.master, "certificate") if wrong else text)
        channel.close()
        return "it does not answer"

    def _take_part(self, channel: Channel) -> tuple[bool, bool, bool]:
        """Do as told until the run is over or lost; whether it is over, whether it had begun, and
        whether it is a pool that was stopped. Nothing is left running then, but runs of a pool."""
        local, running, begun, beat_at = LocalLauncher(lifeline=True), False, False, 0.0
        attending = _Attending(self.attends, channel)
        try:
            while True:
                for message in channel.read() if channel.wait(LOOK_S) else []:
                    match message:
                        case m.Serve():
                            detail = _start(local, message)
                            running, begun = not detail, True
                            if detail:
                                self.say(f"this machine {detail}")
                                channel.send(_ended(SpecError.exit_code, f"this machine {detail}"))
                        case m.Attend(runs=runs):
                            attending.want(runs)
                        case m.EndIfStopped():
                            local.end_if_stopped()
                        case m.Leave():
                            return True, begun, attending.asked
                if running and (code := local.ended()) is not None:
                    running = False
                    channel.send(_ended(code))
                attending.turn()
                if time.monotonic() > beat_at:
                    beat_at = time.monotonic() + HEARTBEAT_S
                    channel.send(m.Heartbeat())
        except PeerError:
            self.say("lost the pool, whose runs go on" if attending.asked else "lost the run")
            return False, begun, False
        finally:
            local.stop()
            channel.close()


class _Attending:
    """Wishes of a pool's scheduler on a connection, and answers to it."""

    def __init__(self, attends: Attends | None, channel: Channel) -> None:
        self._attends, self._channel = attends, channel
        self.asked = False
        self._told: m.Attending | None = None

    def want(self, runs: Mapping[str, str]) -> None:
        if self._attends is None:
            raise JoinError("this is a pool, in which machines stay: start this with --stay.")
        self.asked = True
        self._attends.want(runs)

    def turn(self) -> None:
        if self._attends is None or not self.asked:
            return
        found = m.Attending(workers=dict(self._attends.turn()), leaving=self._attends.leaving)
        if found != self._told:
            self._told = found
            self._channel.send(found)


def _start(local: LocalLauncher, order: m.Serve) -> str:
    """Start the fork server; what is missing for it, as a sentence without its subject."""
    needs, logs = msgspec.convert(order.needs, Needs), Path(order.logs)
    if missing := enter(needs, logs, order.run_id):
        return missing
    try:
        local.start(msgspec.convert(order.endpoint, Endpoint), logs)
    except (InstepError, OSError) as error:
        return f"cannot start processes: {error}"
    return ""


def _ended(code: int, detail: str = "") -> m.HostEnded:
    return m.HostEnded(code=code, detail=detail)


def _pauses() -> Iterator[float]:
    yield from PAUSES_S
    while True:
        yield PAUSES_S[-1]
