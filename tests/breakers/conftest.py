"""Where the loops, their judge and the cells of a table lie."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / name) for name in ("parity", "families")]
