"""Prepares data for the command and for the `[prepare]` table of a job. Way in: `prepared`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from instep.errors import SpecError
from instep.spec import PrepareSpec
from instep.words import printable

if TYPE_CHECKING:
    from instep.prepare.prepare import Prepared


def prepared(who: str, say: Callable[[str], None], workers: int | None, **asked: Any) -> Prepared:
    """Make shards.

    Args:
        who: asks for them, for a message.
        say: prints a line.
        workers: processes; None: one for each processor.
        asked: fields of `prepare.asked.Asked`.

    Raises:
        InstepError: they cannot be made; or a package is not installed.
    """
    try:
        from instep.prepare.asked import Asked
        from instep.prepare.prepare import prepare
    except ModuleNotFoundError as error:
        raise SpecError(
            f"{who} needs the package {error.name}: pip install 'instep[data]'."
        ) from None
    return prepare(Asked(**asked), say, workers=workers)


def prepare_data(spec: PrepareSpec, *, quiet: bool) -> None:
    """Make the shards that a job asks for; nothing if it asks for none.

    Args:
        spec: of the job.
        quiet: print nothing.

    Raises:
        InstepError: they cannot be made.
        KeyboardInterrupt: a signal has come; what was done is kept.
    """
    if not spec.sources:
        return

    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr, flush=True)

    done = prepared(
        "[prepare]",
        say,
        spec.workers,
        sources=list(spec.sources),
        to=spec.to,
        map=spec.map or None,
        key=spec.key or None,
        reduce=spec.reduce or None,
        shuffle=spec.shuffle,
        tokens=spec.tokens or None,
        length=spec.length,
        unreadable=spec.unreadable,
        types=dict(spec.types),
        seed=spec.seed,
    )
    if done.manifest is None:
        raise KeyboardInterrupt
    if done.done_before < done.tasks:
        for line in done.lines()[:-1]:
            say(line)
