"""What a dataset's type and attributes say: how to read many samples at once, and their files.

Reading a batch in one call avoids Python code for each sample. Nothing here reads by itself,
or knows seeds and orders.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset, default_collate
from torch.utils.data._utils import worker as torch_worker

from instep.data.order import Indices
from instep.data.reading.streams.mixed import MixedStreams
from instep.data.reading.streams.stream import Stream

_FILE_LISTS = ("samples", "imgs", "files", "paths", "image_paths", "filenames")


def is_plain(dataset: Any) -> bool:
    """Whether none of the user's code runs to read it, and nothing is kept from read to read."""
    kind = type(dataset)
    if kind in (Stream, MixedStreams):
        return False
    if kind is Subset:
        return is_plain(dataset.dataset)
    if kind is TensorDataset:
        return all(type(tensor) is torch.Tensor for tensor in dataset.tensors)
    return kind.__module__.startswith("instep.data.")


def offers(dataset: Any, method: str) -> bool:
    """Whether the dataset's class has a batched method that its `__getitem__` agrees with.

    A subclass that overrides `__getitem__` alone has not changed the batched method of its
    parent, which would then give other samples.
    """
    for layer in type(dataset).__mro__:
        if method in vars(layer):
            return True
        if "__getitem__" in vars(layer):
            return False
    return False


def batch_reader(dataset: Any) -> Callable[[Indices], Any] | None:
    """A function that reads many samples as one batch; None if there is none.

    A subset whose indices are not simply positions of samples (below 0, no
    integers, too large) has none: what they mean is left to PyTorch.
    """
    if type(dataset) is TensorDataset:
        takers = [_taker(tensor) for tensor in dataset.tensors]
        return lambda indices: [take(indices) for take in takers]
    if type(dataset) is Subset:
        inner, chosen = batch_reader(dataset.dataset), _subset_indices(dataset)
        if inner is None or chosen is None:
            return None
        return lambda indices: inner(chosen[indices])
    return dataset.batch_of if offers(dataset, "batch_of") else None


def _subset_indices(subset: Subset[Any]) -> Indices | None:
    try:
        found = np.asarray(subset.indices)
        least, most = int(found.min(initial=0)), int(found.max(initial=0))
        size = len(subset.dataset)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        return None
    if found.ndim != 1 or found.dtype.kind not in "iu" or least < 0 or most >= size:
        return None
    return found.astype(np.int64)


def _taker(tensor: torch.Tensor) -> Callable[[Indices], torch.Tensor]:
    """Rows of a tensor by index, each call a new tensor."""
    try:
        # numpy, as torch would start a pool of threads for every thread that loads
        rows = tensor.detach().numpy()
    except (TypeError, RuntimeError):  # bfloat16, or on a device
        return lambda indices: tensor.index_select(0, torch.from_numpy(indices).to(tensor.device))

    def take(indices: Indices) -> torch.Tensor:
        if len(indices) and not 0 <= indices.min() <= indices.max() < len(rows):
            raise IndexError(f"indices {indices.min()} to {indices.max()} of {len(rows)} rows")
        # allocated by torch: some matrix products round by the alignment of their input
        batch = torch.empty((len(indices), *tensor.shape[1:]), dtype=tensor.dtype)
        # "clip" writes in place, "raise" copies; the indices were checked above
        np.take(rows, indices, axis=0, out=batch.numpy(), mode="clip")
        return batch

    return take


def collate_by_torch(samples: list[Any]) -> Any:
    """torch's `default_collate`, into memory of this process.

    In what it takes for a worker of a `DataLoader`, it makes a file in shared memory for
    every tensor, which `wire.py` has no use for.
    """
    info, torch_worker._worker_info = torch_worker._worker_info, None
    try:
        return default_collate(samples)
    finally:
        torch_worker._worker_info = info


def first_mismatch(indices: Sequence[int], samples: Sequence[Any]) -> str | None:
    """The first sample of another shape than the first: a sentence, or None if all agree."""
    first = _shape_of(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        if (shape := _shape_of(sample)) != first:
            return (
                f"sample {index} cannot be stacked with sample {indices[0]}: "
                f"it is {shape}, that one is {first}."
            )
    return None


def _shape_of(sample: Any) -> str:
    """`(float32 [3, 4], int64 [])`: what a sample is made of, without its values."""
    if isinstance(sample, torch.Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, np.ndarray):
        return f"{sample.dtype} {list(sample.shape)}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(_shape_of(part) for part in sample)})"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {_shape_of(part)}" for name, part in sample.items()) + "}"
    return type(sample).__name__


def places_in_whole(dataset: Any) -> Callable[[int], str]:
    """What messages add to the index of a sample of a side (`LoaderParts.side`): its index in the
    dataset that was split. Empty for any other dataset."""
    indices = getattr(dataset, "indices", None) if type(dataset) is Subset else None
    if not isinstance(indices, array):
        return lambda index: ""
    return lambda index: f" ({indices[index]} of the whole dataset)"


def file_names(dataset: Any) -> Callable[[int], str]:
    """The file of a sample by its index, as far as the dataset's attributes say; else empty.

    It looks for lists as long as the dataset, of paths or of tuples that begin with one,
    under the usual names, and through subsets.
    """
    attributes = getattr(dataset, "__dict__", {})  # runs no property of the user's
    inner, indices = attributes.get("dataset"), attributes.get("indices")
    if inner is not None and isinstance(indices, Sized):
        of_inner, chosen = file_names(inner), indices
        return lambda index: of_inner(int(chosen[index]))  # type: ignore[index]
    for name in _FILE_LISTS:
        listed = attributes.get(name)
        if not isinstance(listed, list | tuple) or len(listed) != len(dataset):
            continue
        if listed and _path(listed[0]):
            return lambda index, listed=listed: _path(listed[index])  # type: ignore[misc]
    return lambda index: ""


def _path(entry: Any) -> str:
    first = entry[0] if isinstance(entry, tuple | list) and entry else entry
    return str(first) if isinstance(first, str | os.PathLike) else ""
