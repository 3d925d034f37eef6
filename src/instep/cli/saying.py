"""Prints what a command has to say.

Runs, jobs and messages are not always ours: their control characters could move a terminal's
cursor, change its title or hide lines, and are left out.
"""

from __future__ import annotations

import sys

from instep.words import fit_to_print


def say(text: object = "", *, aside: bool = False) -> None:
    """Print lines, without control characters.

    Args:
        text: the lines.
        aside: to standard error, at once.
    """
    file = sys.stderr if aside else sys.stdout
    print(fit_to_print(str(text), sys.maxsize), file=file, flush=aside)


def say_aside(text: object) -> None:
    """Print lines to standard error."""
    say(text, aside=True)
