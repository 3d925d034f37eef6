"""Disks that are full, slow, or give up: real ones, of a few megabytes, mounted for one test."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest


class Disk:
    """A file system of its own at `path`, in memory, until `close`.

    Args:
        path: a folder to be made.
        size: of the disk, bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self._size = path, size
        path.mkdir()
        self._mount()
        self._filler = path / "filler"

    def _mount(self) -> None:
        _or_skip("mount", "-t", "tmpfs", "-o", f"size={self._size}", "instep-test", self.path)

    @property
    def free(self) -> int:
        """Bytes that may still be written."""
        told = os.statvfs(self.path)
        return told.f_bavail * told.f_frsize

    def fill(self, leave: int = 0) -> None:
        """Take up all room but `leave` bytes, also what others give back meanwhile."""
        with self._filler.open("ab", buffering=0) as file:
            while (count := self.free - leave) > 0:
                os.posix_fallocate(file.fileno(), file.tell(), count)
                file.seek(0, os.SEEK_END)

    def make_room(self) -> None:
        """Give back what `fill` took."""
        self._filler.unlink()

    def close(self) -> None:
        """Unmount it; whoever still has a file open keeps it."""
        _or_fail("umount", "--lazy", self.path)


class Ext4(Disk):
    """The same as a disk with a journal, on a file beside it: it can be held up, and give up."""

    def _mount(self) -> None:
        image = self.path.with_suffix(".image")
        if not image.exists():
            image.touch()
            os.truncate(image, self._size)
            _or_skip("mkfs.ext4", "-q", image)
        _or_skip("mount", "-o", "loop", image, self.path)

    def after_a_power_failure(self, path: Path) -> Ext4:
        """What would be found if the power failed now: nothing but what was written to the disk."""
        shutil.copyfile(self.path.with_suffix(".image"), path.with_suffix(".image"))
        return Ext4(path, self._size)

    def freeze(self) -> None:
        """Let every write wait, as a disk that is slow or has gone for a while does."""
        _or_fail("fsfreeze", "--freeze", self.path)

    def thaw(self) -> None:
        """Let them go on."""
        _or_fail("fsfreeze", "--unfreeze", self.path)

    def give_up(self) -> None:
        """Be read-only from now on, also for who has files open, as after an error of the disk."""
        _or_fail("mount", "-o", "remount,abort", self.path)

    def repair(self) -> None:
        """Be as good as new; nobody has a file open."""
        _or_fail("umount", self.path)
        image = self.path.with_suffix(".image")
        subprocess.run(["fsck.ext4", "-p", image], capture_output=True, check=False)
        _or_fail("mount", "-o", "loop", image, self.path)


def _or_skip(*command: object) -> None:
    try:
        _or_fail(*command)
    except (OSError, AssertionError) as error:
        pytest.skip(f"a disk of its own cannot be mounted here: {error}")


def _or_fail(*command: object) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command[0]}: {done.stderr.strip()}"


KINDS = ("directory", "named pipe", "socket", "device")
"""What may stand where a file is wanted; see `put`."""


def put(kind: str, path: Path) -> None:
    """Put one of `KINDS` where a file is wanted; of a device, a link to one that never ends."""
    if kind == "directory":
        path.mkdir()
    elif kind == "named pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.open(path.parent, os.O_RDONLY)  # the path itself may be too long for it
            try:
                listener.bind(f"/proc/self/fd/{here}/{path.name}")
            finally:
                os.close(here)


class Syncs:
    """Which files are flushed to the disk, and whether before they have their name.

    Args:
        monkeypatch: of the test.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._synced, sync = set[int](), os.fsync

        def watched(descriptor: int) -> None:
            self._synced.add(os.fstat(descriptor).st_ino)
            sync(descriptor)

        replace, self._unsynced = os.replace, set[int]()

        def named(old: os.PathLike[str] | str, new: os.PathLike[str] | str, **how: Any) -> None:
            inode = os.stat(old).st_ino
            self._unsynced |= {inode} - self._synced
            replace(old, new, **how)

        monkeypatch.setattr(os, "fsync", watched)
        monkeypatch.setattr(os, "replace", named)

    def done(self, path: Path) -> bool:
        """Whether it was flushed."""
        return path.stat().st_ino in self._synced

    def first(self, path: Path) -> bool:
        """Whether it was flushed before it got its name."""
        return self.done(path) and path.stat().st_ino not in self._unsynced
