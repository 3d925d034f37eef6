"""Where the user's code is between two steps of training, and what it has done there.

A worker that takes another's place, or begins from a checkpoint, runs the user's code from its
top. So what that code has done is kept by the section in which it was: before the first
epoch, at the begin of an epoch, after a commit. What comes up once more is known by its place.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")

START = "start"
"""The section before the first epoch."""


def of_epoch(epoch: int) -> str:
    """The section at the begin of an epoch."""
    return f"epoch {epoch}"


def after(step: int) -> str:
    """The section after a commit."""
    return f"after {step}"


class Sections(Generic[T]):
    """What has been done in each section that can come up again."""

    def __init__(self) -> None:
        self.done: dict[str, T] = {}
        self._section, self._at = START, 0  # the present one, and how far in it the code is

    def enter(self, section: str) -> None:
        """The user's code comes to a section; nothing where it is there already."""
        if section != self._section:
            self._section, self._at = section, 0

    def commit(self, step: int, epoch: int) -> None:
        """A step counts; what comes now follows it, and what was before does not come again."""
        kept = (START, of_epoch(epoch))
        self.done = {section: done for section, done in self.done.items() if section in kept}
        self.enter(after(step))


class SchedulerSteps(Sections[int]):
    """Steps of the scheduler that the user's code makes itself, between two steps of training.

    How many of each section the state holds, so that none is made twice.
    """

    def is_new(self) -> bool:
        """Whether the step that is about to be made is not in the state yet; notes it."""
        self._at += 1
        if self._at <= self.done.get(self._section, 0):
            return False
        self.done[self._section] = self._at
        return True
