"""The head of a safetensors file, looked at without torch, to refuse early what is none.

Only sizes and the list of tensors are read; whether they fit a model is for
`load.py`. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from instep.errors import CheckpointError
from instep.state.manifest import open_regular

_LARGEST = 100_000_000  # bytes of a head; the format allows no more
_PICKLES = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin, new and old


def check_header(path: Path) -> None:
    """Look whether a file can be a safetensors file, in a millisecond.

    Raises:
        CheckpointError: it is missing, unreadable, of another kind, or not of
            the size that its head says.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        refuse_pickle(path, start)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_LARGEST, size - 8):
            raise CheckpointError(f"{path} is no safetensors file: it does not begin like one.")
        head = file.read(length)
    wanted = 8 + length + _end_of_tensors(path, head)
    if size != wanted:
        how = "truncated" if size < wanted else "no sound safetensors file"
        raise CheckpointError(f"{path} is {how}: it has {size} bytes and should have {wanted}.")


def _end_of_tensors(path: Path, head: bytes) -> int:
    """Bytes that the tensors listed in `head` take."""
    try:
        entries = json.loads(head)
        offsets = [e["data_offsets"][1] for name, e in entries.items() if name != "__metadata__"]
        return max(map(int, offsets), default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise CheckpointError(
            f"{path} is no safetensors file: it does not begin like one."
        ) from None


def refuse_pickle(path: Path, start: bytes) -> None:
    """Refuse a file whose first bytes, `start`, are those of a file of torch.save.

    Raises:
        CheckpointError: it is one; the text says how to convert it.
    """
    if start.startswith(_PICKLES):
        raise CheckpointError(
            f"{path} is a file of torch.save, which may hold code, and no safetensors file. "
            "Where you trust it, convert it with safetensors.torch.save_file(state_dict, path)."
        )
