"""The model that a mesh leaves, as one ordinary file that no process ever holds as a whole.

Each rank sends its part of one tensor after the other to rank 0, which writes each when it is
complete: the file is, byte for byte, what `staging.save_model` writes of the whole model. Way in:
`lend` on every rank of the replica but the first, `Lent` and `save_whole` on that; `extract` for
the model of a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import CheckpointError
from instep.state.boxes import Box, BoxCut, elements, extent, gap, inside, read_cut, whole
from instep.state.files.manifest import AVERAGE, reason
from instep.state.files.model_file import HASH_BLANK, HASH_KEY
from instep.state.files.room import RESERVE_BYTES, check_room
from instep.state.files.staging import (
    SAVING,
    file_header,
    in_file_order,
    spans_of,
    sync,
    sync_path,
)
from instep.state.open_pieces import open_pieces
from instep.state.pieces import Pieces
from instep.state.snapshot import DTYPES, TYPES, raw_bytes, tied_names

PART_BYTES = 1 << 24
"""Of a tensor that is read in parts, at a time."""

DIGEST_KEY = "parameters_sha256"
"""Entry of the file's metadata: what `snapshot.parameters_sha256` says of the whole model."""


def lend(comm: Comm, own: Mapping[str, Tensor], cuts: Mapping[str, BoxCut]) -> None:
    """Send this rank's parts to rank 0, which calls `Lent` and gathers every tensor.

    Args:
        comm: a group whose first ranks are those of the replica.
        own: what this rank writes of the model, by name.
        cuts: of those that are not whole.

    Raises:
        PeerError: a rank was lost.
    """
    text = json.dumps(_description(own, cuts)).encode()
    device = _device(own)
    comm.send(torch.tensor([len(text)], device=device), 0).wait()
    comm.send(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device), 0).wait()
    tied = tied_names(own)
    for name in in_file_order({name: own[name] for name in own if name not in tied}):
        if own[name].numel():
            comm.send(raw_bytes(own[name]).to(device), 0).wait()


class Lent:
    """The whole tensors of a replica, on its rank 0, one at a time.

    Args:
        comm: a group whose first ranks are those of the replica.
        ranks: how many they are; all but this one call `lend`.
        own, cuts: as for `lend`.

    Raises:
        CheckpointError: a part of a tensor is on no rank.
        PeerError: a rank was lost.
    """

    def __init__(
        self, comm: Comm, ranks: int, own: Mapping[str, Tensor], cuts: Mapping[str, BoxCut]
    ) -> None:
        self._comm, self._own, self._device = comm, own, _device(own)
        said = [_description(own, cuts), *(self._told(rank) for rank in range(1, ranks))]
        self.tied: dict[str, str] = {}
        """Later name to first name, as `snapshot.tied_names`."""
        self.entries: dict[str, Tensor] = {}
        """Whole tensors without memory, of the first names."""
        for each in said:
            self.tied.update(each["tied"])
        self._where: dict[str, list[tuple[int, Box]]] = {}
        for rank, each in enumerate(said):
            for name, (dtype, shape, box) in each["tensors"].items():
                if name in self.tied:
                    continue
                cut = read_cut(shape, box)
                self.entries[name] = torch.empty(shape, dtype=TYPES[dtype], device="meta")
                held = self._where.setdefault(name, [])
                if elements(cut.box):
                    held.append((rank, cut.box))
        for name, entry in self.entries.items():
            if lacking := gap(entry.shape, [box for _, box in self._where[name]]):
                raise CheckpointError(f"no rank has {list(lacking)} of {name}: it cannot be saved.")

    def _told(self, rank: int) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._comm.receive(size, rank).wait()
        text = torch.empty(int(size), dtype=torch.uint8, device=self._device)
        self._comm.receive(text, rank).wait()
        said: dict[str, Any] = json.loads(bytes(text.cpu().numpy()))
        return said

    def gather(self, name: str) -> Tensor:
        """A whole tensor, contiguous, on the CPU. Names are asked for once, in the file's order.

        Raises:
            PeerError: a rank was lost.
        """
        entry = self.entries[name]
        out = torch.empty(entry.shape, dtype=entry.dtype)
        for rank, box in self._where[name]:
            part = self._own[name] if rank == self._comm.rank else self._received(rank, box, entry)
            out[inside(box, whole(entry.shape))] = part.to("cpu")
        return out

    def _received(self, rank: int, box: Box, like: Tensor) -> Tensor:
        size = elements(box) * like.itemsize
        data = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._comm.receive(data, rank).wait()
        return data.view(like.dtype).view(extent(box))


def _description(own: Mapping[str, Tensor], cuts: Mapping[str, BoxCut]) -> dict[str, Any]:
    return {
        "tied": tied_names(own),
        "tensors": {
            name: (
                DTYPES[tensor.dtype],
                *cuts.get(name, BoxCut(tuple(tensor.shape), whole(tensor.shape))),
            )
            for name, tensor in own.items()
        },
    }


def _device(own: Mapping[str, Tensor]) -> torch.device:
    return next((tensor.device for tensor in own.values()), torch.device("cpu"))


def save_whole(
    path: Path,
    entries: Mapping[str, Tensor],
    tied: Mapping[str, str],
    gather: Callable[[str], Tensor | Iterable[Tensor]],
    metadata: Mapping[str, str],
    reserve: int = RESERVE_BYTES,
) -> tuple[int, str]:
    """Write a model as one safetensors file, atomically, tensor by tensor.

    Args:
        path: the file.
        entries: name to a tensor of the whole's shape and type, which needs no memory.
        tied: each further name of a tensor to the one that is in `entries`.
        gather: gives the values of one, or parts of them, rows after rows; called once for each,
            in the file's order, also if the disk refuses: other ranks send them.
        metadata: as for `save_model`, with a place for `parameters_sha256`.
        reserve: bytes that are left free on the disk.

    Returns:
        The file's size in bytes, and the SHA-256 of the parameters.

    Raises:
        CheckpointError: the file cannot be written.
        PeerError: a rank was lost.
    """
    spans = spans_of(entries)
    facts = {"format": "pt", **metadata, DIGEST_KEY: HASH_BLANK, HASH_KEY: HASH_BLANK, **tied}
    header = file_header(entries, spans, facts)
    size = len(header) + max((stop for _, stop in spans.values()), default=0)
    temporary, left = path.with_name(f"{SAVING}{path.name}"), iter(spans)
    try:
        check_room(path.parent, size, reserve)
        with temporary.open("wb+") as file:
            file.write(header)
            for name in left:
                found = gather(name)
                for part in (found,) if isinstance(found, Tensor) else found:
                    file.write(raw_bytes(part).numpy().data)
            file.flush()
            digest = _digest(temporary, len(header), spans, tied)
            _fill_in(file, header, DIGEST_KEY, digest)
            file.flush()
            file.seek(0)
            own = hashlib.file_digest(file, "sha256").hexdigest()
            _fill_in(file, header, HASH_KEY, own)
            sync(file)
        temporary.rename(path)
        sync_path(path.parent)
    except CheckpointError:
        temporary.unlink(missing_ok=True)
        raise
    except OSError as error:
        temporary.unlink(missing_ok=True)
        for name in left:
            gather(name)
        raise CheckpointError(f"{path} was not saved: {reason(error)}.") from error
    return size, digest


def extract(checkpoint: Path, target: Path) -> int:
    """Write the model of a checkpoint as one file, also where a mesh or servers have saved parts of
    it, and with the moving average of its parameters if there is one; returns its size in bytes.

    Raises:
        CheckpointError: a file of the checkpoint is damaged or missing; nothing is written.
        OSError: `target` cannot be written.
    """
    found = open_pieces(checkpoint, {})
    pieces, average = found.pieces, found.tensors.get(AVERAGE, {})
    entries, tied, firsts = dict[str, Tensor](), dict[str, str](), dict[int, str]()
    for name in pieces.names("model"):
        of = f"model/{name}"
        first = next((firsts[mark] for mark in pieces.marks(of) if mark in firsts), name)
        firsts.update(dict.fromkeys(pieces.marks(of), first))
        if first != name:
            tied[name] = first
        else:
            entries[name] = torch.empty(pieces.shape(of), dtype=pieces.dtype(of), device="meta")

    def values(name: str) -> Tensor | Iterator[Tensor]:
        return average[name] if name in average else in_parts(pieces, f"model/{name}")

    try:
        return save_whole(target, entries, tied, values, metadata={})[0]
    except CheckpointError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise


def in_parts(pieces: Pieces, name: str) -> Iterator[Tensor]:
    """A tensor of a checkpoint, rows after rows; each part takes little memory.

    Raises:
        CheckpointError: as `Pieces.read`.
    """
    shape = pieces.shape(name)
    if not shape:
        yield pieces.read(name)
        return
    row = pieces.dtype(name).itemsize * math.prod(shape[1:])
    some = max(1, PART_BYTES // max(1, row))
    for start in range(0, shape[0], some):
        yield pieces.read(name, ((start, min(start + some, shape[0])), *whole(shape[1:])))


def _fill_in(file: Any, header: bytes, key: str, digest: str) -> None:
    file.seek(header.index(f'"{key}":"'.encode()) + len(key) + 4)
    file.write(digest.encode("ascii"))


def _digest(
    path: Path, start: int, spans: Mapping[str, tuple[int, int]], tied: Mapping[str, str]
) -> str:
    """As `snapshot.parameters_sha256`: sorted by name, tied ones under each of their names."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for name in sorted([*spans, *tied]):
            first, stop = spans[tied.get(name, name)]
            file.seek(start + first)
            for at in range(first, stop, PART_BYTES):
                digest.update(file.read(min(PART_BYTES, stop - at)))
    return digest.hexdigest()
