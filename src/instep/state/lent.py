"""A checkpoint from which ranks on other machines read the parts that they need.

The rank that has the folder describes it to all, and then serves each that reads: one request
names a piece and a box of it, the answer is its values. So nobody copies whole files. Way in:
`Lender` where the folder is, `borrowed` elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.state.boxes import read_cut
from instep.state.open_pieces import open_pieces
from instep.state.packing import pack_state, unpack_state
from instep.state.pieces import Pieces, TensorPiece
from instep.state.snapshot import DTYPES, TYPES, Snapshot, raw_bytes

_OPTIONS = "lent options"
_CHUNK_BYTES = 1 << 25

Part = tuple[slice, ...] | None


class Lender:
    """A checkpoint that is here.

    Args:
        checkpoint: its folder.

    Raises:
        CheckpointError: it cannot be read.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._opened = open_pieces(checkpoint, {})
        self._sources = list[Callable[[Part], Tensor]]()

    def description(self) -> Snapshot:
        """All that is needed to ask for pieces, and the small tensors; for `broadcast_snapshot`."""
        pieces, numbers, rows = self._opened.pieces, dict[int, int](), list[Any]()
        for name, piece in pieces.all():
            if id(piece.fetch) not in numbers:
                numbers[id(piece.fetch)] = len(self._sources)
                self._sources.append(piece.fetch)
            source = numbers[id(piece.fetch)]
            rows.append([name, DTYPES[piece.dtype], *piece.cut, piece.flat, source])
        tensors, skeleton = pack_state([pieces.numbers, pieces.options])
        facts = {"pieces": rows, _OPTIONS: skeleton, "facts": self._opened.facts}
        small = {**self._opened.tensors, _OPTIONS: tensors}
        return Snapshot(step=self._opened.step, tensors=small, facts=facts)

    def serve(self, comm: Comm, rank: int, device: torch.device) -> None:
        """Answer what a rank asks for, until it has all.

        Raises:
            CheckpointError: a piece cannot be read.
            PeerError: the rank was lost.
        """
        while asked := _receive_text(comm, rank, device):
            source, part = asked
            slices = None if part is None else tuple(slice(*ends) for ends in part)
            found = self._sources[source](slices).contiguous()
            _send_text(comm, rank, list(found.shape), device)
            for chunk in raw_bytes(found).split(_CHUNK_BYTES) if found.numel() else ():
                comm.send(chunk.to(device), rank).wait()


def borrowed(description: Snapshot, comm: Comm, root: int, device: torch.device) -> Snapshot:
    """The checkpoint that rank `root` describes and serves.

    Call `done` when nothing more is read.
    """

    def piece(dtype: torch.dtype, source: int) -> Callable[[Part], Tensor]:
        def fetch(part: Part) -> Tensor:
            ends = None if part is None else [(each.start, each.stop) for each in part]
            _send_text(comm, root, [source, ends], device)
            out = torch.empty(_receive_text(comm, root, device), dtype=dtype)
            for chunk in raw_bytes(out).split(_CHUNK_BYTES) if out.numel() else ():
                held = torch.empty(len(chunk), dtype=torch.uint8, device=device)
                comm.receive(held, root).wait()
                chunk.copy_(held)
            return out

        return fetch

    fetches, found = dict[int, Callable[[Part], Tensor]](), dict[str, list[TensorPiece]]()
    for name, kind, shape, box, flat, source in description.facts["pieces"]:
        fetch = fetches.setdefault(source, piece(TYPES[kind], source))
        ends = None if flat is None else (flat[0], flat[1])
        found.setdefault(name, []).append(
            TensorPiece(read_cut(shape, box), TYPES[kind], fetch, ends)
        )
    small = dict(description.tensors)
    numbers, options = unpack_state(small.pop(_OPTIONS, {}), description.facts[_OPTIONS])
    pieces = Pieces(found, "the checkpoint of the run", numbers=numbers, options=options)
    facts = description.facts["facts"]
    return Snapshot(step=description.step, tensors=small, facts=facts, pieces=pieces)


def done(comm: Comm, root: int, device: torch.device) -> None:
    """This rank has read all that it needs."""
    _send_text(comm, root, None, device)


def _send_text(comm: Comm, to: int, value: Any, device: torch.device) -> None:
    text = bytearray(json.dumps(value).encode())
    comm.send(torch.tensor([len(text)], device=device), to).wait()
    comm.send(torch.frombuffer(text, dtype=torch.uint8).to(device), to).wait()


def _receive_text(comm: Comm, source: int, device: torch.device) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    comm.receive(size, source).wait()
    text = torch.empty(int(size), dtype=torch.uint8, device=device)
    comm.receive(text, source).wait()
    return json.loads(bytes(text.cpu().numpy()))
