"""Compare two checkpoints, tensor by tensor and byte by byte.

It reads whole files and imports no torch. It does not check that they are intact:
`intact.py` does. Way in: `differences`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from instep.errors import CheckpointError
from instep.state.manifest import SUFFIX, folder_name, read_manifest


def checkpoint_of(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run / "checkpoints" / folder_name(step)


def differences(one: Path, other: Path) -> Iterator[tuple[str, str, str]]:
    """Group, tensor and how, of everything that differs between two checkpoints.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    ours, others = (read_manifest(each).files for each in (one, other))
    for file in sorted({*ours, *others}):
        mine = _read(one / file) if file in ours else {}
        theirs = _read(other / file) if file in others else {}
        for name in sorted({*mine, *theirs}):
            if name not in mine or name not in theirs:
                yield file.removesuffix(SUFFIX), name, "only one of the runs has it"
            elif mine[name] != theirs[name]:
                yield file.removesuffix(SUFFIX), name, _how(mine[name], theirs[name])


Kept = dict[str, tuple[str, bytes]]
"""Tensor to its type's name in the file, and its bytes."""


def saved(checkpoint: Path) -> Iterator[tuple[str, Kept]]:
    """Each group of tensors of a checkpoint, the model first."""
    for name in sorted(read_manifest(checkpoint).files):  # model, optimizer, scheduler, strategy
        yield name.removesuffix(SUFFIX), _read(checkpoint / name)


def _read(file: Path) -> Kept:
    try:
        tensors = deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from error
    return {name: (entry["dtype"], entry["data"]) for name, entry in tensors}


_FLOATS = {"F32": "<f4", "F64": "<f8"}


def _how(mine: tuple[str, bytes], theirs: tuple[str, bytes]) -> str:
    (kind, one), (other_kind, other) = mine, theirs
    if kind != other_kind or len(one) != len(other) or kind not in _FLOATS:
        return "other bytes"
    a, b = (np.frombuffer(data, _FLOATS[kind]) for data in (one, other))
    changed = a.view(np.uint8).reshape(len(a), -1) != b.view(np.uint8).reshape(len(b), -1)
    with np.errstate(all="ignore"):
        most = np.nanmax(np.abs(a.astype(np.float64) - b)) if len(a) else 0.0
    return f"{int(changed.any(1).sum())} of {len(a)} numbers, by up to {most:.2g}"
