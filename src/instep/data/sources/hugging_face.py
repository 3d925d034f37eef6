"""Datasets of Hugging Face, from a folder or an object. How files are read is in `data/shards/`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import DataError
from instep.plain_file import read_plain
from instep.words import folder_contents

if TYPE_CHECKING:
    from instep.data.shards.hugging_face import HuggingFace


def hugging_face(
    folder_or_dataset: str | Path | Any,
    columns: Sequence[str] | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
) -> HuggingFace:
    """The samples of a dataset of the package `datasets`, in their order.

    Args:
        folder_or_dataset: what `save_to_disk` was given; or a `datasets.Dataset`.
        columns: names of those that samples are to have; all by default.
        transform: called with each sample, a dict of tensors, text and bytes; gives what the
            dataset returns.

    Raises:
        DataError: there is no such dataset, it is damaged, or has no such column; or pyarrow is
            not installed.
    """
    try:
        from instep.data.shards.hugging_face import HuggingFace, read_stream
    except ModuleNotFoundError as error:
        raise DataError(
            f"Hugging Face datasets need the package {error.name}: pip install 'instep[data]'."
        ) from None
    if not isinstance(folder_or_dataset, str | Path):
        return _of_object(folder_or_dataset, columns, transform)
    folder = Path(folder_or_dataset)
    files = [(str(path), partial(read_stream, path)) for path in _files(folder)]
    return HuggingFace(str(folder), files, columns, transform)


def _files(folder: Path) -> list[Path]:
    """Find the files of a folder that `save_to_disk` made."""
    path = folder / "state.json"
    try:
        state = json.loads(read_plain(path))
        names = [each["filename"] for each in state["_data_files"]]
    except OSError:
        splits = folder / "dataset_dict.json"
        hint = "It has several datasets: name one of them. " if splits.is_file() else ""
        raise DataError(
            f"{folder} has no state.json, which save_to_disk writes. {hint}"
            f"{folder_contents(folder)}"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged: {error}. Save the dataset again.") from None
    if any("/" in name or name in (".", "..") for name in names):
        raise DataError(f"{path} names a file that does not lie beside it.")
    return [folder / name for name in names]


def _of_object(
    dataset: Any,
    columns: Sequence[str] | None,
    transform: Callable[[dict[str, Any]], Any] | None,
) -> HuggingFace:
    from instep.data.shards.hugging_face import HuggingFace

    kind = type(dataset).__name__
    table, form = getattr(dataset, "data", None), getattr(dataset, "format", None)
    if not hasattr(table, "to_batches") or not isinstance(form, dict):
        hint = ": name one of its splits" if isinstance(dataset, dict) else ""
        raise DataError(f"a folder or a datasets.Dataset is wanted, and a {kind} was given{hint}.")
    if form.get("type") == "custom":
        raise DataError(
            "the dataset has a transform of its own (set_transform), which is not called here. "
            "Give it as transform=, or give the dataset itself to the recipe."
        )
    chosen = columns if columns is not None else form.get("columns")
    indices = getattr(dataset, "_indices", None)
    order = None if indices is None else partial(_rows, indices)
    return HuggingFace(kind, [(kind, partial(_batches, table))], chosen, transform, order)


def _batches(table: Any) -> list[Any]:
    return list(table.to_batches())


def _rows(indices: Any) -> Any:
    """[samples] int64: the row of each."""
    return indices.column(0).to_numpy().astype("int64")
