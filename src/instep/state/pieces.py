"""Read any box of any tensor of a checkpoint, whatever the mesh that saved it.

A checkpoint of plain replicas has whole tensors, one of a mesh the parts of its ranks (groups
`part-N`, with their boxes in the file's metadata), and one of servers flat ranges of the
optimizer's state (groups `shard-N`) and every so many rows of embeddings (groups `table-N`). Here
all are pieces of tensors that have the names `model/NAME`, `aside/NAME` and
`optimizer/PARAMETER/STATE` (`optimizer-TURN/...` where a step has several updates). A file is
compared with its SHA-256 before the first of its data is used.
Way in: `open_pieces` for a folder, `held_pieces` for a snapshot in memory.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.boxes import Box, Cut, elements, extent, gap, inside, meet, read_cut, whole
from instep.state.files.manifest import SUFFIX, FileEntry, check_file, read_manifest
from instep.state.files.model_file import open_tensors
from instep.state.packing import unpack_state
from instep.state.snapshot import COPIES, PART, TYPES, Snapshot, tied_names

CUTS = "cuts"
"""Entry of a part's metadata: JSON, name to [shape, box] of each tensor that is not whole."""

SHARD = "shard-"
"""Begins the name of a group of tensors that one server has written: its part of the optimizer's
state."""

TABLE = "table-"
"""The same, of its rows of embeddings, named as here."""

ROWS = "rows"
"""Entry of such a file's metadata: JSON, name to [rows of the whole, first, step]."""


class Piece(NamedTuple):
    """A part of a tensor, and where its values are."""

    cut: Cut
    dtype: torch.dtype
    fetch: Callable[[tuple[slice, ...] | None], Tensor]
    """Gives the values, or some of them; they may change with the source."""
    flat: tuple[int, int] | None = None
    """[start, stop) of the flattened tensor, where the part is no box."""
    every: tuple[int, int] | None = None
    """The first of its rows and the distance to the next, where these are the part."""


class Pieces:
    """The tensors of a checkpoint, by name, each read when it is asked for.

    Args:
        found: the pieces of each tensor, and its whole shape.
        source: where they are from, for messages.
        numbers: what an optimizer keeps beside tensors, as `optimizer/PARAMETER/STATE`.
        options: of each optimizer, by the name of its group, its state dict without its state.
        partial: whether they are what one rank has, and need not be all of each tensor.

    Raises:
        CheckpointError: a part of a tensor is in none of the pieces; names it.
    """

    def __init__(
        self,
        found: Mapping[str, Sequence[Piece]],
        source: object,
        *,
        numbers: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        partial: bool = False,
    ) -> None:
        self._found, self._source, self._partial = dict(found), source, partial
        self.numbers, self.options = dict(numbers or {}), dict(options or {})
        for name, pieces in self._found.items():
            self._check(name, pieces)

    def _check(self, name: str, pieces: Sequence[Piece]) -> None:
        first = pieces[0]
        for piece in pieces:
            if piece.cut.shape != first.cut.shape or piece.dtype != first.dtype:
                raise CheckpointError(
                    f"{self._source}: {name} is {first.dtype} {list(first.cut.shape)} in one file "
                    f"and {piece.dtype} {list(piece.cut.shape)} in another: they are of two models."
                )
        missing: object = None
        if first.flat is not None:
            ends = [0, *(piece.flat[1] for piece in pieces if piece.flat)]
            whole_size = elements(whole(first.cut.shape))
            if [piece.flat[0] for piece in pieces if piece.flat] != ends[:-1] or (
                ends[-1] != whole_size
            ):
                missing = f"some of its {whole_size} elements"
        elif first.every is not None:
            there = {piece.every for piece in pieces}
            if there != {(n, len(pieces)) for n in range(len(pieces))}:
                missing = f"some of its {first.cut.shape[0]} rows"
        elif not self._partial:
            lacking = gap(first.cut.shape, [piece.cut.box for piece in pieces])
            missing = lacking if lacking is None else list(lacking)
        if missing is not None:
            raise CheckpointError(
                f"{self._source}: a part of {name} {list(first.cut.shape)} is in none of its files "
                f"({missing}). Use another checkpoint."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def all(self) -> Iterator[tuple[str, Piece]]:
        """Every piece, with the name of its tensor."""
        return ((name, piece) for name, pieces in self._found.items() for piece in pieces)

    def names(self, kind: str) -> list[str]:
        """What follows `KIND/` in the names of that kind."""
        return [name[len(kind) + 1 :] for name in self._found if name.startswith(f"{kind}/")]

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        return self._found[name][0].cut.shape

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor."""
        return self._found[name][0].dtype

    def like(self, name: str) -> Tensor:
        """A tensor of the whole's shape and type, without values."""
        return torch.empty(self.shape(name), dtype=self.dtype(name), device="meta")

    def marks(self, name: str) -> set[int]:
        """Of the places where a tensor's values are; two names have one in common if tied."""
        return {id(piece.fetch) for piece in self._found.get(name, ())}

    def same(self, one: str, other: str) -> bool:
        """Whether two names were tied when they were saved."""
        return not self.marks(one).isdisjoint(self.marks(other))

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A copy of what is in a box of a tensor, on the CPU; without one, of the whole tensor.

        Nothing else is read, except of a tensor in flat ranges.

        Raises:
            CheckpointError: it cannot be read, or a file is not the one that was saved.
        """
        pieces = self._found[name]
        box = whole(self.shape(name)) if box is None else box
        out = torch.empty(extent(box), dtype=pieces[0].dtype)
        if not out.numel():
            return out
        if pieces[0].flat is not None:
            flat = torch.cat([piece.fetch(None).reshape(-1) for piece in pieces])
            return out.copy_(flat.view(self.shape(name))[inside(box, whole(self.shape(name)))])
        if pieces[0].every is not None:
            for piece in pieces:
                _copy_rows(piece, out, box)
            return out
        filled = set[Box]()
        for piece in pieces:
            both = meet(piece.cut.box, box)
            if both is None or both in filled:
                continue
            part = None if both == piece.cut.box else inside(both, piece.cut.box)
            out[inside(both, box)] = piece.fetch(part)
            filled.add(both)
        if self._partial and sum(map(elements, filled)) != out.numel():
            raise CheckpointError(f"{self._source} does not hold {list(box)} of {name}.")
        return out


def _copy_rows(piece: Piece, out: Tensor, box: Box) -> None:
    """Copy those rows of a box that are in a piece."""
    assert piece.every is not None
    (first, step), ((start, stop), *_) = piece.every, box
    low, high = (max(0, -(-(at - first) // step)) for at in (start, stop))  # of its own rows
    if low < high:
        own = piece.fetch((slice(low, high), *(slice(*each) for each in box[1:])))
        out[first + low * step - start :: step] = own


def held_pieces(snapshot: Snapshot, source: object) -> Pieces:
    """The parts that one rank has, as its snapshot holds them in memory."""
    found: dict[str, list[Piece]] = {}
    for group in (PART, COPIES):
        tensors = snapshot.tensors.get(group, {})
        tied = tied_names(tensors)
        for name, tensor in tensors.items():
            shape = tuple(tensor.shape)
            cut = snapshot.cuts.get(name, Cut(shape, whole(shape)))
            first = found[tied[name]][0] if name in tied else None
            found[name] = [first or Piece(cut, tensor.dtype, _slicer(tensor))]
    options = {
        group: unpack_state(snapshot.tensors.get(group, {}), skeleton)
        for group, skeleton in snapshot.facts.items()
        if _of_optimizer(group)
    }
    return Pieces(found, source, options=options, partial=True)


def _slicer(tensor: Tensor) -> Callable[[tuple[slice, ...] | None], Tensor]:
    return lambda part: tensor if part is None else tensor[part]


def _of_optimizer(group: str) -> bool:
    return group == "optimizer" or group.startswith("optimizer-")


def open_pieces(path: Path, order: Mapping[str, Sequence[str]]) -> Snapshot:
    """A checkpoint folder as a snapshot whose large tensors are read when they are asked for.

    Groups that are neither model nor optimizer state are read at once.

    Args:
        path: the folder.
        order: by the group of each optimizer, the names of its parameters in their order, for
            checkpoints that do not name them; their numbers are their names where it is left out.

    Raises:
        CheckpointError: a file is damaged or missing, or has not what the others need.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is no checkpoint: there is no such folder.")
    manifest = read_manifest(path)
    files = {
        name.removesuffix(SUFFIX): _File(path / name, each) for name, each in manifest.files.items()
    }
    found: defaultdict[str, list[Piece]] = defaultdict(list)
    tensors: dict[str, dict[str, Tensor]] = {}
    servers = list[_File]()
    for group, file in files.items():
        if group.startswith(f"{PART}-"):
            for name, piece in file.pieces():
                found[name].append(piece)
        elif group.startswith(TABLE):
            for name, piece in file.pieces():
                if piece.cut.shape or name not in found:  # a number is the same on all servers
                    found[name].append(piece)
        elif group in ("model", "aside", "own"):
            for name, piece in file.pieces():
                found[f"{group}/{name}"].append(piece)
        elif group.startswith(SHARD):
            servers.append(file)
        elif not _of_optimizer(group):
            tensors[group] = file.all()
    numbers, options = dict[str, Any](), dict[str, Any]()
    for group, skeleton in manifest.facts.items():
        if _of_optimizer(group):
            names = manifest.facts.get(f"parameters{group.removeprefix('optimizer')}")
            kept = _Kept(files[group]) if group in files else {}
            state = unpack_state(kept, skeleton)
            others = {n: each for n, each in state.get("state", {}).items() if isinstance(n, str)}
            options[group] = {**state, "state": others}  # what it keeps for no parameter
            named = names or order.get(group)
            for name, value in _states(group, state, named, path):
                if isinstance(value, Piece):
                    found[name].append(value)
                else:
                    numbers[name] = value
    for name, piece in _flat(servers, found):
        found[name].append(piece)
    for pieces in found.values():
        pieces.sort(key=lambda piece: piece.flat or (0, 0))
    read = Pieces(found, path, numbers=numbers, options=options)
    return Snapshot(step=manifest.step, tensors=tensors, facts=manifest.facts, pieces=read)


def _states(
    group: str, state: Mapping[str, Any], names: Sequence[str] | None, path: Path
) -> Iterable[tuple[str, Any]]:
    """What a plain optimizer kept, by the names of its parameters."""
    for number, kept in state.get("state", {}).items():
        if isinstance(number, str):
            continue
        if names is None:  # they are not looked for by name
            yield from ((f"{group}/{number}/{name}", value) for name, value in kept.items())
            continue
        if not isinstance(number, int) or number >= len(names):
            raise CheckpointError(
                f"{path} keeps optimizer state for parameter {number} without its name, and the "
                f"optimizer here has {len(names)} parameters. Resume it once without stages "
                "in [mesh], and save a checkpoint there."
            )
        for name, value in kept.items():
            yield f"{group}/{names[number]}/{name}", value


def _flat(
    servers: Sequence[_File], found: Mapping[str, Sequence[Piece]]
) -> Iterable[tuple[str, Piece]]:
    for file in servers:
        for key, piece in file.pieces():
            parameter, kept, place = key.rsplit("/", 2)
            name, start, stop = f"optimizer/{parameter}/{kept}", *map(int, place.split(":"))
            if not piece.cut.shape:  # a number is the same in all pieces
                if start == 0:
                    yield name, piece
                continue
            like = found.get(f"model/{parameter}", [piece])[0].cut.shape
            yield name, piece._replace(cut=Cut(like, whole(like)), flat=(start, stop))


class _Kept(Mapping[str, Any]):
    """The tensors of a packed optimizer: pieces of its state, and the values of the rest."""

    def __init__(self, file: _File) -> None:
        self._file = file
        self._pieces = dict(file.pieces())

    def __getitem__(self, key: str) -> Any:
        piece = self._pieces[key]
        return piece if key.startswith("state.") else piece.fetch(None).clone()

    def __iter__(self) -> Any:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class _File:
    """One file of a checkpoint, whose data are checked before they are used.

    A tensor is mapped into memory only while it is read, so that no limit on memory counts more.

    Args:
        path: the file.
        entry: of the manifest.
    """

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self._path, self._entry, self._checked = path, entry, False
        with open_tensors(path) as file:
            self._entries, self._facts = file.entries, file.metadata
        if path.stat().st_size != entry.size_bytes:
            check_file(path, entry)  # says how it differs

    def pieces(self) -> list[tuple[str, Piece]]:
        """Each name with its piece; tied names have the same `fetch`."""
        facts = self._facts
        try:
            cuts = {name: read_cut(*row) for name, row in json.loads(facts.get(CUTS, "{}")).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._path} is damaged: its cuts are {error}.") from error
        own, rows = dict[str, Piece](), self.rows()
        for name, (dtype, shape, *_) in self._entries.items():
            if name in rows:
                count, *every = rows[name]
                cut = Cut((count, *shape[1:]), whole((count, *shape[1:])))
                own[name] = Piece(
                    cut, TYPES[dtype], self._fetcher(name), every=(every[0], every[1])
                )
                continue
            cut = cuts.get(name, Cut(shape, whole(shape)))
            if extent(cut.box) != shape or len(cut.box) != len(cut.shape):
                raise CheckpointError(
                    f"{self._path} is damaged: {name} has the shape {list(shape)} and is "
                    f"said to be {list(cut.box)} of {list(cut.shape)}."
                )
            own[name] = Piece(cut, TYPES[dtype], self._fetcher(name))
        tied = {
            a: own[k]
            for a, k in facts.items()
            if k in own and a not in own and a not in (CUTS, ROWS)
        }
        return [*own.items(), *tied.items()]

    def rows(self) -> dict[str, tuple[int, int, int]]:
        """Of tensors that are every so many rows: those of the whole, the first, the distance."""
        try:
            given = json.loads(self._facts.get(ROWS, "{}")).items()
            rows = {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in given}
            for name, (count, first, step) in rows.items():
                if len(range(first, count, step)) != self._entries[name].shape[0]:
                    raise ValueError(f"not those of {name}")
        except (
            ValueError,
            TypeError,
            AttributeError,
            KeyError,
            IndexError,
            RecursionError,
        ) as error:
            raise CheckpointError(f"{self._path} is damaged: its rows are {error}.") from error
        return rows

    def all(self) -> dict[str, Tensor]:
        """Copies of all its tensors; tied ones are one tensor."""
        read = dict[int, Tensor]()
        return {
            name: read.setdefault(id(piece.fetch), piece.fetch(None).clone())
            for name, piece in self.pieces()
        }

    def _fetcher(self, name: str) -> Callable[[tuple[slice, ...] | None], Tensor]:
        kind, shape, start, size = self._entries[name]
        dtype = TYPES[kind]

        def fetch(part: tuple[slice, ...] | None) -> Tensor:
            if not self._checked:
                check_file(self._path, self._entry)
                self._checked = True
            if not size:
                return torch.empty(shape, dtype=dtype)
            try:
                # a private mapping, as torch wants memory that may be written
                data = np.memmap(self._path, np.uint8, "c", start, size)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self._path}: {name} cannot be read: {error}.") from error
            tensor = torch.from_numpy(data).view(dtype).view(shape)
            return tensor if part is None else tensor[part]

        return fetch
