"""Load state from disk, after checking it.

A checkpoint is read only after the size and the SHA-256 of every file in it have been
compared with its sealed manifest. A safetensors file from elsewhere has no checksum; there,
structure, names, shapes and types are checked. No code in a file is ever run.
Way in: `load` for a checkpoint, `load_model` to fine-tune from any safetensors file.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.boxes import Box, box_of, local, whole
from instep.state.files.manifest import SUFFIX, is_table
from instep.state.files.model_file import HASH_KEY
from instep.state.files.scaled import REMEDY, Scale, block_beside, refuse_undecoded, scales_of
from instep.state.files.sharded import check_hashes, model_in, open_model
from instep.state.intact import check
from instep.state.sized import sized, take_shapes
from instep.state.snapshot import TYPES, Snapshot, model_tensors, model_ties, raw_bytes

FACTS = ("format", "step", "job", "parameters_sha256", HASH_KEY)
"""Entries of a model file's header that are no ties: a parameter may be named like their values.

If one of them is a tie as well, nothing is lost: the model knows its own ties.
"""

_SHOWN = 6  # names in a message; a model may have thousands

_PIECE_BYTES = 4 << 20
"""How much is read at once, or one row, where it cannot be read to where it belongs."""


def load(path: Path, device: torch.device | str = "cpu") -> Snapshot:
    """Read a checkpoint folder, after checking every byte of it.

    Returns:
        The snapshot, equal to the one saved but for rows of embeddings on servers; tied tensors are
        one tensor again. It does not refer to the files, which may be deleted.

    Raises:
        CheckpointError: a file is damaged, truncated, foreign or missing; the
            text says which, and why.
    """
    manifest = check(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name in manifest.files:
        if is_table(name):  # each server reads its own rows
            continue
        with OpenFile(path / name) as file:
            own = {key: file.tensor(key, device) for key in file.names}
            groups[name.removesuffix(SUFFIX)] = own | {a: own[k] for a, k in file.tied.items()}
    return Snapshot(step=manifest.step, tensors=groups, facts=manifest.facts)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How the tensors of a file fit a model."""

    matched: tuple[str, ...]
    """Names in the model that took their values from the file."""

    missing: tuple[str, ...] = ()
    """Names in the model that the file does not have: these keep their values."""

    unexpected: tuple[str, ...] = ()
    """Names in the file that the model does not have."""

    wrong: dict[str, str] = field(default_factory=dict)
    """Names that both have, with the difference in shape or type."""

    decoded: int = 0
    """How many of `matched` are codes of 8 bits in the file, with scales beside them."""

    def __str__(self) -> str:
        """One sentence: `40 of 42 tensors match; missing: head.bias, head.weight.`"""
        total = len(self.matched) + len(self.missing) + len(self.wrong)
        text = f"{len(self.matched)} of {total} tensors match"
        text += f", {self.decoded} of them decoded by their scales" if self.decoded else ""
        for kind in ("missing", "unexpected"):
            if names := getattr(self, kind):
                text += f"; {kind}: {_some(names)}"
        if self.wrong:
            text += f"; wrong: {_some([f'{name} ({why})' for name, why in self.wrong.items()])}"
        return text + "."


def load_model(path: Path | str, model: nn.Module, strict: bool = True) -> LoadReport:
    """Copy the tensors of a safetensors file, or of several with an index, into a model.

    Types of floating point convert into one another. The file needs only one name of a tied
    weight. Where the model's parameters are DTensors, a rank reads its parts of them.

    Args:
        path: the file, the index (`model.safetensors.index.json`), or a folder with either.
        model: to copy into.
        strict: every name must match; else those that do are loaded.

    Raises:
        CheckpointError: no valid safetensors file, or changed since it was saved; or not
            all names match (strict), or none does. The model is unchanged.
    """
    fit = fit_model(path, model, strict)
    fit.fill(model)
    return fit.report


class Fit(NamedTuple):
    """How a file fits a model; its values can be copied later."""

    path: Path
    report: LoadReport
    sources: dict[str, str]
    """Name in the model to name in the file, of what matched."""
    scales: dict[str, tuple[str, ...]]
    """Name in the file to those of its scales and zero points, of what is to be decoded."""

    def fill(self, model: nn.Module) -> None:
        """Copy what matched into the model, or into a part of it with the same names.

        Raises:
            CheckpointError: the file cannot be read.
        """
        with OpenFile(self.path, facts=FACTS) as file:
            file.decode(self.scales)
            found = sized(model, self.sources, lambda name: file.like(self.sources[name]))
            take_shapes(model, found)
            for name, tensor in model_tensors(model).items():
                if name in self.sources:
                    file.copy(self.sources[name], local(tensor), box_of(tensor, name))


def fit_model(path: Path | str, model: nn.Module, strict: bool = True) -> Fit:
    """Compare a safetensors file with a model, as for `load_model`; the model is left as it is.

    Args:
        path: as for `load_model`.
        model: its tensors may be on the meta device.
        strict: every name must match.

    Raises:
        CheckpointError: as `load_model`.
    """
    path, targets = Path(path), model_tensors(model, empty=True)
    path = model_in(path) if path.is_dir() else path
    check_hashes(path)
    with OpenFile(path, facts=FACTS) as file:
        targets |= sized(model, file.names, file.like)
        scales = file.scales_of(targets)
        file.decode(scales)
        applied = {name for beside in scales.values() for name in beside}
        file_names = [n for n in (*file.names, *file.tied) if n not in applied]
        tied = model_ties(model, targets)
        sources = _sources(file, targets, tied)
        wrong = {
            name: why
            for name, source in sources.items()
            if (why := mismatch(file.like(source), targets[name], "in the file", convert=True))
        }
        wrong |= _broken_ties(file, tied, sources)
        report = LoadReport(
            matched=tuple(name for name in sources if name not in wrong),
            missing=tuple(name for name in targets if name not in sources),
            unexpected=tuple(name for name in file_names if name not in targets),
            wrong=wrong,
            decoded=len([n for n in sources if n not in wrong and sources[n] in scales]),
        )
        found = set(sources.values())
        file.refuse_undecoded(report.unexpected, found - {*scales}, found & {*scales})
        if strict and (report.missing or report.unexpected or report.wrong):
            raise CheckpointError(
                f"{path} does not fit the model: {report} "
                "To load what fits: start.partial = true in a job, strict=False in Python."
            )
        if not report.matched and targets:
            raise CheckpointError(
                f"{path} has nothing for this model: it holds {_some(file_names)}; "
                f"the model wants {_some(targets)}."
            )
    return Fit(path, report, {name: sources[name] for name in report.matched}, scales)


def _sources(
    file: OpenFile, targets: Mapping[str, Tensor], tied: Mapping[str, str]
) -> dict[str, str]:
    """Name in the model to name in the file; a tied weight is found by any of its names."""
    by_tie: dict[str, str] = {}
    for name in targets:
        if source := file.find(name):
            by_tie.setdefault(tied.get(name, name), source)
    found = {name: file.find(name) or by_tie.get(tied.get(name, name)) for name in targets}
    return {name: source for name, source in found.items() if source}


def mismatch(found: Tensor, wanted: Tensor, where: str, *, convert: bool) -> str:
    """How `found` differs from the model's tensor in shape or type; empty where it does not.

    Args:
        found: the tensor to copy.
        wanted: the model's tensor.
        where: what the message calls the source of `found`, such as `in the file`.
        convert: whether types of floating point are the same.
    """
    if found.shape != wanted.shape:
        return f"{list(found.shape)} {where}, {list(wanted.shape)} in the model"
    floats = convert and found.is_floating_point() and wanted.is_floating_point()
    if found.dtype != wanted.dtype and not floats:
        return f"{found.dtype} {where}, {wanted.dtype} in the model"
    return ""


def _broken_ties(
    file: OpenFile, tied: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, str]:
    """Names that are one tensor in the model and have two different ones in the file."""
    return {
        name: f"tied to {first} in the model, different from it in the file"
        for name, first in tied.items()
        if name in sources
        and sources[name] != sources[first]
        and not file.same(sources[name], sources[first])
    }


class OpenFile:
    """A safetensors file, or those of an index, held open: own names, and those tied to them.

    An entry of its metadata that maps an unknown name to a tensor's name is a
    tie, as `safetensors.torch.save_model` writes it.

    Args:
        path: of the file.
        facts: names of entries that are facts about the file, and no ties.
    """

    def __init__(self, path: Path, facts: Container[str] = ()) -> None:
        self._file = open_model(path)
        self._path, self.names = path, dict.fromkeys(self._file.entries)
        self._scales: dict[str, Scale] = {}
        self.tied = {
            alias: kept
            for alias, kept in self._file.metadata.items()
            if kept in self.names and alias not in self.names and alias not in facts
        }

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def find(self, name: str) -> str | None:
        """The file's own name for `name`, or None."""
        return name if name in self.names else self.tied.get(name)

    def scales_of(self, wanted: Container[str]) -> dict[str, tuple[str, ...]]:
        """As of `scaled.py`: weights that are codes, and the names of what decodes them."""
        return scales_of(self._file.entries, wanted)

    def decode(self, scales: Mapping[str, Sequence[str]]) -> None:
        """Have these weights be decoded by their scales, from here on.

        Raises:
            CheckpointError: scales do not fit their weight.
        """
        block = block_beside(self._path) if scales else None
        for name, (scale, *zero) in scales.items():
            try:
                found = Scale(
                    self.tensor(scale),
                    self._file.entries[name].shape,
                    self.tensor(zero[0]) if zero else None,
                    block,
                )
            except ValueError as error:
                raise CheckpointError(
                    f"{self._path}: {name!r} cannot be decoded by {scale!r}: {error}. {REMEDY}"
                ) from error
            self._scales[name] = found

    def refuse_undecoded(
        self, left: Iterable[str], loaded: Iterable[str], decoded: Iterable[str]
    ) -> None:
        """As of `scaled.py`: refuse a file in which other weights are codes too."""
        refuse_undecoded(self._path, self._file.entries, left, loaded, decoded)

    def like(self, name: str) -> Tensor:
        """A tensor of the same shape and type, without values."""
        like = self._stored(name)
        return like.float() if name in self._scales else like

    def _stored(self, name: str) -> Tensor:
        dtype, shape, *_ = self._file.entries[name]
        if dtype not in TYPES:
            raise CheckpointError(
                f"{self._path}: {name} cannot be read: it is {dtype}, which torch does not have."
            )
        return torch.empty(shape, dtype=TYPES[dtype], device="meta")

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The whole of it."""
        like = self.like(name)
        read = torch.empty(like.shape, dtype=like.dtype)
        self.copy(name, read, whole(like.shape))
        return read.to(device)

    @torch.no_grad()
    def copy(self, name: str, into: Tensor, box: Box) -> None:
        """Copy a box of a tensor; only the rows that it lies in are read, some at a time.

        Args:
            name: in the file.
            into: [box], of any type of the same kind, on any device.
            box: as of `state/boxes.py`.
        """
        if not into.numel():
            return
        like, scale = self._stored(name), self._scales.get(name)
        shape, dtype = (like.shape or (1,)), like.dtype
        box = box or ((0, 1),)
        into = into.view(1) if into.dim() == 0 else into
        (first, stop), *others = box
        row = dtype.itemsize * math.prod(shape[1:])
        inner = tuple(slice(*each) for each in others)
        direct = (
            into.dtype == dtype
            and scale is None
            and into.device.type == "cpu"
            and into.is_contiguous()
            and all(each == (0, size) for each, size in zip(others, shape[1:], strict=True))
        )
        if direct:
            self._file.read(name, raw_bytes(into).numpy().data, first * row)
            return
        some = max(1, _PIECE_BYTES // row)
        for at in range(first, stop, some):
            part = into[at - first : at - first + some]
            read = torch.empty(len(part), *shape[1:], dtype=dtype)
            self._file.read(name, raw_bytes(read).numpy().data, at * row)
            read = read if scale is None else scale.decode(read, at)
            part.copy_(read[(slice(None), *inner)])

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        mine, theirs = self._file.entries[one], self._file.entries[other]
        if mine[:2] != theirs[:2]:
            return False
        for at in range(0, mine.size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, mine.size - at)
            both = bytearray(count), bytearray(count)
            for name, data in zip((one, other), both, strict=True):
                self._file.read(name, memoryview(data), at)
            if both[0] != both[1]:
                return False
        return True


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
