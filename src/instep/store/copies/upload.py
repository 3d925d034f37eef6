"""Copies checkpoints of a run to a file system, one at a time, and removes old copies.

A checkpoint is read through files that are opened first, so it may be deleted meanwhile. What was
written for one that is tried again is not written again. Nothing is removed for a fault of this
machine: what the newest checkpoint is, names of folders say, and copies of later steps go only when
the copy of another one is whole. Errors of the file system are raised as they come: when to try
again is for `follow.py`. Way in: `Copies`.
"""

from __future__ import annotations

import hashlib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, NamedTuple

from instep.data.shards.urls.download import WrongBytes
from instep.errors import CheckpointError
from instep.job.checkpoint import CheckpointSpec
from instep.plain_file import plain, read_plain
from instep.state.files import manifest as page
from instep.state.retention import Best, to_delete
from instep.store.copies.claim import Claim
from instep.store.copies.layout import COPY, Copy, decode, encode, is_intact, name_of, step_of
from instep.store.copies.objects import Objects
from instep.store.copies.records import CopiedRecords


class _Here(NamedTuple):
    """A checkpoint of the run that can be read."""

    path: Path
    manifest: page.CheckpointManifest
    name: str
    """The name of its copy."""


class _WholeCopy(NamedTuple):
    """A copy that is whole."""

    step: int
    value: float | None
    """Its metric, where the best are kept."""
    blocks: frozenset[str]


class Copies:
    """The copies of a run.

    Args:
        run: its folder.
        url: of its copies.
        spec: which of them are kept.
    """

    def __init__(self, run: Path, url: str, spec: CheckpointSpec) -> None:
        self._run, self._spec, self._objects = run, spec, Objects(url)
        self._records = CopiedRecords(run, self._objects)
        self._claim = Claim(run, self._objects)
        self._best = Best.by(spec) if spec.keep_best else None
        self._looked = self._strange = False  # strange: there are copies of another format
        self._whole: dict[str, _WholeCopy] = {}
        self._begun: dict[str, Copy | None] = {}  # not known to be whole; what was to end them
        self._written = set[str]()  # files of a copy that is not whole yet
        self._refused: dict[str, str] = {}  # checkpoints that are damaged here, and how
        self._here: dict[int, _Here] = {}
        self._newest = ""  # name of the copy of the run's newest checkpoint
        self._replaces = ""  # the copy that was made in place of those of later steps
        self._old = True  # there may be copies to remove

    @property
    def moved_at(self) -> float:
        """When something was last written or removed there; of `time.monotonic`."""
        return self._objects.moved_at

    def look(self) -> None:
        """Find out what is there, unless that is known.

        Raises:
            Exception: of the file system.
        """
        if self._looked:
            return
        self._claim.make()
        self._look_at_others()
        self._records.look()
        self._looked = True

    def _look_at_others(self) -> None:
        """Find copies that this process does not know: of one before it, at its end maybe."""
        for name in self._objects.names():
            if step_of(name) is not None and name not in self._whole and name not in self._begun:
                self._look_at(name)

    def _look_at(self, name: str) -> None:
        try:
            found = self._read(name)
        except CheckpointError:
            self._strange = True
            self._begun.pop(name, None)
            return
        if found is None:
            self._begun.setdefault(name, None)
        else:
            self._whole[name] = found
            self._begun.pop(name, None)

    def _read(self, name: str) -> _WholeCopy | None:
        """Read a copy; None if it is not whole.

        Raises:
            CheckpointError: it is whole, and of another format.
        """
        data = self._objects.read(f"{name}/{COPY}")
        if data is None or not is_intact(data):
            return None
        copy, value = decode(data, name), None
        if self._best is not None:
            manifest = self._objects.read(f"{name}/{page.MANIFEST}")
            if manifest is None:
                return None
            value = self._best.value(page.decode(manifest, Path(page.MANIFEST)).facts)
        return _whole(copy, value)

    # ---- what is to be copied

    def missing(self) -> Path | None:
        """The checkpoint that is to be copied next: the newest; else one that is kept for good.

        Where the newest is damaged, the newest that is not, unless there is a later copy.

        Raises:
            CheckpointError: the newest is damaged, or the folder of checkpoints cannot be listed.
            OSError: the newest cannot be read.
            Exception: of the file system.
        """
        found = list(page.published(self._run / "checkpoints"))
        self._here, error = _readable(found)
        newest = found[0][0] if found else 0
        self._newest = self._here[newest].name if newest in self._here else ""
        good = self._kept_for_good(newest)
        usable = [each for each in self._here.values() if each.name not in self._refused]
        latest = max((each.step for each in self._whole.values()), default=-1)
        for number, each in enumerate(usable):
            step = each.manifest.step
            first = number == 0 and (step == newest or step > latest)
            if (first or step in good) and each.name not in self._whole:
                return each.path
        if error is not None and not self._newest:
            raise error
        return None

    def _kept_for_good(self, newest: int) -> set[int]:
        every = self._spec.keep_every
        kept = {step for step in self._here if every > 0 and step % every == 0}
        if self._best is None:
            return kept
        values = self._values(newest)
        for step, each in self._here.items():
            if (value := self._best.value(each.manifest.facts)) is not None:
                values[step] = value
        return kept | set(self._best.choose(values))

    def _values(self, newest: int) -> dict[int, float]:
        """Step to metric, of copies that are whole; later ones are of what the run went back on."""
        known = self._whole.values()
        return {e.step: e.value for e in known if e.value is not None and e.step <= newest}

    @property
    def lacks(self) -> str:
        """Why the run's newest checkpoint has no copy; empty if it has one, or there is none."""
        if not self._newest or self._newest in self._whole:
            return ""
        changed = "its files, or the ledger of the run, are not those that were saved"
        return self._refused.get(self._newest, changed)

    # ---- copying

    def copy(self, checkpoint: Path) -> tuple[int, int] | None:
        """Copy a checkpoint.

        Returns:
            Its step, and its size in bytes; None if it is gone, or the run went back before it.

        Raises:
            CheckpointError: it is damaged, and not looked at again.
            Exception: of the file system; or another process copies this run now.
        """
        self._claim.check()
        with ExitStack() as stack:
            try:
                data = read_plain(checkpoint / page.MANIFEST)
                manifest = page.decode(data, checkpoint / page.MANIFEST)
            except (FileNotFoundError, CheckpointError):  # `missing` has read it a moment ago
                return None
            name = name_of(manifest.step, data)
            try:
                opened = {
                    file: stack.enter_context(open(checkpoint / file, "rb", opener=plain))
                    for file in manifest.files
                }
            except FileNotFoundError as error:
                if not (checkpoint / page.MANIFEST).exists():
                    return None  # a checkpoint is renamed before its files are deleted
                raise self._refusal(name, f"{error.filename} is missing") from None
            records = self._records.send(manifest)
            if records is None:
                return None
            with suppress(Exception):  # they take the room of this one, where there is little
                self._remove_begun(but=name)
            self._begun.setdefault(name, None)
            for file, entry in manifest.files.items():
                self._send_file(name, file, opened[file], entry)
        if f"{name}/{page.MANIFEST}" not in self._written:
            self._objects.send(f"{name}/{page.MANIFEST}", data, len(data))
            self._written.add(f"{name}/{page.MANIFEST}")
        copy = Copy(step=manifest.step, manifest=hashlib.sha256(data).hexdigest(), records=records)
        # One that was sent before may be there by now, or come later; the records have grown.
        self._begun[name] = copy = self._begun[name] or copy
        self._objects.send(f"{name}/{COPY}", encoded := encode(copy), len(encoded))
        self._check_there(name, manifest, copy)
        del self._begun[name]
        self._whole[name] = _whole(copy, self._best.value(manifest.facts) if self._best else None)
        self._written.clear()
        self._old = True
        if name == self._newest:
            self._replaces = name
        size = sum(entry.size_bytes for entry in manifest.files.values())
        return manifest.step, size + len(data)

    def _send_file(self, name: str, file: str, opened: IO[bytes], entry: page.FileEntry) -> None:
        place = f"{name}/{file}"
        if place in self._written:
            return
        if self._objects.send(place, opened, entry.size_bytes) != entry.sha256:
            raise self._refusal(name, f"{opened.name} is damaged: it does not fit its manifest")
        self._written.add(place)

    def _check_there(self, name: str, manifest: page.CheckpointManifest, copy: Copy) -> None:
        """Compare what is there with what a copy needs: somebody else may have removed some of it.

        Raises:
            WrongBytes: some is not there, and now the copy is none; it is to be made again.
            RunError: so it is, and another process copies this run now.
        """
        lacks = {page.MANIFEST, *manifest.files} - self._objects.names(name).keys()
        self._records.look()
        if lacks or not self._records.has(copy):
            self._objects.remove(f"{name}/{COPY}")
            self._written.clear()
            self._begun[name] = None
            self._claim.check()
            raise WrongBytes(f"objects of {name} were removed while it was copied")

    def _refusal(self, name: str, why: str) -> CheckpointError:
        self._refused[name], self._old = why, True
        return CheckpointError(f"{why}, and is not copied.")

    # ---- old copies

    def remove_old(self) -> None:
        """Remove what is not kept, and not whole, and blocks that none needs; if it may be there.

        Raises:
            Exception: of the file system; then call it again.
        """
        if not self._old:
            return
        self._claim.check()
        self._look_at_others()
        self._remove_begun()
        for name in self._obsolete():
            self._remove(name)
            del self._whole[name]
        if not self._strange:  # else it is not known which they need
            blocks = (each.blocks for each in self._whole.values())
            self._records.remove_all_but(set().union(*blocks))
        self._old = False

    def _remove_begun(self, but: str = "") -> None:
        for name in self._begun.keys() - {but}:
            self._look_at(name)  # its last object may have come after all
            if name in self._begun:
                self._remove(name)
                del self._begun[name]

    def _obsolete(self) -> list[str]:
        """Names of copies that are not kept; none before that of the newest checkpoint is whole."""
        if self._newest not in self._whole:
            return []
        newest = self._whole[self._newest].step
        steps = to_delete(
            {each.step for each in self._whole.values()},
            current=newest,
            keep_last=self._spec.keep_last,
            keep_every=self._spec.keep_every,
            keep_best=self._best.choose(self._values(newest)) if self._best else (),
        )
        here = {each.name: step for step, each in self._here.items() if each.name in self._whole}
        found = []
        for name, each in self._whole.items():
            replaced = name not in here and each.step in here.values()
            # A later one that this copy does not replace may be lost on this machine alone.
            later = each.step > newest and self._replaces != self._newest
            if replaced or (each.step in steps and not later):
                found.append(name)
        return found

    def _remove(self, name: str) -> None:
        """Remove a copy so that no half of it ever counts as one."""
        self._written = {each for each in self._written if not each.startswith(f"{name}/")}
        self._objects.remove_folder(name, COPY)


def _readable(
    found: list[tuple[int, Path]],
) -> tuple[dict[int, _Here], CheckpointError | OSError | None]:
    """The checkpoints that can be read, newest first, by step; and why the newest cannot."""
    here: dict[int, _Here] = {}
    why: CheckpointError | OSError | None = None
    for step, path in found:
        try:
            data = read_plain(path / page.MANIFEST)
            manifest = page.decode(data, path / page.MANIFEST)
        except (CheckpointError, OSError) as error:
            if step == found[0][0] and path.exists():  # else it was deleted meanwhile
                why = error
        else:
            here.setdefault(step, _Here(path, manifest, name_of(manifest.step, data)))
    return here, why


def _whole(copy: Copy, value: float | None) -> _WholeCopy:
    blocks = (each.sha256 for every in copy.records.values() for each in every)
    return _WholeCopy(copy.step, value, frozenset(blocks))
