"""All control messages between client, master, workers and hosts, as frozen data.

A message is msgpack on the wire, tagged with the name of its class. Decoding checks names and
types, and creates only these classes. Tensors are never sent this way.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from instep.comm.encryption.certificates import Credentials
from instep.comm.protocol.gate_messages import Attend as Attend
from instep.comm.protocol.gate_messages import Attending as Attending
from instep.comm.protocol.gate_messages import Certified as Certified
from instep.comm.protocol.gate_messages import Certify as Certify
from instep.comm.protocol.gate_messages import EndIfStopped as EndIfStopped
from instep.comm.protocol.gate_messages import Join as Join
from instep.comm.protocol.gate_messages import Joined as Joined
from instep.comm.protocol.gate_messages import Leave as Leave
from instep.comm.protocol.gate_messages import Serve as Serve

VERSION = 11
"""Version of the messages below; both ends of a channel must have the same."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """What a process was doing when it ended, as far as is known (`data/samples/last_read.py`)."""

    step: int = 0
    """The step that it computed; 0 before the first."""
    dataset: str = ""
    """`training` or `validation`, of which it read a sample; empty if it read none."""
    sample: int = -1
    """Index of the sample."""
    count: int = 1
    """How many samples were read in one call, from `sample` on."""
    ahead: bool = False
    """Whether a thread read ahead, so that the process was doing something else too."""
    file: str = ""
    """Of the sample, if it is known."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A sample at which processes have ended."""

    dataset: str
    sample: int
    cause: str = ""
    """Why it is skipped; empty if it is only suspected: then it is read alone, and not ahead."""


# ---- a process introduces itself


class Hello(Message, frozen=True):
    """The first message of every process: its role and number, and the run's token as proof."""

    token: str
    role: str
    """`worker`, `host` (the fork server, a process per host that forks the workers), or `client`
    (submits a job, or changes a running one)."""
    number: int
    """Of a worker, or of a host; hosts are counted from 0."""
    pid: int
    host: int = 0
    """The number of the host that started a worker."""
    machine: str = ""
    """Identifies the machine and pid namespace: processes with the same can watch each other."""
    node: str = ""
    """The host name of that machine."""
    generation: int | None = None
    """The last for which a worker got a `Form`; None from a process that is new to the run."""
    resends: int = 0
    """How many of the next messages the previous master may have handled already."""
    phases: dict[str, float] = {}
    """Unix seconds at which it reached each phase of its start."""
    version: int = VERSION


class Welcome(Message, frozen=True):
    """The master accepts a process: the job, and the run's folder."""

    job: str
    """The job file as run, TOML."""
    run: str
    started: float
    """Unix seconds at which the user's command began."""
    run_id: str = ""
    """By which a process knows whether it sees that folder; empty where all do."""
    last_step: int = 0
    """The last of a run that is complete."""
    checkpoint: str = ""
    """Folder of the checkpoint that the run resumes from; empty for a new run."""
    recovers: bool = False
    """Whether a lost worker is replaced, and the others continue."""
    complete: bool = False
    """Whether the run is complete, so that there is nothing to do."""
    marks: list[Mark] = []
    """Samples at which processes have ended so far."""
    others_have_state: bool = False
    """Whether other workers already have the state of the run."""
    role: str = "worker"
    """Of the process, as in `Form`."""
    restarts: int = 0
    """How often its replica was started again; the same for all processes that may meet."""
    known: bytes = b""
    """What earlier processes left under the key `KNOWN`."""


class Refused(Message, frozen=True):
    """Instead of a welcome: the run cannot begin or resume."""

    kind: str
    """Name of the error class, as in `Failed`."""
    text: str
    exit_code: int


# ---- master and host: processes


class StartWorker(Message, frozen=True):
    """To the host: start a worker under this number."""

    number: int
    log: str
    """File for the worker's own output."""
    role: str = "worker"
    """As in `Form`."""
    credentials: Credentials | None = None
    """What it is to show; None where connections are not encrypted."""


class Meet(Message, frozen=True):
    """To process 0 of `instep.join`, from another process that looks for its run."""

    token: str


class Met(Message, frozen=True):
    """The answer: it may read and leave notes, by `StoreGet` and `StoreSet`."""

    start: str
    """What tells the start of process 0 from others."""
    versions: dict[str, str]
    """Of process 0."""


class Adopt(Message, frozen=True):
    """To the host: report the ends of these workers too, which an earlier fork server started."""

    workers: list[tuple[int, int]]
    """Number and pid of each."""


class Exited(Message, frozen=True):
    """From the host: a process has ended. `code` is negative for a signal, as in `subprocess`."""

    number: int
    pid: int
    code: int | None
    """None if an earlier fork server started it, so that its exit code is not known."""
    place: Whereabouts | None = None
    """What it was doing, if that is known."""
    error: str = ""
    """Why it could not be started (`pid` is 0 then); empty if it was."""


class Signal(Message, frozen=True):
    """To the host: send signals to a process that it, or an earlier fork server, has started."""

    pid: int
    signals: list[int]
    """In this order."""


class KillAll(Message, frozen=True):
    """To the host: kill all remaining processes."""


# ---- master and client


class Interrupt(Message, frozen=True):
    """From the client: stop at the next commit; a second time, now."""

    by: str
    """Name of the signal that the client got."""
    times: int
    """How many signals it has got so far."""


class HostWanted(Message, frozen=True):
    """To the client: start fork servers on these hosts, which have none any more."""

    numbers: list[int]


class HostUnneeded(Message, frozen=True):
    """To the client: this host has no workers, and the run can do without it; it may be ended."""

    number: int


class HostsLeave(Message, frozen=True):
    """From the client: the machines of these hosts, and of no others, are about to go."""

    numbers: list[int]


class HostEnded(Message, frozen=True):
    """From the client: a fork server has ended by itself."""

    code: int
    detail: str
    """The last line that it printed."""
    number: int = 0


class Scale(Message, frozen=True):
    """From a client: change the number of workers; the reply is `Answer`."""

    workers: int
    places: list[int] | None = None
    """Workers that there is room for, by host; None: they may be on any."""


class AddHosts(Message, frozen=True):
    """From a client: it has hosts for the run; the reply is `HostsAdded`."""

    count: int
    workers: int
    """How many workers more the run is to have while they are there."""


class HostsAdded(Message, frozen=True):
    """To that client: what its hosts are called, and what they show.

    For as long as they are there it has a connection of its own, as a client of number `client`.
    """

    refusal: str = ""
    """Why the run cannot have them; empty if it can."""
    numbers: list[int] = []
    credentials: list[Credentials] = []
    """Of each host; empty where connections are not encrypted."""
    client: int = 0
    own: Credentials | None = None
    """What the client itself shows."""
    folder: str = ""
    """Where the run was started."""


class HostsJoined(Message, frozen=True):
    """To that client: the run has more workers now; or nothing yet, as all hosts are late."""

    workers: int
    missing: list[int]
    """Hosts that have not connected."""


class RemoveHosts(Message, frozen=True):
    """From that client: its hosts are about to go; the reply is `Leave`, once they may."""


class Answer(Message, frozen=True):
    """To a client: why its request is refused; empty if it is accepted."""

    refusal: str


class Over(Message, frozen=True):
    """To the client: how the run ended."""

    outcome: str
    rule: str
    step: int
    exit_code: int
    worker: int | None = None
    """The worker that failed, if one did."""
    failed: Failed | None = None


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
    stopped: list[int] = []
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
    marks: list[Mark] = []
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


def keys_of_generation(generation: int | None = None) -> str:
    """The prefix of the keys by which the members of a generation connect, or those of all."""
    return "generation-" if generation is None else f"generation-{generation}/"


def keys_of_replica(replica: int, restarts: int | None = None) -> str:
    """The prefix of the keys by which the processes of a replica connect, or of all its starts."""
    start = f"replica-{replica}-"
    return start if restarts is None else f"{start}{restarts}/"


KNOWN = "known"
"""The key of what is found out once, for all processes of the run."""


class StoreSet(Message, frozen=True):
    """Set a key for the other members of a group that is forming."""

    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Ask for a key; the reply is `StoreValue`, once it is set."""

    key: str
    known: int = 0
    """How many keys with the same beginning, up to the last `/`, the asker has got already."""


class StoreValue(Message, frozen=True):
    """The reply to `StoreGet`."""

    key: str
    value: bytes
    more: dict[str, bytes] = {}
    """What else was set since the asker got something, of keys with the same beginning."""


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


class Failed(Message, frozen=True):
    """From a worker, its last message: it cannot continue."""

    kind: str
    """Name of the error class: `RecipeError`, `PeerError`, ... or `error` for the user's code."""
    cause: str
    where: str
    line: str
    step: int
    phase: str
    exit_code: int


class Figures(Message, frozen=True):
    """From the worker of rank 0: figures for the rules of `[stop]`; the reply is `Verdict`."""

    step: int
    loss: float | None = None
    """Of the step; None in the figures of a validation."""
    gradient_norm: float | None = None
    """None if it was not computed."""
    metrics: dict[str, float] = {}
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
