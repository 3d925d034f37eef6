"""Every error that instep raises on purpose, with the exit code of each.

    InstepError                  1
    ├── SpecError                2   a job, a setting or a command says something impossible
    ├── RecipeError              3   the user's own code does not give what a recipe must
    ├── DataError                4   a dataset or a data file cannot be used
    ├── WorkerError              5   a process of the run failed while training
    │   └── Unrepeatable         5   a step gave different gradients when it was computed again
    ├── PeerError                5   another process ended in the middle of a collective
    │   └── StrangerError        5   the other end of a connection is not of this run
    ├── RunError                 6   a run folder is missing, busy, or not what it should be
    ├── CheckpointError          7   a checkpoint is damaged, incomplete, or of another program
    └── JoinError                9   a machine may not join a run, or has lost it

A run that the user interrupts ends with 130 (`INTERRUPTED`), saved or not. A run
whose loss was not finite at the end ends with 8 (`DIVERGED`). An error prints as one
line; a traceback is a bug in instep. `docs/reference/errors.md` has a heading for each.
"""

from __future__ import annotations

import linecache
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path

INTERRUPTED = 130
"""Exit code of a run that Ctrl-C or SIGTERM ended."""


DIVERGED = 8
"""Exit code of a run whose last loss was not finite: its model is useless."""


class InstepError(Exception):
    """Root of the tree; its text is one complete sentence for a person."""

    exit_code = 1
    beside: tuple[InstepError, ...] = ()
    """Others that were found at the same moment, for who prints all of them."""


class SpecError(InstepError):
    """A job file, a `--set`, or an argument asks for something impossible."""

    exit_code = 2


class RecipeError(InstepError):
    """The recipe, or what it returned, cannot be trained."""

    exit_code = 3


class DataError(InstepError):
    """A dataset, or a file that a source reads, cannot be used."""

    exit_code = 4


class WorkerError(InstepError):
    """A process of the run failed; the text names it, the step, and the cause."""

    exit_code = 5


class Unrepeatable(WorkerError):
    """A step was computed twice from the same samples and random state, and its gradients differ.

    Args:
        text: what happened.
        mine: whether the gradients of this process differ.
    """

    def __init__(self, text: str, mine: bool = False) -> None:
        super().__init__(text)
        self.mine = mine


class PeerError(InstepError):
    """A collective broke because another process ended; a consequence, not a cause.

    Args:
        text: what happened.
        mine: whether this process itself is the cause, for example out of memory.
    """

    exit_code = 5

    def __init__(self, text: str, mine: bool = False) -> None:
        super().__init__(text)
        self.mine = mine


class StrangerError(PeerError):
    """The other end of a connection is not what it should be: of another run, or somebody else."""


class RunError(InstepError):
    """A run folder is missing, in use, or not what it should be."""

    exit_code = 6


class CheckpointError(InstepError):
    """A checkpoint cannot be trusted: damaged, incomplete, or of another program."""

    exit_code = 7


class JoinError(InstepError):
    """A machine may not join a run, or has lost it."""

    exit_code = 9


def caught(check: Callable[[], object]) -> Iterator[InstepError]:
    """The error that a check raises, if it raises one of ours; for `raise_first`, or for a list."""
    try:
        check()
    except InstepError as error:
        yield error


def raise_first(errors: Iterable[InstepError]) -> None:
    """Raise the first of the reasons why something is refused; the others are not looked for.

    Raises:
        InstepError: there is one.
    """
    for error in errors:
        raise error


def raise_all(errors: Iterable[InstepError]) -> None:
    """Raise the first of the reasons why something is refused, with the others `beside` it.

    Raises:
        InstepError: there is one.
    """
    found = [*errors]
    if found:
        found[0].beside = tuple(found[1:])
        raise found[0]


MOST_NAMES = 40
"""That a message lists."""


def near_miss(given: str, known: Iterable[str]) -> str:
    """The sentence that follows a wrong name: what was probably meant, and the list.

    Returns:
        `Did you mean 'top_k'? Known: half, top_k.`, or only the second half
        when no known name resembles `given`; `There are none.` without any.
    """
    names = sorted(known)
    if not names:
        return "There are none."
    close = get_close_matches(given, names, n=1, cutoff=0.6)
    guess = f"Did you mean {close[0]!r}? " if close else ""
    more = f", and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{guess}Known: {', '.join(names[:MOST_NAMES])}{more}."


def file_beside(path: Path, pattern: str) -> str:
    """The same for a file that does not exist: `near_miss` among those beside it.

    Args:
        path: of the file.
        pattern: of the names that count, such as `*.py`.
    """
    beside = [each.name for each in path.parent.glob(pattern)]
    return near_miss(path.name, beside) if beside else f"Nor is there another {pattern} there."


_OURS = str(Path(__file__).resolve().parent)
_LIBRARY = (_OURS, *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})


MOST_OF_A_TEXT = 600
"""Most characters of an exception's text; the log of the process has all of it."""


def one_line(error: BaseException) -> str:
    """The text of an exception on one line, shortened, without a full stop; maybe empty."""
    try:
        text = " ".join(str(error)[: 4 * MOST_OF_A_TEXT].split())
    except Exception:  # of a class of the user's own
        text = ""
    text = text if text.endswith("..") else text.removesuffix(".")
    return text if len(text) <= MOST_OF_A_TEXT else text[: MOST_OF_A_TEXT - 3] + "..."


def own_line(error: BaseException) -> tuple[str, str]:
    """The line of the user's own code that raised an error, or one of its causes.

    Returns:
        `file.py:41 in forward` and that line's text: of the innermost frame
        outside instep, the standard library and installed packages. Both are
        empty if there is no such frame.
    """
    chain: BaseException | None = error
    while chain is not None:
        for frame in reversed(traceback.extract_tb(chain.__traceback__)):
            if is_users(Path(frame.filename)):
                return f"{frame.filename}:{frame.lineno} in {frame.name}", frame.line or ""
        chain = chain.__cause__
    return "", ""


def is_users(file: Path) -> bool:
    """Whether a source file is the user's own: not of instep, Python or an installed package.

    A cell of a notebook is one too: its path names no file, and `linecache` has its text.
    """
    installed = {"site-packages", "dist-packages"} & set(file.parts)
    exists = file.is_file() or (file.is_absolute() and str(file) in linecache.cache)
    return exists and not installed and not str(file.resolve()).startswith(_LIBRARY)
