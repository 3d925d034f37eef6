"""Every control message, as frozen data: what the roles send each other.

A message is msgpack on the wire, tagged by its class's name; decoding checks
names and types and can make nothing but these classes. Tensors never travel
here, except as the opaque bytes of records.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

VERSION = 7
"""Of the messages below; both ends of a channel must have the same."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all messages."""


class Whereabouts(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process was when it ended, as far as it noted that (`data/samples/last_read.py`)."""

    step: int = 0
    """The step that it computed; 0 before the first."""
    dataset: str = ""
    """`training` or `validation`, of which it read a sample; empty where it read none."""
    sample: int = -1
    """Its index."""
    count: int = 1
    """How many were read in one call, of which `sample` is the first."""
    ahead: bool = False
    """Whether the process was at something else too: a thread of it read ahead."""
    file: str = ""
    """Of the sample, where that is known."""


class Mark(msgspec.Struct, frozen=True, kw_only=True):
    """A sample at which processes have ended."""

    dataset: str
    sample: int
    cause: str = ""
    """Why it is to be left out; empty where it is only suspected: then it is read by itself, and
    when somebody waits for it."""


# ---- a process introduces itself


class Hello(Message, frozen=True):
    """The first message of every process: its role and number, and the run's token to prove it."""

    token: str
    role: str
    """`worker`, `host` (the fork server that starts the others) or `client` (who submits a job,
    or asks for a change while it runs)."""
    number: int
    """Of a worker, or of a host; hosts of a run are counted from 0."""
    pid: int
    host: int = 0
    """The number of the host that started a worker."""
    machine: str = ""
    """Where its pid means something: processes that have the same can watch each other."""
    node: str = ""
    """The host name of that machine."""
    generation: int | None = None
    """The last of which a worker got a `Form`; None from a process that is new to the run."""
    resends: int = 0
    """How many of the next messages a lost master may have handled already."""
    phases: dict[str, float] = {}
    """Unix seconds at which it reached each point of its start."""
    version: int = VERSION


class Welcome(Message, frozen=True):
    """The master accepts a process: the job, and the run's folder."""

    job: str
    """The job file as run, TOML."""
    run: str
    started: float
    """Unix seconds at which the user's command began."""
    checkpoint: str = ""
    """Folder of the checkpoint that the run resumes from; empty at a beginning."""
    recovers: bool = False
    """Whether a worker that is lost is replaced, and the others continue with it."""
    complete: bool = False
    """Whether the run is over: there is nothing to do in it."""
    marks: list[Mark] = []
    """Samples at which processes have ended so far."""
    goes_on: bool = False
    """Whether other workers hold the state of the run by now."""
    role: str = "worker"
    """Of the process, as in `Form`."""


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
    """File that takes the worker's own output."""
    role: str = "worker"
    """As in `Form`."""


class Adopt(Message, frozen=True):
    """To the host: these workers live; report their exits too, though another host started them."""

    workers: list[tuple[int, int]]
    """Number and pid of each."""


class Exited(Message, frozen=True):
    """From the host: a process has ended. `code` is negative for a signal, as in `subprocess`."""

    number: int
    pid: int
    code: int | None
    """None where it was started by another host: its exit code is not known."""
    place: Whereabouts | None = None
    """Where it was, if it noted that."""
    error: str = ""
    """Why it could not be started, of which `pid` is 0; empty if it could."""


class Signal(Message, frozen=True):
    """To the host: send signals to a process that it, or one before it, has started."""

    pid: int
    signals: list[int]
    """One after the other."""


class KillAll(Message, frozen=True):
    """To the host: end every process that is left, now."""


# ---- master and client


class Interrupt(Message, frozen=True):
    """From the client: stop at the next commit; a second time, now."""

    by: str
    """Name of the signal that asks for it."""
    times: int
    """How often it was asked for by now."""


class HostWanted(Message, frozen=True):
    """To the client: these hosts have no fork server any more."""

    numbers: list[int]


class HostEnded(Message, frozen=True):
    """From the client: the process that starts workers has ended by itself."""

    code: int
    detail: str
    """The last line that it printed."""
    number: int = 0


class Scale(Message, frozen=True):
    """From a client: continue with so many workers; `Answer` answers."""

    workers: int


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


# ---- both ways, of processes that outlive their master


READING = "loading"
"""An activity of every step, in which a worker may wait for a disk; before it is ready too, at each
read of a sample."""


class Heartbeat(Message, frozen=True):
    """From a worker or host, a few times a second: it lives, and does this.

    Not counted by `Ack`, which answers it.
    """

    step: int = 0
    phase: str = ""
    progress: int = 0
    """Grows with everything it gets done: passes, gradients, batches."""
    cpu_s: float = 0.0
    """Seconds that a processor has spent on its computing and reading so far; 0.0 where the
    system does not tell."""
    steps: int = 0
    """That this process has committed."""
    stopped: list[int] = []
    """From a host: processes of workers that were stopped, as by SIGSTOP."""
    number: int = 0
    """Counts the heartbeats of a process."""


class Ack(Message, frozen=True):
    """To a worker or host: how many of its messages on this connection have taken effect."""

    count: int
    heartbeat: int = 0
    """The number of its newest heartbeat."""


# ---- master and worker: a generation and its work


class Built(Message, frozen=True):
    """From a worker: it has all that it needs, except its group."""

    recovers: bool
    """Whether it can be in one group after another, if a member is lost."""


class Form(Message, frozen=True):
    """To a worker: build the group of this generation."""

    generation: int
    rank: int
    members: list[int]
    """Worker numbers in rank order."""
    timeout_s: float = 1800.0
    """How long the members may take to find each other."""
    checkpoint: str | None = None
    """Folder of the checkpoint that all load, empty for a beginning; None where the highest
    step that a member has committed counts."""
    ends: bool = False
    """Whether a rule had the run end with that checkpoint, so that no step follows."""
    marks: list[Mark] = []
    """Samples at which processes have ended; the same for all members."""
    role: str = "worker"
    """`worker`, or `server` for a member that holds parameters for the others."""
    servers: tuple[int, ...] = ()
    """Which of the members are servers; they have the last ranks."""
    draining: tuple[int, ...] = ()
    """Which of the members leave after this generation: they get no work, and hand over what they
    own by the commit at which all leave it."""


class Formed(Message, frozen=True):
    """From a worker: it is in the group of this generation, and holds its state."""

    generation: int


class Broken(Message, frozen=True):
    """From a worker: it has left the group of this generation, and waits for the next."""

    generation: int
    cause: str = ""
    """Why the group broke, as this worker saw it; empty if its members change."""
    mine: bool = False
    """Whether the worker itself is the cause, and no connection."""
    holds: bool = False
    """Whether it holds the state of the run, of whichever generation."""


class Regroup(Message, frozen=True):
    """To a worker: leave the group of this generation at the next commit, with all others."""

    generation: int


class Notice(Message, frozen=True):
    """From a worker: its machine is about to go away."""


class StoreSet(Message, frozen=True):
    """Set a key for the others of a group that is forming."""

    key: str
    value: bytes


class StoreGet(Message, frozen=True):
    """Ask for a key; `StoreValue` answers once it is set."""

    key: str


class StoreValue(Message, frozen=True):
    """The answer to `StoreGet`."""

    key: str
    value: bytes


class Emit(Message, frozen=True):
    """From a worker: an event for the log."""

    name: str
    fields: dict[str, Any]


class Records(Message, frozen=True):
    """From a worker: what it did in the steps since the last such message."""

    ledger: bytes
    """Records of `events.LEDGER`."""
    steps: bytes
    """Records of `events.STEPS`."""


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
    """From the worker of rank 0: what the rules of `[stop]` look at; `Verdict` answers."""

    step: int
    loss: float | None = None
    """Of the step; None in the figures of a validation."""
    gradient_norm: float | None = None
    """None where it was not computed."""
    metrics: dict[str, float] = {}
    """Of a validation."""
    number: int = 0
    """Counts what one worker has asked; the answer has it too."""


class Verdict(Message, frozen=True):
    """The answer to `Figures`: the rule that fired, or an empty text to continue."""

    step: int
    rule: str
    number: int = 0


class Stop(Message, frozen=True):
    """To a worker: stop at the next commit; every worker will at the same one."""

    rule: str
    after: int | None = None
    """The step that is the last but one, wherever training stands; None if any may be the last."""


NOT_FINITE = "diverged"
"""The rule of a worker that stopped since a figure of its last step was no finite number."""

TOLD = "told"
"""The rule of a worker that stopped because the master wanted it to."""


class Done(Message, frozen=True):
    """From a worker: it has trained, and written what it had to."""

    generation: int
    step: int
    rule: str
    finite: bool = True
    """Whether its last loss was a number."""


class Release(Message, frozen=True):
    """To a worker: it is not needed any more, and may exit."""


AnyMessage: TypeAlias = (
    Hello
    | Welcome
    | Refused
    | StartWorker
    | Adopt
    | Exited
    | Signal
    | KillAll
    | Interrupt
    | HostWanted
    | HostEnded
    | Scale
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
)
"""Whatever may arrive on a channel."""

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyMessage).decode
