"""Broadcast a snapshot from the memory of one rank to all ranks of a group.

A worker that joins a run copies parameters, optimizer state and the rest from a peer, without
the disk. A header of plain JSON says what follows; the tensors follow as bytes, many at a
time. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.state.boxes import read_cut
from instep.state.snapshot import DTYPES, TYPES, Snapshot, tied_names

CHUNK_BYTES = 1 << 25
"""Tensors are sent together up to this many bytes; a larger one is sent alone."""

_ALIGNED = 8


def broadcast_snapshot(
    snapshot: Snapshot | None, comm: Comm, root: int, device: torch.device
) -> Snapshot:
    """Broadcast the snapshot of rank `root`; every rank of the group calls this.

    Args:
        snapshot: on `root`; ignored elsewhere.
        comm: the group.
        root: the rank whose snapshot is sent.
        device: on which tensors are sent and received.

    Returns:
        On `root` its own snapshot, elsewhere an equal one: values, types, facts and
        ties; every tensor in memory of its own.

    Raises:
        PeerError: a rank was lost.
    """
    mine = snapshot if comm.rank == root else None
    assert (mine is not None) == (comm.rank == root), "the root has a snapshot"
    header = _broadcast_header(mine, comm, root, device)
    entries = [tuple(entry) for entry in header["tensors"]]
    groups: dict[str, dict[str, Tensor]] = {group: {} for group in header["groups"]}
    for chunk in _chunks(entries):
        flat = torch.empty(sum(_padded(e) for e in chunk), dtype=torch.uint8, device=device)
        places = list(_places(chunk, flat))
        if mine is not None:
            for (group, name, *_), place in zip(chunk, places, strict=True):
                place.copy_(mine.tensors[group][name])
        comm.broadcast(flat, root)
        if mine is None:
            for (group, name, *_), place in zip(chunk, places, strict=True):
                groups[group][name] = place.clone()
    if mine is not None:
        return mine
    for group, ties in header["ties"].items():
        groups[group].update({name: groups[group][kept] for name, kept in ties.items()})
    cuts = {name: read_cut(*row) for name, row in header["cuts"].items()}
    return Snapshot(step=header["step"], tensors=groups, facts=header["facts"], cuts=cuts)


def _broadcast_header(
    mine: Snapshot | None, comm: Comm, root: int, device: torch.device
) -> dict[str, Any]:
    text = json.dumps(_header(mine)).encode() if mine is not None else b""
    header: dict[str, Any] = json.loads(broadcast_bytes(text, comm, root, device))
    return header


def broadcast_bytes(data: bytes, comm: Comm, root: int, device: torch.device) -> bytes:
    """What `root` has of any length, on every rank; what others give is not looked at.

    Raises:
        PeerError: a rank was lost.
    """
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    comm.broadcast(size, root)
    told = torch.zeros(int(size), dtype=torch.uint8)
    if comm.rank == root:
        told.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    told = told.to(device)
    comm.broadcast(told, root)
    return bytes(told.cpu().numpy())


def _header(snapshot: Snapshot) -> dict[str, Any]:
    ties = {group: tied_names(tensors) for group, tensors in snapshot.tensors.items()}
    return {
        "step": snapshot.step,
        "facts": snapshot.facts,
        "cuts": snapshot.cuts,
        "groups": list(snapshot.tensors),
        "ties": ties,
        "tensors": [
            (group, name, DTYPES[tensor.dtype], list(tensor.shape))
            for group, tensors in snapshot.tensors.items()
            for name, tensor in tensors.items()
            if name not in ties[group]
        ],
    }


def _chunks(entries: list[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    filled = 0
    for entry in entries:
        size = _padded(entry)
        if chunk and filled + size > CHUNK_BYTES:
            yield chunk
            chunk, filled = [], 0
        chunk.append(entry)
        filled += size
    if chunk:
        yield chunk


def _padded(entry: Any) -> int:
    _, _, kind, shape = entry
    size = TYPES[kind].itemsize * torch.Size(shape).numel()
    return -(-size // _ALIGNED) * _ALIGNED


def _places(chunk: list[Any], flat: Tensor) -> Iterator[Tensor]:
    """For each tensor a view of its part of `flat`."""
    at = 0
    for entry in chunk:
        _, _, kind, shape = entry
        dtype = TYPES[kind]
        size = dtype.itemsize * torch.Size(shape).numel()
        yield flat[at : at + size].view(dtype).view(shape)
        at += _padded(entry)
