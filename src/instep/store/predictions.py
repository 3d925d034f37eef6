"""The folder of predictions that are being made: a part for each batch, and what was asked for.

A part is written under another name and then renamed, so it is there whole or not at all, and
a worker that predicts the batch again puts the same bytes there. The folder is kept until the parts
are one file, so a command that was interrupted is taken up. How parts become one file is in
`joined.py`. Nothing here knows processes, models or torch. Way in: `Predictions`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from instep.errors import RunError, SpecError
from instep.plain_file import plain, read_plain, replace_plain
from instep.store.own_files import lock, open_own, unlock
from instep.undecodable import UNDECODABLE
from instep.words import plural

FORMATS = (".safetensors", ".npz", ".jsonl")
"""What the file of predictions may be, by its suffix."""

SHARDS = ""
"""The suffix of a folder of shards."""

COPY = "model.safetensors"
"""The copy of a checkpoint's model: a run that continues may delete the checkpoint."""

_PLAN, _DATASET, _LOCK = "plan.json", "dataset.json", "lock"
_PART = re.compile(r"batch-(\d{8,})\.part", re.ASCII)
_CHANGED = {
    "recipe_sha256": "the recipe's file",
    "data_sha256": "the file of --data",
    "model_sha256": "the model's file",
    "format": "the suffix of --out",
    "job": "a value of the job",
}


class Damaged(Exception):
    """A part is not what was written; `args[0]` is the number of its batch."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What decides the numbers: a command with the same plan makes the same file."""

    of: str
    """The run folder or model file that was named."""
    model: str
    """The file that is loaded."""
    model_sha256: str
    step: int | None
    """Of the checkpoint that the model is from, if it is from one."""
    data: str
    """`file.py:function`, absolute."""
    data_sha256: str
    recipe_sha256: str
    batch: int
    """Samples of a batch."""
    format: str
    """One of `FORMATS`."""
    job: dict[str, Any]
    """Those parts of the job that decide numbers."""
    versions: dict[str, str]

    def differs(self, other: Plan) -> str:
        """What is not the same in two plans, in words; empty if they make the same file."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs and name not in ("model", "step"):
                named = _CHANGED.get(name)
                return f"{named} is another one" if named else f"{name} was {theirs}"
        return ""


class Part(NamedTuple):
    """A part that was read: the predictions of one batch."""

    head: dict[str, Any]
    """`first` and `stop` of the samples, `skipped` (pairs of sample and cause), and `columns`: of
    each output its type, the shape of a row, and where it begins in `body`."""
    body: bytes

    @property
    def rows(self) -> int:
        """Samples that have a row."""
        return int(self.head["stop"] - self.head["first"] - len(self.head["skipped"]))


class Predictions:
    """The folder beside the file that is asked for.

    Args:
        out: that file; the folder has its name and `.parts`.
    """

    def __init__(self, out: Path) -> None:
        self.out, self.path = out, out.with_name(f"{out.name}.parts")

    @classmethod
    def at(cls, folder: Path) -> Predictions:
        """The same, from the folder's path."""
        return cls(folder.with_name(folder.name.removesuffix(".parts")))

    # ---- the command

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder if it is missing, and lock it for as long as the context lasts.

        Raises:
            RunError: another process has locked it, or it cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            file = open_own(self.path / _LOCK)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror}. Choose another --out."
            ) from None
        with file:
            if not lock(file):
                raise RunError(
                    f"another command writes {self.out} at the moment. Wait for its end, stop it "
                    "there with Ctrl-C, or choose another --out."
                )
            try:
                yield
            finally:
                unlock(file)

    def begun(self) -> Plan | None:
        """The plan of the command that made the parts; None if there are none to take up."""
        try:
            plan = msgspec.json.decode(read_plain(self.path / _PLAN), type=Plan)
        except (OSError, *UNDECODABLE):
            return None
        return plan if self.done() else None

    def begin(self, plan: Plan) -> None:
        """Write the plan of this command, or take up the parts of the same one.

        Raises:
            SpecError: there are parts of another command.
            RunError: the folder cannot be written.
        """
        before = self.begun()
        if before is not None and (how := plan.differs(before)):
            raise SpecError(
                f"{self.path} holds {plural(len(self.done()), 'part')} of another command: {how}. "
                "Give that command again to complete it, remove the folder to begin anew, or name "
                "another --out."
            )
        try:
            if before is None:
                self.clear()
            for left in self.path.glob(".*"):  # of a process that was killed
                left.unlink(missing_ok=True)
            (self.path / "logs").mkdir(exist_ok=True)
            replace_plain(self.path / _PLAN, msgspec.json.encode(plan).decode(), durable=True)
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}.") from None

    def plan(self) -> Plan:
        """The plan of this command, for a worker."""
        return msgspec.json.decode(read_plain(self.path / _PLAN), type=Plan)

    def clear(self) -> None:
        """Remove parts and all that is known of the dataset."""
        parts, layouts = self.path.glob("batch-*"), self.path.glob("mesh-*")
        for path in [self.path / _DATASET, self.path / _PLAN, *parts, *layouts]:
            path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)

    # ---- the dataset

    def dataset(self) -> list[Any] | None:
        """The fingerprint of the dataset, as plain data; None if it was not read yet."""
        with suppress(OSError, ValueError, RecursionError):
            found: list[Any] = json.loads(read_plain(self.path / _DATASET))
            return found
        return None

    def know(self, fingerprint: list[Any]) -> None:
        """Keep the fingerprint of the dataset."""
        replace_plain(self.path / _DATASET, json.dumps(fingerprint), durable=True)

    # ---- parts

    def done(self) -> set[int]:
        """Numbers of the batches that have a part."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return set()
        return {int(match[1]) for match in map(_PART.fullmatch, names) if match}

    def drop(self, number: int) -> None:
        """Remove a part, so that its batch is predicted again."""
        self._part(number).unlink(missing_ok=True)

    def write(self, number: int, head: dict[str, Any], body: bytes) -> None:
        """Put a batch's part in its place.

        Raises:
            RunError: it cannot be written; nothing is left behind.
        """
        line = json.dumps({**head, "batch": number}).encode() + b"\n"
        digest = _digest(line, body)
        path = self._part(number)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            with open(os.open(beside, flags, 0o666), "wb") as file:
                file.writelines([digest, b"\n", line, body])
            beside.replace(path)
        except OSError as error:
            raise RunError(
                f"{self.path} cannot be written: {error.strerror or error}. Free some room, and "
                "give the same command again."
            ) from None
        finally:
            beside.unlink(missing_ok=True)

    def head(self, number: int) -> dict[str, Any]:
        """What a batch's part says of itself, unchecked.

        Raises:
            Damaged: that cannot be read.
        """
        try:
            with open(self._part(number), "rb", opener=plain) as file:
                file.readline()
                found: dict[str, Any] = json.loads(file.readline())
                return found
        except (OSError, ValueError, RecursionError):
            raise Damaged(number) from None

    def read(self, number: int) -> Part:
        """A batch's part, with every byte checked.

        Raises:
            Damaged: it is not what was written, as after a crash of the machine.
        """
        try:
            with open(self._part(number), "rb", opener=plain) as file:
                digest, line, body = file.readline().rstrip(), file.readline(), file.read()
            head = json.loads(line)
            whole = digest == _digest(line, body) and head["batch"] == number
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise Damaged(number)
        return Part(head, body)

    def _part(self, number: int) -> Path:
        return self.path / f"batch-{number:08d}.part"


def _digest(line: bytes, body: bytes) -> bytes:
    digest = hashlib.sha256(line)
    digest.update(body)
    return digest.hexdigest().encode()
