"""A model in several safetensors files, with an index that says which of them has which tensor.

Hugging Face writes `model.safetensors.index.json` where a model is larger than a few gigabytes.
The files are read as if they were one, piece by piece. Their names come from the index, so they
have to be plain names in its folder. Ways in: `open_model`, which takes a file or an index;
`files_of`; `model_in` for a folder.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import msgspec

from instep.errors import CheckpointError
from instep.state.files.manifest import open_regular, reason
from instep.state.files.model_file import TensorEntry, TensorFile, check_hash, open_tensors

MODEL = "model.safetensors"
"""Name of the model's file in a folder of ours, and of Hugging Face's."""

INDEX = ".index.json"
"""What the name of an index adds to that of the file in whose place it is."""

_SHOWN = 3  # files in a message


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ShardedTensors:
    """As `TensorFile`, of several files; to be used as a context.

    Args:
        path: the index.

    Raises:
        CheckpointError: the index or a file is missing, damaged, or not of the others.
    """

    def __init__(self, path: Path) -> None:
        weight_map = _read(path)
        self.entries, self.metadata = dict[str, TensorEntry](), dict[str, str]()
        self._homes = dict[str, TensorFile]()
        with ExitStack() as stack:
            for shard in _shards(path, weight_map):
                file = stack.enter_context(open_tensors(shard))
                self.metadata |= file.metadata
                for name, entry in file.entries.items():
                    self._add(name, entry, file, shard, weight_map.get(name, ""))
            for name, shard_name in weight_map.items():
                if name not in self.entries:
                    raise CheckpointError(
                        f"{path} says that {shard_name} has {name}, and it has not: they are of "
                        f"two models. {_AGAIN}"
                    )
            self._files = stack.pop_all()

    def _add(self, name: str, entry: TensorEntry, file: TensorFile, shard: Path, home: str) -> None:
        if home not in ("", shard.name):
            return  # the index says that another file has the one that counts
        if name in self.entries:
            raise CheckpointError(
                f"{shard} has {name}, as another file beside it has, and the index says of neither "
                f"that it counts. {_AGAIN}"
            )
        self.entries[name], self._homes[name] = entry, file

    def __enter__(self) -> ShardedTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def read(self, tensor: str, out: memoryview, first: int = 0) -> None:
        """As of `TensorFile`."""
        self._homes[tensor].read(tensor, out, first)


_AGAIN = "Get the files again, or save the model again: model.save_pretrained(folder)."


def is_index(path: Path) -> bool:
    """Whether a file is an index of safetensors files, by its name."""
    return path.name.endswith(f".safetensors{INDEX}")


def model_in(folder: Path) -> Path:
    """The model in a folder: its one file, or the index of several. It may not exist."""
    path, index = folder / MODEL, folder / f"{MODEL}{INDEX}"
    return index if index.is_file() and not path.exists() else path


def open_model(path: Path) -> TensorFile | ShardedTensors:
    """Open a safetensors file, or the files of an index; headers are checked.

    Raises:
        CheckpointError: one is missing, unreadable, of another kind, truncated or damaged.
    """
    return ShardedTensors(path) if is_index(path) else open_tensors(path)


def files_of(path: Path) -> list[Path]:
    """A safetensors file; or an index and its files.

    Raises:
        CheckpointError: the index is damaged, or a file is missing.
    """
    return [path, *_shards(path, _read(path))] if is_index(path) else [path]


def check_hashes(path: Path) -> None:
    """As `check_hash`, of a safetensors file, or of each file of an index.

    Raises:
        CheckpointError: as `open_model`, or one is not the one that was written.
    """
    for file in files_of(path):
        if not is_index(file):
            check_hash(file)


def _read(path: Path) -> dict[str, str]:
    try:
        with open_regular(path) as file:
            found = msgspec.json.decode(file.read(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is no index, or damaged: {error}. {_AGAIN}") from None
    if away := [each for each in found.values() if each != Path(each).name]:
        raise CheckpointError(
            f"{path} names {away[0]!r}: the files of a model are in the folder of their index."
        )
    return found


def _shards(path: Path, weight_map: dict[str, str]) -> list[Path]:
    every = [path.with_name(name) for name in dict.fromkeys(weight_map.values())]
    missing = [each.name for each in every if not each.exists()]
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise CheckpointError(
            f"{path} names {len(every)} files, and {len(missing)} of them "
            f"{'is' if len(missing) == 1 else 'are'} not there: "
            f"{', '.join(missing[:_SHOWN])}{more}. {_AGAIN}"
        )
    return every
