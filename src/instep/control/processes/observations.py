"""Observations of the processes of a run, beside the events of `state.py`.

Each part of the master tells one observation after the other, and the master follows each before
the part looks further: so what is noticed next is seen in the light of what was decided before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import AnyMessage, Whereabouts
from instep.control.decisions.events import Event


@dataclass(frozen=True)
class Exit:
    """A worker's process has ended."""

    worker: int
    pid: int
    """0 if it never started."""
    code: int | None = None
    """Negative for a signal; None where it is not known."""
    host: int = 0
    place: Whereabouts | None = None
    """Its last activity, where it left a note."""


@dataclass(frozen=True)
class HangUp:
    """A connection is closed, or is to be closed: what follows is the same."""

    peer: Peer
    why: str = "it hung up"


@dataclass(frozen=True)
class LastWord:
    """A message of a process that has ended."""

    peer: Peer
    message: AnyMessage


Observation: TypeAlias = Event | Exit | HangUp | LastWord
Observations: TypeAlias = Iterator[Observation]
