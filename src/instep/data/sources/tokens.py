"""Files of tokens as windows, mapped into memory. Which files: `token_files.py`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from instep.data.order import Indices
from instep.data.sources.files import BatchDataset, check_state
from instep.data.sources.token_files import TokenFile, token_file
from instep.errors import DataError
from instep.words import folder_contents, listed

IGNORED = -100
"""The target that a loss of PyTorch leaves out (`ignore_index`)."""


class TokenWindows(BatchDataset):
    """Windows of tokens, each with the same window one token later as its target.

    Windows do not overlap, and none goes on in the next file; each file is a shard.

    Args:
        files: of tokens.
        length: tokens of a window.
        end: the token that ends a document, or None.
        documents: whether samples have the document of each token, too.
    """

    def __init__(
        self, files: Sequence[TokenFile], length: int, end: int | None, documents: bool
    ) -> None:
        self.files, self.length, self.end, self.documents = files, length, end, documents
        sizes = [max(file.tokens - 1, 0) // length for file in files]
        self.shard_sizes = sizes
        """Windows of each file."""
        self._starts = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        self._open: dict[int, np.ndarray[Any, Any]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}}  # each process maps files itself

    def __len__(self) -> int:
        return int(self._starts[-1])

    def batch_of(self, indices: Indices) -> list[Tensor]:
        """[inputs, targets], and the documents if asked for, each [count, length] int64."""
        windows = np.empty((len(indices), self.length + 1), np.int64)
        begins = np.zeros(windows.shape, np.bool_)
        files = np.searchsorted(self._starts, indices, "right") - 1
        for number in np.unique(files).tolist():
            check_state(self.files[number].path, self.files[number].state)
        for row, (number, index) in enumerate(zip(files.tolist(), indices.tolist(), strict=True)):
            first = (index - int(self._starts[number])) * self.length
            windows[row] = self._tokens(number)[first : first + self.length + 1]
            _mark(self.files[number].begins, first, begins[row])
        if self.end is not None:
            begins[:, 1:] |= windows[:, :-1] == self.end
        targets = windows[:, 1:].copy()
        targets[begins[:, 1:]] = IGNORED
        begins[:, 0] = False
        arrays = [windows[:, :-1].copy(), targets]
        if self.documents:
            arrays.append(np.cumsum(begins[:, :-1], axis=1, dtype=np.int64))
        return [torch.from_numpy(array) for array in arrays]

    def _tokens(self, number: int) -> np.ndarray[Any, Any]:
        if number not in self._open:
            self._open[number] = self.files[number].open()
        return self._open[number]


def _mark(documents: Indices | None, first: int, begins: np.ndarray[Any, Any]) -> None:
    """Mark the places of a window, which begins at a token, where a document begins."""
    if documents is not None:
        low, high = np.searchsorted(documents, (first, first + len(begins)))
        begins[documents[low:high] - first] = True


def tokens(
    paths: str | Path | Sequence[str | Path],
    length: int,
    *,
    dtype: str | None = None,
    end: int | None = None,
    documents: bool = False,
) -> TokenWindows:
    """Tokens that another program has written, for models that predict the next one.

    Args:
        paths: a `.bin` or `.npy` file, or several in their order. A `.bin` may have Megatron's
            `.idx` beside it; then it may also be named without its suffix.
        length: tokens of a window, 1 or more.
        dtype: type of a token in a `.bin` that does not say it, "uint16" (as nanoGPT writes) if
            left out.
        end: the token that ends a document. Where a document ends, by it or by an `.idx`, the
            target is -100, which losses of PyTorch leave out.
        documents: also give the document of each token, counted from 0 in each window.

    Returns:
        Samples of (inputs [length], targets [length]) int64, and (..., documents [length]).

    Raises:
        DataError: no file, one that cannot be read or is damaged, or too few tokens.
    """
    if length < 1:
        raise DataError(f"length = {length}: a window needs 1 token or more.")
    try:
        known = np.dtype(dtype or "uint16").kind in "iu"
    except TypeError:
        known = False
    if not known:
        raise DataError(f"dtype = {dtype!r}: a type of whole numbers is wanted, as 'uint16'.")
    named = _paths(paths)
    files = [token_file(path, dtype) for path in named]
    if documents and end is None and any(file.begins is None for file in files):
        raise DataError(
            f"documents = True: {listed(named, 1)} does not say where documents begin. Give the "
            "token that ends one, as end=50256."
        )
    if not any(file.tokens > length for file in files):
        raise DataError(
            f"{listed(named, 1)}: {max(file.tokens for file in files):,} tokens, and one window of "
            f"length {length} needs {length + 1}. Give more tokens, or a smaller length."
        )
    return TokenWindows(files, length, end, documents)


def _paths(given: str | Path | Sequence[str | Path]) -> list[Path]:
    paths = [Path(path) for path in ([given] if isinstance(given, str | Path) else given)]
    if not paths:
        raise DataError("the list of token files is empty: give at least one.")
    for path in paths:
        if path.is_dir():  # often with one for validation, which must not be trained on
            raise DataError(f"{path} is a folder: name the files in it. {folder_contents(path)}")
    return [_with_suffix(path) for path in paths]


def _with_suffix(path: Path) -> Path:
    """The `.bin` of what Megatron calls a prefix."""
    named = path.with_name(f"{path.name}.bin")
    return named if not path.exists() and named.exists() else path
