"""Load state from disk, after checking it.

A checkpoint is read only after the size and the SHA-256 of every file in it have been
compared with its sealed manifest. A safetensors file from elsewhere has no checksum; there,
structure, names, shapes and types are checked. No code in a file is ever run.
Way in: `load` for a checkpoint, `load_model` to fine-tune from any safetensors file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.boxes import box_of, local
from instep.state.files.manifest import SUFFIX, is_table
from instep.state.files.open_file import FACTS, OpenFile
from instep.state.files.sharded import check_hashes, model_in
from instep.state.intact import check
from instep.state.sized import sized, take_shapes
from instep.state.snapshot import Snapshot, model_tensors, model_ties

_SHOWN = 6  # names in a message; a model may have thousands


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


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
