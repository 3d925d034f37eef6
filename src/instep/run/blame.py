"""From an exception to what a person wants to read first: the cause, and their own line of code.

An exception that our code or a library raised still has the user's line in
its traceback, as a rule; the deepest frame that is neither ours nor an
installed package's is taken to be theirs.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from instep.comm.messages import Failed
from instep.errors import InstepError, WorkerError

_OURS = str(Path(__file__).resolve().parent.parent)
_INSTALLED = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")})


def failed(error: BaseException, step: int, phase: str) -> Failed:
    """The last word of a worker that `error` ended at `step`, while it was in `phase`."""
    where, line = own_line(error)
    ours = isinstance(error, InstepError)
    return Failed(
        kind=type(error).__name__ if ours else "error",
        cause=str(error) if ours else sentence(error),
        where=where,
        line=line,
        step=step,
        phase=phase,
        exit_code=error.exit_code if isinstance(error, InstepError) else WorkerError.exit_code,
    )


def sentence(error: BaseException) -> str:
    """`ValueError: the text`, on one line and not endless; a hint where we have one."""
    text = " ".join(str(error).split())
    text = text if len(text) <= 600 else text[:597] + "..."
    name = type(error).__name__
    return (f"{name}: {text}" if text else f"{name}, without a text") + _hint(text)


def _hint(text: str) -> str:
    hints = {
        "Target ": ""
        if "out of bounds" not in text
        else " The model has too few outputs for the classes in the data, or a label is wrong.",
        "out of memory": " Use more train.micro_batches with train.merge = 'never', "
        "or a smaller train.global_batch.",
    }
    return next((hint for start, hint in hints.items() if start in text), "")


def own_line(error: BaseException) -> tuple[str, str]:
    """Where in the user's own code an error arose: (`file.py:41 in forward`, the line's text).

    Both are empty where no frame of the traceback is the user's.
    """
    chain: BaseException | None = error
    while chain is not None:
        for frame in reversed(traceback.extract_tb(chain.__traceback__)):
            file = str(Path(frame.filename).resolve())
            if not file.startswith((_OURS, *_INSTALLED)) and Path(file).is_file():
                return f"{frame.filename}:{frame.lineno} in {frame.name}", frame.line or ""
        chain = chain.__cause__
    return "", ""
