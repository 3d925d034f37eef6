"""What the sources share: types, and words for what a folder holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

Sample = tuple[Tensor, Tensor]
"""(inputs, target)."""


def folder_contents(folder: Path) -> str:
    """What stands in a folder, for the error that misses something in it."""
    if not folder.is_dir():
        return f"There is no folder {folder}."
    names = sorted(path.name for path in folder.iterdir())
    listed = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    return f"The folder holds: {listed or 'nothing'}."
