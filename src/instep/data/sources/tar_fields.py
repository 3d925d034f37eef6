"""Values of the members of a tar file: its extension says so, as in WebDataset."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from instep.data.shards.values import image_of, tensor_of

IMAGES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "pbm", "tif", "tiff")


def _text(data: bytes) -> str:
    return data.decode()


def _number(data: bytes) -> torch.Tensor:
    return torch.tensor(int(data))


def _array(data: bytes) -> torch.Tensor:
    return tensor_of(np.load(io.BytesIO(data), allow_pickle=False))


def _arrays(data: bytes) -> dict[str, torch.Tensor]:
    with np.load(io.BytesIO(data), allow_pickle=False) as found:
        return {name: tensor_of(found[name]) for name in found.files}


def _torch(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), _number),
    **dict.fromkeys(("json", "jsn"), json.loads),
    **dict.fromkeys(IMAGES, image_of),
    "npy": _array,
    "npz": _arrays,
    "pth": _torch,
}


def decoded(field: str, data: bytes) -> Any:
    """Decode a member; its bytes where the extension is not known.

    Args:
        field: the member's name behind its key, as "seg.png": the last extension counts.
        data: of the member.
    """
    extension = field.rpartition(".")[2]
    if extension == "gz":
        return decoded(field.removesuffix("gz").rstrip("."), gzip.decompress(data))
    return _DECODERS.get(extension, bytes)(data)
