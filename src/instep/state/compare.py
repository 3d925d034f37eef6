"""Compare two checkpoints, tensor by tensor and byte by byte.

It reads whole files and imports no torch, unless a mesh saved one of them: then whole tensors are
put together, one by one. It does not check that they are intact: `intact.py` does. Way in:
`differences`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, deserialize

from instep.errors import CheckpointError
from instep.state.files.manifest import SUFFIX, folder_name, is_meshed, read_manifest


def checkpoint_of(run: Path, step: int) -> Path:
    """Where a run keeps the checkpoint of a step."""
    return run / "checkpoints" / folder_name(step)


def differences(one: Path, other: Path) -> Iterator[tuple[str, str, str]]:
    """Group, tensor and how, of everything that differs between two checkpoints.

    Raises:
        CheckpointError: one of them cannot be read.
    """
    manifests = [read_manifest(each) for each in (one, other)]
    if any(map(is_meshed, manifests)):
        yield from _differences_of_tensors(one, other)
        return
    ours, others = (manifest.files for manifest in manifests)
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
    manifest = read_manifest(checkpoint)
    if is_meshed(manifest):
        groups: defaultdict[str, Kept] = defaultdict(dict)
        for name, (_, read) in _tensors(checkpoint).items():
            group, _, own = name.partition("/")
            groups[group][own] = read()
        yield from sorted(groups.items())
        return
    for name in sorted(manifest.files):  # model, optimizer, scheduler, strategy
        yield name.removesuffix(SUFFIX), _read(checkpoint / name)


_OF_ONE_MESH = ("strategy", "rank-")
"""What a strategy remembers of the parts that a rank has; no other mesh has the same parts."""

Reader = tuple[object, Callable[[], tuple[str, bytes]]]


def _differences_of_tensors(one: Path, other: Path) -> Iterator[tuple[str, str, str]]:
    mine, theirs = _tensors(one), _tensors(other)
    for name in sorted({*mine, *theirs}):
        group, _, own = name.partition("/")
        if name not in mine or name not in theirs:
            if not group.startswith(_OF_ONE_MESH):
                yield group, own, "only one of the runs has it"
            continue
        (shape, read), (other_shape, read_other) = mine[name], theirs[name]
        a, b = read(), read_other()
        if a != b or shape != other_shape:
            yield group, own, _how(a, b)


def _tensors(checkpoint: Path) -> dict[str, Reader]:
    """The whole tensors of a checkpoint, as `GROUP/NAME`; each is read when it is asked for."""
    import torch

    from instep.state.open_pieces import open_pieces
    from instep.state.snapshot import DTYPES, raw_bytes

    def kept(read: Callable[[], torch.Tensor]) -> tuple[str, bytes]:
        tensor = read()
        return DTYPES[tensor.dtype], raw_bytes(tensor).numpy().tobytes()

    snapshot = open_pieces(checkpoint, {})
    pieces, found = snapshot.pieces, dict[str, Reader]()
    for name in pieces:
        found[name] = pieces.shape(name), partial(kept, partial(pieces.read, name))
    for group, tensors in snapshot.tensors.items():
        for name, tensor in tensors.items():
            found[f"{group}/{name}"] = tuple(tensor.shape), partial(kept, tensor.detach)
    return found


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
