"""All control messages between client, master, workers and hosts, as frozen data.

A message is msgpack on the wire, tagged with the name of its class. Decoding checks names and
types, and creates only these classes. Tensors are never sent this way.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from instep.comm.protocol.base_message import Message
from instep.comm.protocol.client_messages import AddHosts as AddHosts
from instep.comm.protocol.client_messages import Answer as Answer
from instep.comm.protocol.client_messages import HostEnded as HostEnded
from instep.comm.protocol.client_messages import HostsAdded as HostsAdded
from instep.comm.protocol.client_messages import HostsJoined as HostsJoined
from instep.comm.protocol.client_messages import HostsLeave as HostsLeave
from instep.comm.protocol.client_messages import HostUnneeded as HostUnneeded
from instep.comm.protocol.client_messages import HostWanted as HostWanted
from instep.comm.protocol.client_messages import Interrupt as Interrupt
from instep.comm.protocol.client_messages import Over as Over
from instep.comm.protocol.client_messages import RemoveHosts as RemoveHosts
from instep.comm.protocol.client_messages import Scale as Scale
from instep.comm.protocol.gate_messages import Attend as Attend
from instep.comm.protocol.gate_messages import Attending as Attending
from instep.comm.protocol.gate_messages import Certified as Certified
from instep.comm.protocol.gate_messages import Certify as Certify
from instep.comm.protocol.gate_messages import EndIfStopped as EndIfStopped
from instep.comm.protocol.gate_messages import Join as Join
from instep.comm.protocol.gate_messages import Joined as Joined
from instep.comm.protocol.gate_messages import Leave as Leave
from instep.comm.protocol.gate_messages import Serve as Serve
from instep.comm.protocol.process_messages import VERSION as VERSION
from instep.comm.protocol.process_messages import Adopt as Adopt
from instep.comm.protocol.process_messages import Exited as Exited
from instep.comm.protocol.process_messages import Failed as Failed
from instep.comm.protocol.process_messages import Hello as Hello
from instep.comm.protocol.process_messages import KillAll as KillAll
from instep.comm.protocol.process_messages import Mark as Mark
from instep.comm.protocol.process_messages import Meet as Meet
from instep.comm.protocol.process_messages import Met as Met
from instep.comm.protocol.process_messages import Refused as Refused
from instep.comm.protocol.process_messages import Signal as Signal
from instep.comm.protocol.process_messages import StartWorker as StartWorker
from instep.comm.protocol.process_messages import Welcome as Welcome
from instep.comm.protocol.process_messages import Whereabouts as Whereabouts
from instep.comm.protocol.store_messages import KNOWN as KNOWN
from instep.comm.protocol.store_messages import StoreGet as StoreGet
from instep.comm.protocol.store_messages import StoreSet as StoreSet
from instep.comm.protocol.store_messages import StoreValue as StoreValue
from instep.comm.protocol.store_messages import keys_of_generation as keys_of_generation
from instep.comm.protocol.store_messages import keys_of_replica as keys_of_replica

# ---- heartbeats and acknowledgements


READING = "loading"
"""The phase of a step in which a worker may wait for a disk; before the first step, that of each
read of a sample."""

COMPILING = "compiling"
"""The phase of a process while torch compiles in it, whatever it does besides."""


class Heartbeat(Message, frozen=True):
    """From a worker or host, a few times a second: it is alive, and does this.

    `Ack` replies to it, but does not count it.
    """

    step: int = 0
    phase: str = ""
    progress: int = 0
    """Grows with all work that it completes: passes, gradients, batches."""
    cpu_s: float = 0.0
    """CPU seconds of its computing and reading so far; 0.0 if the system does not say."""
    steps: int = 0
    """Steps that this process has committed."""
    stopped: list[int] = msgspec.field(default_factory=list)
    """From a host: workers' processes that are stopped, as by SIGSTOP."""
    number: int = 0
    """Counts the heartbeats of a process."""


class Ack(Message, frozen=True):
    """To a worker or host: how many of its messages on this connection have been handled."""

    count: int
    heartbeat: int = 0
    """The number of its newest heartbeat."""


# ---- master and worker: a generation (a period in which the members do not change)


class Built(Message, frozen=True):
    """From a worker: it is ready to join a group."""

    recovers: bool
    """Whether it can join another group after a member is lost."""
    together: bool = False
    """Whether its group ends with any of its members, as with NCCL."""
    holds: bool = False
    """Whether it holds the state of the run, which an earlier process left on its host."""


class Form(Message, frozen=True):
    """To a worker: join the group of this generation."""

    generation: int
    rank: int
    members: list[int]
    """Worker numbers in rank order."""
    timeout_s: float = 1800.0
    """How long the members may take to connect to each other."""
    checkpoint: str | None = None
    """Folder of the checkpoint that all load; empty for a new run; None if the members continue
    from the highest step that one of them has committed."""
    ends: bool = False
    """Whether the run had ended with that checkpoint, so that no step follows."""
    marks: list[Mark] = msgspec.field(default_factory=list)
    """Samples at which processes have ended; the same for all members."""
    role: str = "worker"
    """`worker`, or `server` for a parameter server."""
    servers: tuple[int, ...] = ()
    """The members that are servers; they have the last ranks."""
    draining: tuple[int, ...] = ()
    """The members that leave after this generation: they get no work, and hand over their own
    state by the last commit of it."""


class Formed(Message, frozen=True):
    """From a worker: it is in the group of this generation, and has the state of the run."""

    generation: int


class Broken(Message, frozen=True):
    """From a worker: it has left the group of this generation, and waits for the next."""

    generation: int
    cause: str = ""
    """Why the group came apart, as this worker saw it; empty if its members change."""
    mine: bool = False
    """Whether the worker itself is the cause, and not a connection."""
    holds: bool = False
    """Whether it holds the state of the run, of whichever generation."""


class Regroup(Message, frozen=True):
    """To a worker: leave the group of this generation at the next commit, with all others."""

    generation: int


class Notice(Message, frozen=True):
    """From a worker: its machine will be taken away soon."""


class Emit(Message, frozen=True):
    """From a worker, or the client: an event for the log."""

    name: str
    fields: dict[str, Any]
    again: bool = False
    """Whether the worker's last process has sent it, and a master may have handled it."""


class Records(Message, frozen=True):
    """From a worker: records of its steps since the last such message."""

    ledger: bytes
    """Records of `events.LEDGER`."""
    steps: bytes
    """Records of `events.STEPS`."""
    again: bool = False
    """As of `Emit`."""


class Figures(Message, frozen=True):
    """From the worker of rank 0: figures for the rules of `[stop]`; the reply is `Verdict`."""

    step: int
    loss: float | None = None
    """Of the step; None in the figures of a validation."""
    gradient_norm: float | None = None
    """None if it was not computed."""
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    """Of a validation."""
    number: int = 0
    """Counts the requests of one worker; the reply has the same number."""


class Verdict(Message, frozen=True):
    """The reply to `Figures`: the rule that fired, or empty to continue."""

    step: int
    rule: str
    number: int = 0


class Stop(Message, frozen=True):
    """To a worker: stop at the next commit, at which all workers stop."""

    rule: str
    after: int | None = None
    """The run stops at the first step after this one; None: at the next."""


SPREAD = "spread"
NOT_FINITE = "diverged"
"""The rule of a worker that stopped because the loss or the gradient norm was not finite."""

ON_REQUEST = "told"
"""The rule of a worker that stopped because the master asked for it."""


class Done(Message, frozen=True):
    """From a worker: it has finished training and saving."""

    generation: int
    step: int
    rule: str
    finite: bool = True
    """Whether its last loss was finite."""


class Release(Message, frozen=True):
    """To a worker: it is not needed any more and may end."""


# ---- master and worker: predictions, which need no generation


PREDICTOR = "predictor"
"""The role of a worker that predicts, in its `Welcome`."""


class Predict(Message, frozen=True):
    """To each process of a replica: predict this turn, after those that it has already."""

    batches: list[int]
    """Computed side by side: one by each of the processes that split the samples. Where there are
    fewer, some processes compute the same one."""


class Predicted(Message, frozen=True):
    """From a worker: the part of this batch is in its place."""

    batch: int


# ---- preparation, whose tasks need no generation


class Carry(Message, frozen=True):
    """Between the master of a preparation and a host: a message of `prepare/messages.py`."""

    worker: int
    """Whom it is to, or from; -1: the host itself."""
    body: bytes


AnyMessage: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | StartWorker
    | Certify
    | Certified
    | Join
    | Joined
    | Meet
    | Met
    | Serve
    | EndIfStopped
    | Leave
    | Attend
    | Attending
    | Adopt
    | Exited
    | Signal
    | KillAll
    | Interrupt
    | HostWanted
    | HostUnneeded
    | HostsLeave
    | HostEnded
    | Scale
    | AddHosts
    | HostsAdded
    | HostsJoined
    | RemoveHosts
    | Answer
    | Over
    | Heartbeat
    | Ack
    | Built
    | Form
    | Formed
    | Broken
    | Regroup
    | Notice
    | StoreSet
    | StoreGet
    | StoreValue
    | Emit
    | Records
    | Failed
    | Figures
    | Verdict
    | Stop
    | Done
    | Release
    | Predict
    | Predicted
    | Carry
)
"""Everything that may arrive on a channel."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
