"""The `[prepare]` table of a job: shards are made, or found made, before its run begins."""

from __future__ import annotations

import sys

from instep.errors import SpecError
from instep.spec import PrepareSpec
from instep.words import printable


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
    try:
        from instep.prepare.asked import Asked
        from instep.prepare.prepare import prepare
    except ModuleNotFoundError as error:
        raise SpecError(
            f"[prepare] needs the package {error.name}: pip install 'instep[data]'."
        ) from None

    def say(text: str) -> None:
        if not quiet:
            print(printable(text), file=sys.stderr, flush=True)

    asked = Asked(
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
    done = prepare(asked, say, workers=spec.workers)
    if done.manifest is None:
        raise KeyboardInterrupt
    if done.done_before < done.tasks:
        for line in done.lines()[:-1]:
            say(line)
