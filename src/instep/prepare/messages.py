"""What the master of a preparation and its workers tell each other: tasks, and their results."""

from __future__ import annotations

from typing import Any

import msgspec

from instep.data.raw import Piece
from instep.data.shards.columns import Column
from instep.data.shards.statistics import Figures
from instep.prepare.asked import Asked


class Segment(msgspec.Struct, frozen=True):
    """Some samples of a file of samples."""

    file: str
    first: int
    samples: int


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a worker."""

    asked: Asked
    folder: str
    """Where results of tasks lie."""
    on_host: bool = False
    """Whether the worker asks the master for raw files that its machine does not have."""
    sends: bool = False
    """Whether it sends the files of its results, as its machine does not have the master's folder.
    """


class Scan(msgspec.Struct, frozen=True, tag=True):
    """What a piece of a file does to the state of its reader."""

    number: int
    piece: Piece


class Head(msgspec.Struct, frozen=True, tag=True):
    """The columns of the first samples that there are, of these pieces in their order."""

    number: int
    pieces: list[Piece]


class Map(msgspec.Struct, frozen=True, tag=True):
    """Samples of the records of some pieces, into a file."""

    number: int
    key: str
    pieces: list[Piece]
    columns: list[Column]


class Again(msgspec.Struct, frozen=True, tag=True):
    """A few records once more, in another process: whether the samples are the same ones."""

    number: int
    file: str
    """Pickled (piece, place, record, digest of its samples, whether it draws) of each. In a file:
    a sender of a large message to a process that is stopped waits for it."""


class Sort(msgspec.Struct, frozen=True, tag=True):
    """The samples of one result by their numbers: of a shuffle, or of their key."""

    number: int
    key: str
    task: int
    """Which of the results in their order."""
    parts: list[Segment]
    columns: list[Column]


class Merge(msgspec.Struct, frozen=True, tag=True):
    """The samples of a range of numbers, of all sorted results."""

    number: int
    key: str
    sorted: list[str]
    """Keys of `Sort`, in the order of results."""
    first: int
    stop: int
    columns: list[Column]
    made: list[Column] = []
    """Of samples that a function has made of keys before; empty if these are the first."""


class Join(msgspec.Struct, frozen=True, tag=True):
    """A shard of the samples of other files."""

    number: int
    parts: list[Segment]
    columns: list[Column]
    to: str


class Digest(msgspec.Struct, frozen=True, tag=True):
    """The digests of blocks of samples, of shards in their order."""

    number: int
    files: list[tuple[str, int]]
    first: int
    stop: int


class Sum(msgspec.Struct, frozen=True, tag=True):
    """The CRC-32 of some bytes of a raw file."""

    number: int
    path: str
    first: int
    stop: int


Task = Scan | Head | Map | Again | Sort | Merge | Join | Digest | Sum

NEAR = (Again, Sort, Merge, Join, Digest, Sum)
"""Tasks that read results of others: only for a machine that has the master's folder."""


class Mapped(msgspec.Struct, kw_only=True):
    """The result of a `Map`; the file beside its samples has it too."""

    key: str
    samples: int
    bytes: int
    records: int
    bad: int
    """Records without a sample; `KEY.bad` has them."""
    only_bad: dict[str, int] = {}
    """Files of which the task has bad records alone, with how many."""
    columns: list[Column]
    figures: list[Figures]
    parts: list[Segment]
    """Where the samples are, in their order."""
    crc32: int
    """Of the file of samples."""
    crc32_bad: int = 0
    """Of `KEY.bad`."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """A task's result."""

    number: int
    value: Any = None
    again: str = ""
    """The file of an `Again`."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A task cannot be done: the error that ends the command."""

    number: int
    kind: str
    """A class of `errors.py`."""
    text: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """A sign of life."""

    where: str = ""
    """Where it reads."""
    records: int = 0
    """Records of its present task so far."""


# ---- workers on hosts


class Look(msgspec.Struct, frozen=True, tag=True):
    """To the master: what is this raw file like? The reply is `Looked`."""

    path: str


class Looked(msgspec.Struct, frozen=True, tag=True):
    """A raw file: one at the same path that is the same in all of this is the same file."""

    size: int
    modified_ns: int
    digest: bytes
    """Digest of some of its bytes (`files.digest_of`); empty if the master cannot read it."""


class Get(msgspec.Struct, frozen=True, tag=True):
    """To the master: bytes of a raw file. The reply is `Got`."""

    path: str
    first: int
    size: int


class Got(msgspec.Struct, frozen=True, tag=True):
    """Bytes of a raw file; none: it ends there, or cannot be read."""

    data: bytes


class Part(msgspec.Struct, frozen=True, tag=True):
    """To the master: the next bytes of a file of a result."""

    data: bytes


class Sent(msgspec.Struct, frozen=True, tag=True):
    """To the master: the parts since the last such message are the whole of a file."""

    name: str
    bytes: int
    crc32: int


class HostSetup(msgspec.Struct, frozen=True, tag=True):
    """To a host, the first message."""

    setup: Setup
    workers: int
    """How many it is to have; 0: one for each processor."""
    mark: str
    """The text of the file `folder.MARK`, by which a host knows whether it sees the folder."""
    files: dict[str, str]
    """The files that a host needs, such as that of the user's function, with their hashes."""


class HostReady(msgspec.Struct, frozen=True, tag=True):
    """From a host: it has so many workers."""

    workers: int
    sees: bool
    """Whether it sees the folder of results."""


ITSELF = -1
"""In the place of a worker's number: the host."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """From a host: a worker has ended, and its task is to be given to another."""

    worker: int
    how: str
    printed: str = ""
    """The last line that it printed."""


Answer = Done | Failed | Beat

FromWorker = Done | Failed | Beat | Look | Get | Part | Sent

ToWorker = Scan | Head | Map | Again | Sort | Merge | Join | Digest | Sum | Looked | Got

FromHost = HostReady | Lost | Failed
