"""Facts that a plan needs of a stream: it is read for them once in a run.

Ways in: `counted`, `mean_lengths`.
"""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from instep.data.loader import Loader, Slice
from instep.data.reading.streams.mixed import AnyStream
from instep.data.reading.streams.stream import LENGTHS, TOKENS
from instep.data.torch_loader import LoaderParts
from instep.job.spec import JobSpec
from instep.plain_file import replace_plain

FOLDER = "streams"
"""In the run's folder, for what the processes of a run know of its streams."""


def read_as(parts: LoaderParts, stream: AnyStream) -> LoaderParts:
    """A stream in the place of what the user gave."""
    return parts._replace(dataset=stream, worker_init=None)


def counted(job: JobSpec, parts: LoaderParts, stream: AnyStream, folder: Path | None) -> list[int]:
    """Samples of each part, counted here or by an earlier process of the run.

    Args:
        job: of the run.
        parts: as the user gave it.
        stream: the same, of unknown length.
        folder: where processes of the run tell each other; None for nowhere.
    """
    if (known := _told(folder, "lengths", stream.plan.parts)) is not None:
        return known
    found: list[int] = []
    with closing(_loader(job, parts, stream)) as loader:
        while not found:
            found = loader.ask(Slice(*LENGTHS))
    return _tell(folder, "lengths", found)


def mean_lengths(
    job: JobSpec, parts: LoaderParts, stream: AnyStream, folder: Path | None, streams: int
) -> list[float]:
    """Mean length of the first samples of each stream of a mixture; 0 where it has none.

    Args:
        job, parts, stream, folder: as for `counted`.
        streams: how many there are.
    """
    if (known := _told(folder, "tokens", streams)) is not None:
        return known
    with closing(_loader(job, parts, stream)) as loader:
        return _tell(folder, "tokens", loader.ask(Slice(*TOKENS)))


def _loader(job: JobSpec, parts: LoaderParts, stream: AnyStream) -> Loader:
    return Loader.of_job(job, read_as(parts, stream), "training", say=lambda text: None)


def _told(folder: Path | None, name: str, count: int) -> list[Any] | None:
    if folder is not None:
        with suppress(OSError, msgspec.MsgspecError):
            known = msgspec.json.decode((folder / name).read_bytes(), type=list[int | float])
            if len(known) == count:
                return known
    return None


def _tell(folder: Path | None, name: str, found: list[Any]) -> list[Any]:
    if folder is not None:
        with suppress(OSError):
            folder.mkdir(exist_ok=True)
            replace_plain(folder / name, msgspec.json.encode(found))
    return found
