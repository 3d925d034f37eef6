"""The head of a safetensors file, looked at without torch, to refuse early what is none.

Only sizes and the list of tensors are read; whether they fit a model is for
`load.py`. Nothing is ever unpickled. Way in: `check_header` for whether,
`spans` for where each tensor lies.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import NamedTuple

from instep.errors import CheckpointError
from instep.state.manifest import open_regular

_LARGEST = 100_000_000  # bytes of a head; the format allows no more
_PICKLES = (b"PK\x03\x04", b"\x80\x02")  # how files of torch.save begin, new and old


class Span(NamedTuple):
    """Where one tensor lies in a file."""

    kind: str
    """Its type, as the format names it: `F32`, `I64`, ..."""
    start: int
    """Its bytes are [start, stop) of the file."""
    stop: int


def check_header(path: Path) -> None:
    """Look whether a file can be a safetensors file, in a millisecond.

    Raises:
        CheckpointError: as `spans`.
    """
    spans(path)


def spans(path: Path, source: Path | None = None) -> dict[str, Span]:
    """Each tensor of a safetensors file, by name, in the order of the file's list.

    Only the size of the file is held against the list: that spans overlap, or
    lie elsewhere than they should, is for whoever reads them to find.

    Args:
        path: the file.
        source: what to call it in messages, where it is a copy.

    Raises:
        CheckpointError: it is missing, unreadable, of another kind, or not of
            the size that its head says.
    """
    name = source or path
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        refuse_pickle(name, start)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(_LARGEST, size - 8):
            raise CheckpointError(f"{name} is no safetensors file: it does not begin like one.")
        head = file.read(length)
    found = _listed(name, head, 8 + length)
    wanted = max((span.stop for span in found.values()), default=8 + length)
    if size != wanted:
        how = "truncated" if size < wanted else "no sound safetensors file"
        raise CheckpointError(f"{name} is {how}: it has {size} bytes and should have {wanted}.")
    return found


def _listed(path: Path, head: bytes, begin: int) -> dict[str, Span]:
    """The tensors that `head` lists; their bytes begin at `begin`."""
    try:
        entries = json.loads(head)
        found = {}
        for name, entry in entries.items():
            if name != "__metadata__":
                first, stop = map(int, entry["data_offsets"])
                found[name] = Span(entry["dtype"], begin + first, begin + stop)
        return found
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
