"""As slow_tiny.py, but nobody gets ready while there is a file `hold` in the working directory."""

import time
from pathlib import Path

import slow_tiny

import instep


def recipe(pause_s: float = 0.004) -> instep.Recipe:
    while Path("hold").exists():
        time.sleep(0.01)
    return slow_tiny.recipe(pause_s)
