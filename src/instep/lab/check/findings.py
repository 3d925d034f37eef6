"""Refusals, warnings and figures of a job, as a check finds them.

It imports no torch, and checks nothing. Way in: `Findings`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from instep.errors import DataError, InstepError
from instep.system import causes

Result = TypeVar("Result")

STAGES = ("job file", "job", "recipe", "data", "model", "optimizer", "passes", "mesh", "verdict")
"""Where something is refused, in the order in which they are looked at."""


class Refusal(NamedTuple):
    """One reason why the job would not run."""

    stage: str
    """One of `STAGES`."""
    text: str
    """One or more sentences: what is wrong, and what to do."""
    exit_code: int
    """That `instep run` would end with."""
    where: str = ""
    """The line of the user's code that raised it, if one did, with that line itself in `line`."""
    line: str = ""


class Findings:
    """All that is known of a job so far.

    Args:
        say: called with what is done next.
    """

    def __init__(self, say: Callable[[str], None] = lambda text: None) -> None:
        self.say = say
        self.refusals: list[Refusal] = []
        self.warnings: list[str] = []
        self.not_tried: list[str] = []
        self.parts: dict[str, Any] = {}
        """Figures by part, as plain JSON."""

    def refuse(self, error: BaseException, stage: str) -> None:
        """Note why the job would not run, and what was found beside it; the same text once."""
        failed, stage = causes.failed(error, 0, ""), _stage_of(error, stage)
        if failed.cause not in (each.text for each in self.refusals):
            code = failed.exit_code
            refusal = Refusal(stage, failed.cause, code, failed.where, failed.line)
            self.refusals.append(refusal)
        for other in error.beside if isinstance(error, InstepError) else ():
            self.refuse(other, stage)

    def tried(self, stage: str, attempt: Callable[[], Result]) -> Result | None:
        """Give the result of something that may refuse the job; None if it does.

        See `failed`.
        """
        try:
            return attempt()
        except (Exception, SystemExit) as error:
            self.failed(stage, error)
        return None

    def failed(self, stage: str, error: BaseException) -> None:
        """Note that something could not be built or tried.

        An error that is none of ours, after a refusal, is a consequence of that as a rule: then it
        is said that this was not tried.
        """
        if self.refusals and not isinstance(error, InstepError):
            why = causes.sentence(error)
            self.leave_out(f"{stage}: it fails, perhaps for what is refused above ({why})")
        else:
            self.refuse(error, stage)

    def measured(self, what: str, measure: Callable[[], Result]) -> Result | None:
        """Give a figure; None, and a sentence on why, if it cannot be had. Nothing is refused."""
        try:
            return measure()
        except (Exception, SystemExit) as error:
            self.leave_out(f"{what}: {causes.sentence(error)}")
        return None

    def leave_out(self, text: str) -> None:
        """Note what was not tried, and why; the same once."""
        if text not in self.not_tried:
            self.not_tried.append(text)

    def warn(self, text: str) -> None:
        """Note what a run would warn of; the same once."""
        if text not in self.warnings:
            self.warnings.append(text)

    @property
    def starts(self) -> bool:
        """Whether nothing refuses the job."""
        return not self.refusals

    @property
    def exit_code(self) -> int:
        """The code of `instep run`, which ends at the first refusal; 0 without one."""
        return self.refusals[0].exit_code if self.refusals else 0

    def as_table(self) -> dict[str, Any]:
        """For `--json`, and for a terminal."""
        return {
            "starts": self.starts,
            "exit_code": self.exit_code,
            "refusals": [each._asdict() for each in self.refusals],
            "warnings": self.warnings,
            "not_tried": self.not_tried,
            **self.parts,
        }


def _stage_of(error: BaseException, stage: str) -> str:
    return "data" if isinstance(error, DataError) else stage
