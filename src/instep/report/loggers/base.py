"""What a logger is: it gets points of curves, in order, and brings them to where they are shown.

How a run comes to points, `points.py` knows. Ways in: `Logger`, and `check_loggers` before a run.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, NamedTuple, Protocol

from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.report.loggers import LOGGERS


class Point(NamedTuple):
    """One value of one curve."""

    name: str
    """Such as `train/loss`, `validation/accuracy`, or what a callback has chosen."""
    value: float
    """Finite."""
    step: int
    time: float
    """When it was measured, Unix seconds."""


class Logger(Protocol):
    """Made with the run's folder and its job; a resumed run continues what it wrote before.

    It may raise whatever its library raises: it is closed then, and the run continues without it.
    """

    package: ClassVar[str]
    """The package that it needs, which is an extra of instep; empty for none."""

    def __init__(self, run: Path, job: JobSpec) -> None: ...

    def write(self, points: Sequence[Point]) -> None:
        """Points in the order in which they were measured; each once, unless a process was lost or
        the run went back to an earlier step."""

    def flush(self) -> None:
        """Make what was written visible; called every few seconds."""

    def close(self, outcome: str) -> None:
        """The run is over, or pauses: `completed`, `stopped`, `failed`, `interrupted`."""


def check_loggers(names: Iterable[str]) -> None:
    """Refuse loggers that do not exist, or whose package is missing.

    Raises:
        SpecError: says which, and how to get it.
    """
    names = list(names)
    for name in names:
        LOGGERS.check(name, "report.loggers")
        if names.count(name) > 1:
            raise SpecError(
                f"report.loggers names {name!r} twice, and every point would be written twice. "
                "Name it once."
            )
        package = LOGGERS[name].package
        if package and find_spec(package) is None:
            raise SpecError(
                f"report.loggers has {name!r}, but the {package} package is not installed. "
                f"Get it with: pip install 'instep[{name}]'"
            )
