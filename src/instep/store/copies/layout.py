"""The parts of a copy of a checkpoint, and how it is known to be whole.

    COPIES/NAME-1a2b3c4d/                      one run: its job's name, and the start of its id
        step-00000500-9f8e7d6c/                one checkpoint: its step, the start of its hash
            model.safetensors, ...             the files of the checkpoint
            manifest.json                      as it is in the run
            copy.json                          written last: no copy without it, and no half of one
        records/SHA256                         blocks of the run's other files
        copied-by/                             who copies (`claim.py`)

The records are what resuming reads beside a checkpoint: they only grow, so that most blocks are
there already. No object is ever written with other bytes than before, and so nothing depends on
whether a file system can rename. Ways in: `base_of`, `Copy`, `encode`, `decode`.
"""

from __future__ import annotations

import hashlib
import json
import re
from fnmatch import fnmatchcase
from pathlib import Path

import msgspec

from instep.errors import CheckpointError
from instep.formats import FORMAT, INSTEP, other_format
from instep.job.spec import JobSpec
from instep.store.folder import RESUMED_FROM, run_id
from instep.words import is_url

COPY = "copy.json"
RECORDS = "records"
BLOCK = 4 << 20
"""Bytes of a block of records; the last one of a file has fewer."""

COPIED = (*RESUMED_FROM, "contents-*.bin", "huggingface/*.json")
"""The files of a run, beside a checkpoint, that are copied."""

NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}", re.ASCII)
"""How the folder of a copy is called."""

_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


class RecordBlock(msgspec.Struct, frozen=True, array_like=True):
    """Bytes of a file: the object `records/SHA256`."""

    sha256: str
    size: int


class Copy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of `copy.json`."""

    format: int = FORMAT
    instep: str = INSTEP
    step: int
    manifest: str
    """SHA-256 of the checkpoint's manifest, which has those of its files."""
    records: dict[str, list[RecordBlock]]


def base_of(job: JobSpec, run: Path) -> str:
    """The URL of a run's copies."""
    return f"{url_of(job.checkpoint.copy_to)}/{job.name}-{run_id(run)[:8]}"


def url_of(place: str) -> str:
    """The URL of a place, which may be a folder of this machine."""
    return place.rstrip("/") if is_url(place) else f"file://{Path(place).expanduser().absolute()}"


def name_of(step: int, manifest: bytes) -> str:
    """The name of a checkpoint's copy, which no other checkpoint of that step has."""
    return f"step-{step:08d}-{hashlib.sha256(manifest).hexdigest()[:8]}"


def step_of(name: str) -> int | None:
    """The step of the copy with this name; None for the name of something else."""
    found = NAME.fullmatch(name)
    return int(found[1]) if found else None


def encode(copy: Copy) -> bytes:
    """The bytes of `copy.json`: a line, and the SHA-256 of it."""
    line = msgspec.json.encode(copy) + b"\n"
    return line + hashlib.sha256(line).hexdigest().encode() + b"\n"


def is_intact(data: bytes) -> bool:
    """Whether these are the bytes of a `copy.json`, of whatever format, to their end."""
    line, _, digest = data.partition(b"\n")
    return digest.strip() == hashlib.sha256(line + b"\n").hexdigest().encode()


def decode(data: bytes, source: str) -> Copy:
    """Read the bytes of `copy.json`.

    Raises:
        CheckpointError: damaged, cut short, or of another format.
    """
    if not is_intact(data):
        raise CheckpointError(f"{source} is damaged: its checksum does not fit its text.")
    try:
        table = json.loads(data.partition(b"\n")[0])
        found = table.get("format") if isinstance(table, dict) else None
        if type(found) is int and found != FORMAT:
            raise CheckpointError(other_format(source, found, table.get("instep")))
        copy = msgspec.convert(table, Copy)
    except (ValueError, msgspec.ValidationError) as error:
        raise CheckpointError(f"{source} is no page of a copy: {error}.") from None
    for name, blocks in copy.records.items():
        known = any(fnmatchcase(name, each) for each in COPIED) and ".." not in name
        if not known or not all(_SHA256.fullmatch(each.sha256) for each in blocks):
            raise CheckpointError(f"{source} lists {name!r}, which no copy has.")
    return copy
