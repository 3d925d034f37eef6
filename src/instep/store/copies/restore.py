"""Makes a run folder of the newest copy that is whole, so that the run resumes from it.

Every byte is compared with its checksum, first when it comes, then again in the folder, which gets
its name only then. A copy that is damaged, or was not written to its end, is left aside and the one
before it is taken; a file system that does not answer is an error, as is a fault of this machine,
and no older copy is taken for the newest. Ways in: `is_copies`, `runs_called`, `restore`.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from instep.data.shards.urls.download import copied, reached, tried
from instep.errors import CheckpointError, DataError, RunError, SpecError
from instep.plain_file import crc32_of
from instep.state.files import manifest as page
from instep.state.intact import check
from instep.store.copies.layout import COPY, RECORDS, RecordBlock, decode, name_of, step_of, url_of
from instep.store.folder import ID
from instep.store.own_files import lock, open_own
from instep.words import command, is_url, shown_url

_PARTS = ".parts"
"""The folder, in one that is being restored, of what has not come to its end."""


def is_copies(place: str) -> bool:
    """Whether a run is named by its copies: by a URL, or by a folder that has copies in it."""
    return is_url(place) or any(Path(place).expanduser().glob(f"step-*/{COPY}"))


def runs_called(name: str, copy_to: str) -> list[str]:
    """The URLs of the copies of all runs of a name.

    Args:
        name: of a job.
        copy_to: its `checkpoint.copy_to`.

    Raises:
        DataError: the file system does not answer.
    """
    place = url_of(copy_to)
    files, called = reached(place), re.compile(rf"{re.escape(name)}-[0-9a-f]{{8}}")
    found = (f"{place}/{each}" for each in _names(files, place) if called.fullmatch(each))
    return [url for url in found if any(map(step_of, _names(files, url)))]


def restore(place: str, to: Path, say: Callable[[str], object]) -> Path:
    """Make the folder of a run from its copies.

    Args:
        place: the URL or folder of the copies of one run.
        to: the run folder; must not be there.
        say: told of copies that are left aside, and what was restored.

    Returns:
        The folder.

    Raises:
        SpecError: there are no copies; or a package is not installed.
        CheckpointError: there are copies, and none is whole.
        DataError: the file system does not answer.
        RunError: the folder is there, or is just being restored, or cannot be written.
    """
    url = url_of(place)
    files = reached(url)
    names = sorted(_copies_in(files, url), key=lambda name: (step_of(name), name), reverse=True)
    _check_absent(to)
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        with _alone(to) as beside:
            return _newest(files, url, names, beside, to, say)
    except OSError as error:
        raise RunError(
            f"{to} cannot be written: {error.strerror or error}. Make room, or name another folder "
            "with --to."
        ) from None


def _check_absent(to: Path) -> None:
    if to.exists():
        raise RunError(
            f"{to} is there already. Continue it with {command('resume', to)}, or name another "
            "folder with --to."
        )


@contextmanager
def _alone(to: Path) -> Iterator[Path]:
    """In this context no other process restores `to`; gives the folder that becomes it."""
    beside = to.with_name(f".{to.name}.restoring")
    name = beside.with_name(f"{beside.name}.lock")
    with open_own(name) as file:
        if not lock(file) or not _is_at(name, file.fileno()):
            raise RunError(
                f"{to} is being restored by another process. Wait for its end, or name another "
                "folder with --to."
            )
        try:
            _check_absent(to)
            shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            name.unlink(missing_ok=True)


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one of this path: who had locked it has removed it."""
    with suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    return False


def _newest(
    files: Any, url: str, names: list[str], beside: Path, to: Path, say: Callable[[str], object]
) -> Path:
    wrong = list[str]()
    for name in names:
        try:
            step = _restore(files, f"{url}/{name}", beside)
        except CheckpointError as error:
            wrong.append(f"{shown_url(url)}/{name} is not whole: {error}")
            say(f"{wrong[-1]} The one before it is tried.")
            shutil.rmtree(beside, ignore_errors=True)
        else:
            shutil.rmtree(beside / _PARTS)
            beside.rename(to)
            say(f"step {step} of {shown_url(url)} is restored to {to}")
            return to
    raise CheckpointError(f"no copy of a checkpoint is whole. {wrong[0]}")


def _copies_in(files: Any, url: str) -> list[str]:
    """The names of the copies of a run.

    Raises:
        SpecError: there are none.
        DataError: the file system does not answer.
    """
    found = _names(files, url)
    copies = [name for name in found if step_of(name) is not None]
    if copies:
        return copies
    runs = [name for name in found if any(map(step_of, _names(files, f"{url}/{name}")))]
    hint = "Give checkpoint.copy_to of its job, and the name of the run in it."
    if runs:
        hint = f"Give one of the runs in it: {', '.join(f'{shown_url(url)}/{r}' for r in runs)}"
    raise SpecError(f"{shown_url(url)} has no copies of the checkpoints of a run. {hint}")


def _names(files: Any, url: str) -> list[str]:
    def ask(_: Callable[[], None]) -> list[str]:
        return sorted(Path(str(each).rstrip("/")).name for each in files.ls(url, detail=False))

    with suppress(FileNotFoundError, NotADirectoryError):
        found: list[str] = tried(ask, shown_url(url))
        return found
    return []


def _restore(files: Any, url: str, folder: Path) -> int:
    """Restore one copy; returns its step.

    Raises:
        CheckpointError: it is not whole.
        DataError: the file system does not answer.
        OSError: the folder cannot be written.
    """
    copy = decode(_small(files, f"{url}/{COPY}"), COPY)
    data = _small(files, f"{url}/{page.MANIFEST}")
    manifest = page.decode(data, Path(page.MANIFEST))
    if name_of(manifest.step, data) != url.rpartition("/")[2] or copy.step != manifest.step:
        raise CheckpointError(f"its {page.MANIFEST} is that of another one.")
    checkpoint = folder / "checkpoints" / page.folder_name(manifest.step)
    checkpoint.mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / _PARTS).mkdir()
    for name, entry in manifest.files.items():
        want = RecordBlock(entry.sha256, entry.size_bytes)
        _fetch(files, f"{url}/{name}", want, folder / _PARTS).replace(checkpoint / name)
    for name, blocks in copy.records.items():
        _fetch_record(files, f"{url.rpartition('/')[0]}/{RECORDS}", blocks, folder, name)
    _write(checkpoint / page.MANIFEST, [data])
    try:
        check(checkpoint)
    except CheckpointError as error:  # each byte was right when it came
        raise OSError(f"what was written there reads otherwise ({error})") from None
    _check_ledger(folder, manifest)
    return manifest.step


def _check_ledger(folder: Path, manifest: page.CheckpointManifest) -> None:
    size, crc32 = int(manifest.facts["ledger_bytes"]), manifest.facts.get("ledger_crc32")
    ledger = folder / "ledger.bin"
    if not (folder / ID).is_file() or not ledger.is_file() or ledger.stat().st_size < size:
        raise CheckpointError("its records are not complete.")
    if crc32 is not None and crc32_of(ledger, 0, size) != crc32:
        raise CheckpointError("its ledger is not that of the checkpoint.")


def _small(files: Any, url: str) -> bytes:
    found: bytes = _asked(lambda _: files.cat_file(url), url)
    return found


def _asked(read: Callable[[Callable[[], None]], Any], url: str) -> Any:
    try:
        return tried(read, shown_url(url))
    except FileNotFoundError:
        raise CheckpointError(f"{url.rpartition('/')[2]} is missing.") from None


def _fetch_record(files: Any, url: str, blocks: list[RecordBlock], folder: Path, name: str) -> None:
    def pieces() -> Iterator[bytes]:
        for block in blocks:
            part = _fetch(files, f"{url}/{block.sha256}", block, folder / _PARTS)
            yield part.read_bytes()
            part.unlink()

    (folder / name).parent.mkdir(exist_ok=True)
    _write(folder / name, pieces())


def _fetch(files: Any, url: str, want: RecordBlock, parts: Path) -> Path:
    """Bring one object into a folder; bytes that came wrong on their way come again.

    Returns:
        Its path, which is that of no other attempt: one that was given up may still write.

    Raises:
        CheckpointError: it is not there, or has other bytes than it should, each time.
        DataError: the file system does not answer.
        OSError: the folder cannot be written.
    """

    def attempt(moves: Callable[[], None]) -> Path:
        digest, part = hashlib.sha256(), parts / secrets.token_hex(4)
        size = copied(files, url, part, moves, _Unwritable, digest.update)
        if (size, digest.hexdigest()) == (want.size, want.sha256):
            return part
        part.unlink()
        raise _OtherBytes(f"{url.rpartition('/')[2]} has other bytes than were copied.")

    try:
        found: Path = _asked(attempt, url)
        return found
    except _Unwritable as error:
        raise error.why from None
    except DataError as error:
        if isinstance(error.__context__, _OtherBytes):  # so ended the last attempt
            raise CheckpointError(str(error.__context__)) from None
        raise


class _OtherBytes(Exception):
    """An object came to its end, and is not what was copied."""


class _Unwritable(RunError):
    """This machine is at fault, so that another attempt would be no better."""

    def __init__(self, why: OSError) -> None:
        super().__init__(str(why))
        self.why = why


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    with open(path, "wb") as file:
        for data in pieces:
            file.write(data)
        file.flush()
        os.fsync(file.fileno())
