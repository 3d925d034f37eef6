"""Load state from disk, after checking it.

A checkpoint is read only after the size and the SHA-256 of every file in it have been
compared with its sealed manifest. A safetensors file from elsewhere has no checksum; there,
structure, names, shapes and types are checked. No code in a file is ever run.
Way in: `load` for a checkpoint, `load_model` to fine-tune from any safetensors file.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.boxes import Cut, cut_of, inside, local, whole
from instep.state.intact import check
from instep.state.manifest import SUFFIX
from instep.state.model_file import HASH_KEY, check_hash, open_tensors
from instep.state.snapshot import Snapshot, model_tensors, model_ties

FACTS = ("format", "step", "job", "parameters_sha256", HASH_KEY)
"""Entries of a model file's header that are no ties: a parameter may be named like their values.

If one of them is a tie as well, nothing is lost: the model knows its own ties.
"""

_SHOWN = 6  # names in a message; a model may have thousands


def load(path: Path, device: torch.device | str = "cpu") -> Snapshot:
    """Read a checkpoint folder, after checking every byte of it.

    Returns:
        The snapshot, equal to the one saved; tied tensors are one tensor again.
        It does not refer to the files, which may be deleted.

    Raises:
        CheckpointError: a file is damaged, truncated, foreign or missing; the
            text says which, and why.
    """
    manifest = check(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name in manifest.files:
        with _OpenFile(path / name) as file:
            own = {key: file.tensor(key).to(device, copy=True) for key in file.names}
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

    def __str__(self) -> str:
        """One sentence: `40 of 42 tensors match; missing: head.bias, head.weight.`"""
        total = len(self.matched) + len(self.missing) + len(self.wrong)
        text = f"{len(self.matched)} of {total} tensors match"
        for kind in ("missing", "unexpected"):
            if names := getattr(self, kind):
                text += f"; {kind}: {_some(names)}"
        if self.wrong:
            text += f"; wrong: {_some([f'{name} ({why})' for name, why in self.wrong.items()])}"
        return text + "."


def load_model(path: Path | str, model: nn.Module, strict: bool = True) -> LoadReport:
    """Copy the tensors of any safetensors file into a model, for fine-tuning.

    Types of floating point convert into one another. The file needs only one name of a tied
    weight. Where the model's parameters are DTensors, a rank reads its parts of them.

    Args:
        strict: every name must match; else those that do are loaded.

    Raises:
        CheckpointError: no valid safetensors file, or changed since it was saved; or not
            all names match (strict), or none does. The model is unchanged.
    """
    path, targets = Path(path), model_tensors(model)
    check_hash(path)
    with _OpenFile(path, facts=FACTS) as file:
        file_names, tied = [*file.names, *file.tied], model_ties(model, targets)
        sources = _sources(file, targets, tied)
        wrong = {
            name: why
            for name, source in sources.items()
            if (why := mismatch(file.tensor(source), targets[name], "in the file", convert=True))
        }
        wrong |= _broken_ties(file, tied, sources)
        report = LoadReport(
            matched=tuple(name for name in sources if name not in wrong),
            missing=tuple(name for name in targets if name not in sources),
            unexpected=tuple(name for name in file_names if name not in targets),
            wrong=wrong,
        )
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
        with torch.no_grad():
            for name in report.matched:
                cut = cut_of(targets[name], name)
                local(targets[name]).copy_(file.tensor(sources[name], cut))
    return report


def _sources(
    file: _OpenFile, targets: Mapping[str, Tensor], tied: Mapping[str, str]
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
    file: _OpenFile, tied: Mapping[str, str], sources: Mapping[str, str]
) -> dict[str, str]:
    """Names that are one tensor in the model and have two different ones in the file."""
    return {
        name: f"tied to {first} in the model, different from it in the file"
        for name, first in tied.items()
        if name in sources
        and sources[name] != sources[first]
        and not torch.equal(file.tensor(sources[name]), file.tensor(sources[first]))
    }


class _OpenFile:
    """A safetensors file held open: its own names, and those tied to them.

    An entry of its metadata that maps an unknown name to a tensor's name is a
    tie, as `safetensors.torch.save_model` writes it.

    Args:
        path: of the file.
        facts: names of entries that are facts about the file, and no ties.
    """

    def __init__(self, path: Path, facts: Container[str] = ()) -> None:
        self._path = path
        self._file = open_tensors(path, "pt")
        self.names = dict.fromkeys(self._file.keys())
        self.tied = {
            alias: kept
            for alias, kept in (self._file.metadata() or {}).items()
            if kept in self.names and alias not in self.names and alias not in facts
        }

    def __enter__(self) -> _OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def find(self, name: str) -> str | None:
        """The file's own name for `name`, or None."""
        return name if name in self.names else self.tied.get(name)

    def tensor(self, name: str, cut: Cut | None = None) -> Tensor:
        """A view of the file, read when it is accessed: for copying from at once.

        With a cut, a copy of that part.
        """
        try:
            if cut is not None and cut.box != whole(cut.shape):
                part: Tensor = self._file.get_slice(name)[inside(cut.box, whole(cut.shape))]
                return part
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}.") from error
        return tensor


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
