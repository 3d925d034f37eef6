"""Which of several processes is to do something: the one that comes first."""

import os
from pathlib import Path


def first(mark: Path) -> bool:
    """Whether this process makes the file, in which it leaves its number."""
    try:
        with mark.open("x") as file:
            file.write(str(os.getpid()))
    except FileExistsError:
        return False
    return True
