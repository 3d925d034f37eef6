"""Pieces of a checkpoint, opened: files of ranks and servers as one."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.boxes import BoxCut, extent, read_cut, whole
from instep.state.files.manifest import SUFFIX, FileEntry, check_file, read_manifest
from instep.state.files.model_file import open_tensors
from instep.state.packing import unpack_state
from instep.state.pieces import CUTS, ROWS, SHARD, TABLE, Pieces, TensorPiece, of_optimizer
from instep.state.snapshot import PART, TYPES, Snapshot


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
        name.removesuffix(SUFFIX): _CheckpointFile(path / name, each)
        for name, each in manifest.files.items()
    }
    found: defaultdict[str, list[TensorPiece]] = defaultdict(list)
    tensors: dict[str, dict[str, Tensor]] = {}
    servers = list[_CheckpointFile]()
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
        elif not of_optimizer(group):
            tensors[group] = file.all()
    numbers, options = dict[str, Any](), dict[str, Any]()
    for group, skeleton in manifest.facts.items():
        if of_optimizer(group):
            names = manifest.facts.get(f"parameters{group.removeprefix('optimizer')}")
            kept = _OptimizerTensors(files[group]) if group in files else {}
            state = unpack_state(kept, skeleton)
            others = {n: each for n, each in state.get("state", {}).items() if isinstance(n, str)}
            options[group] = {**state, "state": others}  # what it keeps for no parameter
            named = names or order.get(group)
            for name, value in _states(group, state, named, path):
                if isinstance(value, TensorPiece):
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
    servers: Sequence[_CheckpointFile], found: Mapping[str, Sequence[TensorPiece]]
) -> Iterable[tuple[str, TensorPiece]]:
    for file in servers:
        for key, piece in file.pieces():
            parameter, kept, place = key.rsplit("/", 2)
            name, start, stop = f"optimizer/{parameter}/{kept}", *map(int, place.split(":"))
            if not piece.cut.shape:  # a number is the same in all pieces
                if start == 0:
                    yield name, piece
                continue
            like = found.get(f"model/{parameter}", [piece])[0].cut.shape
            yield name, piece._replace(cut=BoxCut(like, whole(like)), flat=(start, stop))


class _OptimizerTensors(Mapping[str, Any]):
    """The tensors of a packed optimizer: pieces of its state, and the values of the rest."""

    def __init__(self, file: _CheckpointFile) -> None:
        self._file = file
        self._pieces = dict(file.pieces())

    def __getitem__(self, key: str) -> Any:
        piece = self._pieces[key]
        return piece if key.startswith("state.") else piece.fetch(None).clone()

    def __iter__(self) -> Any:
        return iter(self._pieces)

    def __len__(self) -> int:
        return len(self._pieces)


class _CheckpointFile:
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

    def pieces(self) -> list[tuple[str, TensorPiece]]:
        """Each name with its piece; tied names have the same `fetch`."""
        facts = self._facts
        try:
            cuts = {name: read_cut(*row) for name, row in json.loads(facts.get(CUTS, "{}")).items()}
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{self._path} is damaged: its cuts are {error}.") from error
        own, rows = dict[str, TensorPiece](), self.rows()
        for name, (dtype, shape, *_) in self._entries.items():
            if name in rows:
                count, *every = rows[name]
                cut = BoxCut((count, *shape[1:]), whole((count, *shape[1:])))
                own[name] = TensorPiece(
                    cut, TYPES[dtype], self._fetcher(name), every=(every[0], every[1])
                )
                continue
            cut = cuts.get(name, BoxCut(shape, whole(shape)))
            if extent(cut.box) != shape or len(cut.box) != len(cut.shape):
                raise CheckpointError(
                    f"{self._path} is damaged: {name} has the shape {list(shape)} and is "
                    f"said to be {list(cut.box)} of {list(cut.shape)}."
                )
            own[name] = TensorPiece(cut, TYPES[dtype], self._fetcher(name))
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
