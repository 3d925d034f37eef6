"""Messages by which processes of a run introduce themselves, are started, and end.

Their rules are those of `messages.py`, which has them too.
"""

from __future__ import annotations

import msgspec

from instep.comm.encryption.certificates import Credentials
from instep.comm.protocol.base_message import Message

VERSION = 11
"""Version of all control messages; both ends of a channel must have the same."""


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
    phases: dict[str, float] = msgspec.field(default_factory=dict)
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
    marks: list[Mark] = msgspec.field(default_factory=list)
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
