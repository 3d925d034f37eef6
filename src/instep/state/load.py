"""Take state back from disk, believing nothing that has not been checked.

A checkpoint is read only after the size and the SHA-256 of every file in it
have been compared with its sealed manifest. A safetensors file from elsewhere
carries no checksum; there, structure, names, shapes and types are checked.
No code that a file might hold is ever run.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.header import refuse_pickle
from instep.state.intact import check
from instep.state.manifest import SUFFIX, latest, open_regular
from instep.state.model_file import KEY, check_hash
from instep.state.snapshot import Snapshot, model_tensors, tied_names

__all__ = ["LoadReport", "latest", "load", "load_model"]

FACTS = ("format", "step", "job", "parameters_sha256", KEY)
"""What the header of a model file tells of it, beside ties: a parameter may be called as its value.

Where one of them is a tie as well, nothing is lost: the model knows its own ties.
"""

_SHOWN = 6  # names in a message; a model may have thousands


def load(path: Path, device: torch.device | str = "cpu") -> Snapshot:
    """Read a checkpoint folder, once every byte of it has been checked.

    Returns:
        The snapshot, equal to the one saved; tied tensors are one tensor again.
        Its memory is its own: the files may be deleted.

    Raises:
        CheckpointError: a file is damaged, truncated, foreign or missing; the
            text says which, and why.
    """
    manifest = check(path)
    groups: dict[str, dict[str, Tensor]] = {}
    for name in manifest.files:
        with _OpenTensors(path / name) as file:
            own = {key: file.tensor(key).to(device, copy=True) for key in file.names}
            groups[name.removesuffix(SUFFIX)] = own | {a: own[k] for a, k in file.tied.items()}
    return Snapshot(step=manifest.step, tensors=groups, facts=manifest.facts)


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What of a file went into a model."""

    matched: tuple[str, ...]
    """Names in the model that took their values from the file."""

    missing: tuple[str, ...] = ()
    """Names in the model that the file does not have: they keep their values."""

    unexpected: tuple[str, ...] = ()
    """Names in the file that the model does not have."""

    wrong: dict[str, str] = field(default_factory=dict)
    """Names that both have, but with a shape or type that does not fit, and how so."""

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

    Types of floating point convert into one another. A tied weight needs only
    one of its names in the file.

    Args:
        strict: every name must match; else those that do are loaded.

    Raises:
        CheckpointError: no safetensors file, or not as it was saved; or the names do
            not match (all of them where strict, any of them where not). The model is
            unchanged.
    """
    path, targets = Path(path), model_tensors(model)
    check_hash(path)
    with _OpenTensors(path, facts=FACTS) as file:
        sources = _sources(file, targets)
        wrong = {
            name: why
            for name, source in sources.items()
            if (why := _misfit(file.tensor(source), targets[name]))
        }
        wrong |= _torn_ties(file, targets, sources)
        report = LoadReport(
            matched=tuple(name for name in sources if name not in wrong),
            missing=tuple(name for name in targets if name not in sources),
            unexpected=tuple(name for name in file.all_names() if name not in targets),
            wrong=wrong,
        )
        if strict and (report.missing or report.unexpected or report.wrong):
            raise CheckpointError(
                f"{path} does not fit the model: {report} "
                "To take what does: start.partial = true in a job, strict=False in Python."
            )
        if not report.matched and targets:
            raise CheckpointError(
                f"{path} has nothing for this model: it holds {_some(file.all_names())}; "
                f"the model wants {_some(targets)}."
            )
        with torch.no_grad():
            for name in report.matched:
                targets[name].copy_(file.tensor(sources[name]))
    return report


def _sources(file: _OpenTensors, targets: Mapping[str, Tensor]) -> dict[str, str]:
    """Name in the model to name in the file, where a tied weight may be found by any name."""
    tied = tied_names(targets)
    by_tie: dict[str, str] = {}
    for name in targets:
        if source := file.find(name):
            by_tie.setdefault(tied.get(name, name), source)
    found = {name: file.find(name) or by_tie.get(tied.get(name, name)) for name in targets}
    return {name: source for name, source in found.items() if source}


def _misfit(found: Tensor, wanted: Tensor) -> str:
    """Why `found` cannot be copied into `wanted`; empty where it can."""
    if found.shape != wanted.shape:
        return f"{list(found.shape)} in the file, {list(wanted.shape)} in the model"
    if found.dtype != wanted.dtype and not (
        found.is_floating_point() and wanted.is_floating_point()
    ):
        return f"{found.dtype} in the file, {wanted.dtype} in the model"
    return ""


def _torn_ties(
    file: _OpenTensors, targets: Mapping[str, Tensor], sources: Mapping[str, str]
) -> dict[str, str]:
    """Names that are one tensor in the model and have two different ones in the file."""
    return {
        name: f"tied to {first} in the model, different from it in the file"
        for name, first in tied_names(targets).items()
        if name in sources
        and sources[name] != sources[first]
        and not torch.equal(file.tensor(sources[name]), file.tensor(sources[first]))
    }


class _OpenTensors:
    """A safetensors file held open: its own names, and those tied to them.

    An entry of its metadata that leads from an unknown name to a tensor's is a
    tie, as `safetensors.torch.save_model` writes it.

    Args:
        path: of the file.
        facts: names of entries that tell of the file, and are no ties.
    """

    def __init__(self, path: Path, facts: Container[str] = ()) -> None:
        self._path = path
        self._file = self._open()
        self.names = dict.fromkeys(self._file.keys())
        metadata = self._file.metadata() or {}
        self.tied = {
            alias: kept
            for alias, kept in metadata.items()
            if kept in self.names and alias not in self.names and alias not in facts
        }

    def _open(self) -> Any:
        with open_regular(self._path) as file:
            start = file.read(4)
        try:
            handle: Any = safe_open(str(self._path), framework="pt")
            return handle.__enter__()
        except (SafetensorError, OSError) as error:
            refuse_pickle(self._path, start)
            raise CheckpointError(f"{self._path} is no sound safetensors file: {error}.") from error

    def __enter__(self) -> _OpenTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def all_names(self) -> list[str]:
        return [*self.names, *self.tied]

    def find(self, name: str) -> str | None:
        """The file's own name for `name`, or None."""
        return name if name in self.names else self.tied.get(name)

    def tensor(self, name: str) -> Tensor:
        """A view of the file, read when it is touched: for copying from at once."""
        try:
            tensor: Tensor = self._file.get_tensor(name)
        except (SafetensorError, ValueError, KeyError, RuntimeError, AttributeError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}.") from error
        return tensor


def _some(names: Iterable[str]) -> str:
    """The first few names, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
    return ", ".join(listed[:_SHOWN]) + more
