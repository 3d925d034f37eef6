"""From an exception to what a person wants to read first: the cause, and their own line of code."""

from __future__ import annotations

from instep.comm.protocol.messages import Failed, Refused
from instep.errors import (
    MOST_OF_A_TEXT,
    InstepError,
    PeerError,
    WorkerError,
    one_line,
    own_line,
)
from instep.words import fit_to_print, printable


class Unwanted(PeerError):
    """Every place in the run is taken, so this process has none."""


def failed(error: BaseException, step: int, phase: str) -> Failed:
    """The last message of a worker that `error` ended at `step`, in `phase`."""
    where, line = own_line(error)
    ours = isinstance(error, InstepError)
    cause = fit_to_print(str(error)) if ours else sentence(error)
    if where and where in cause:
        where, line = "", ""  # the text names it already
    kind = "PeerError" if isinstance(error, PeerError) else type(error).__name__
    return Failed(
        kind=kind if ours else "error",
        cause=cause,
        where=where,
        line=fit_to_print(line, MOST_OF_A_TEXT),
        step=step,
        phase=phase,
        exit_code=error.exit_code if isinstance(error, InstepError) else WorkerError.exit_code,
    )


def refused(error: BaseException) -> Refused:
    """The message that makes other processes raise the same error; `as_error` undoes it."""
    message = failed(error, 0, "")
    return Refused(kind=message.kind, text=message.cause, exit_code=message.exit_code)


def as_error(refused: Refused) -> InstepError:
    """The error that another process ended with, to be raised here."""
    kinds: dict[str, type[InstepError]] = {}
    kinds |= {kind.__name__: kind for kind in (*InstepError.__subclasses__(), Unwanted)}
    error = kinds.get(refused.kind, WorkerError)(refused.text)
    error.exit_code = refused.exit_code
    return error


def sentence(error: BaseException) -> str:
    """`ValueError: the text`, on one line of bounded length; a hint if there is one."""
    text = printable(one_line(error))
    name = type(error).__name__
    return (f"{name}: {text}" if text else f"{name}, without a text") + _hint(text)


_HINTS = (
    ("out of bounds", "The model has too few outputs for the classes, or a label is wrong."),
    (
        "out of memory",
        "Use more train.micro_batches with train.merge = 'never', or a smaller global_batch.",
    ),
    *dict.fromkeys(
        ("dtype to be Long", "scalar type Long"),
        "Numbers of classes are whole numbers: give the target as target.long() in the dataset.",
    ).items(),
    *dict.fromkeys(
        ("got Double and Float", "double != float", "Input type (double)"),
        "The inputs are float64, as numpy makes them, and the model is float32: give them as "
        "x.float() in the dataset.",
    ).items(),
    (
        "Default process group has not been initialized",
        "instep makes the groups itself: leave DistributedDataParallel, FSDP and "
        "torch.distributed out of the recipe, and give the model as it is.",
    ),
    (
        "No module named",
        "Install it in the environment that instep runs in; if it is your own, name its folder in "
        "python_path of the job.",
    ),
    (
        "Expected more than 1 value per channel",
        "One sample alone reached a batch normalisation: use fewer train.micro_batches (with "
        "averaging, fewer sync.participants or local steps), a train.global_batch that leaves more "
        "samples for the last step of an epoch, or train.batch_norm = 'global'.",
    ),
)


def _hint(text: str) -> str:
    end = "" if text.endswith((".", "!", "?")) else "."
    return next((f"{end} {hint}" for part, hint in _HINTS if part in text), "")
