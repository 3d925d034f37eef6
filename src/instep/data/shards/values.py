"""Values of samples as recipes get them: tensors of numbers, and of images."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from instep.data.pictures import opened_picture


def tensor_of(values: np.ndarray[Any, Any]) -> torch.Tensor:
    """Make a tensor; of float64 one of torch's default type, as a model has it."""
    found = torch.from_numpy(values)
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


def image_of(data: bytes) -> torch.Tensor:
    """[3, height, width] uint8, of the bytes of an image file."""
    with opened_picture(io.BytesIO(data)) as image:
        if image.mode.startswith("I"):  # grey of 16 bits, which `convert` would cut off at 255
            grey = (np.asarray(image).astype(np.int64) >> 8).clip(0, 255).astype(np.uint8)
            return torch.from_numpy(np.stack([grey] * 3))
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
