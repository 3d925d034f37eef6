"""Makes a run folder of the newest copy that is whole, so that the run resumes from it.

Every byte is compared with its checksum, first when it comes, then again in the folder, which gets
its name only then. A copy that is damaged, or was not written to its end, is left aside and the one
before it is taken; a file system that does not answer is an error, and no older copy is taken for
the newest. Ways in: `is_copies`, `restore`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.data.shards.download import WrongBytes, copied, file_system, tried
from instep.errors import CheckpointError, DataError, RunError, SpecError
from instep.plain_file import crc32_of
from instep.state.files import manifest as page
from instep.state.intact import check
from instep.store.copies.layout import COPY, RECORDS, RecordBlock, decode, name_of, step_of
from instep.store.folder import ID
from instep.words import command, is_url, shown_url


def is_copies(place: str) -> bool:
    """Whether a run is named by its copies: by a URL, or by a folder that has copies in it."""
    return is_url(place) or any(Path(place).expanduser().glob(f"step-*/{COPY}"))


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
        RunError: the folder is there, or cannot be written.
    """
    url = (place if is_url(place) else f"file://{Path(place).expanduser().absolute()}").rstrip("/")
    files = file_system(url)
    names = sorted(_copies_in(files, url), key=lambda name: (step_of(name), name), reverse=True)
    if to.exists():
        raise RunError(
            f"{to} is there already. Continue it with {command('resume', to)}, or name another "
            "folder with --to."
        )
    beside = to.with_name(f".{to.name}.restoring")
    shutil.rmtree(beside, ignore_errors=True)  # of one that was killed
    wrong = list[str]()
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        for name in names:
            try:
                step = _restore(files, f"{url}/{name}", beside)
            except (CheckpointError, FileNotFoundError, WrongBytes) as error:
                wrong.append(f"{shown_url(url)}/{name} is not whole: {error}")
                say(f"{wrong[-1]} The one before it is tried.")
                shutil.rmtree(beside, ignore_errors=True)
            else:
                beside.rename(to)
                say(f"step {step} of {shown_url(url)} is restored to {to}")
                return to
    except OSError as error:
        raise RunError(
            f"{to} cannot be written: {error.strerror or error}. Make room, or name another folder "
            "with --to."
        ) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
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
        CheckpointError, FileNotFoundError, WrongBytes: it is not whole.
        DataError: the file system does not answer.
    """
    copy = decode(_small(files, f"{url}/{COPY}"), COPY)
    data = _small(files, f"{url}/{page.MANIFEST}")
    manifest = page.decode(data, Path(page.MANIFEST))
    if name_of(manifest.step, data) != url.rpartition("/")[2] or copy.step != manifest.step:
        raise CheckpointError(f"its {page.MANIFEST} is that of another one.")
    checkpoint = folder / "checkpoints" / page.folder_name(manifest.step)
    checkpoint.mkdir(parents=True)
    (folder / "logs").mkdir()
    for name, entry in manifest.files.items():
        want = RecordBlock(entry.sha256, entry.size_bytes)
        _fetch(files, f"{url}/{name}", want, checkpoint / name)
    for name, blocks in copy.records.items():
        _fetch_record(files, f"{url.rpartition('/')[0]}/{RECORDS}", blocks, folder / name)
    with open(checkpoint / page.MANIFEST, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    check(checkpoint)
    _check_ledger(folder, manifest)
    return manifest.step


def _check_ledger(folder: Path, manifest: page.Manifest) -> None:
    size, crc32 = int(manifest.facts["ledger_bytes"]), manifest.facts.get("ledger_crc32")
    ledger = folder / "ledger.bin"
    if not (folder / ID).is_file() or not ledger.is_file() or ledger.stat().st_size < size:
        raise CheckpointError("its records are not complete.")
    if crc32 is not None and crc32_of(ledger, 0, size) != crc32:
        raise CheckpointError("its ledger is not that of the checkpoint.")


def _small(files: Any, url: str) -> bytes:
    found: bytes = tried(lambda _: files.cat_file(url), shown_url(url))
    return found


def _fetch_record(files: Any, url: str, blocks: list[RecordBlock], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with open(path, "wb") as file:
        for block in blocks:
            _fetch(files, f"{url}/{block.sha256}", block, part)
            file.write(part.read_bytes())
            part.unlink()
        file.flush()
        os.fsync(file.fileno())


def _fetch(files: Any, url: str, want: RecordBlock, path: Path) -> None:
    """Bring one object; bytes that came wrong on their way come again.

    Raises:
        WrongBytes: it has other bytes than it should, each time.
    """
    wrong: WrongBytes | None = None

    def attempt(moves: Callable[[], None]) -> None:
        nonlocal wrong
        wrong, digest = None, hashlib.sha256()
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            size = copied(files, url, beside, moves, digest.update)
            if (size, digest.hexdigest()) != (want.size, want.sha256):
                wrong = WrongBytes(f"{url.rpartition('/')[2]} has other bytes than were copied.")
                raise wrong
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)

    try:
        tried(attempt, shown_url(url))
    except DataError:
        if wrong is not None:
            raise wrong from None
        raise
