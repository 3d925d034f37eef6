"""What `instep predict` computes of a batch, and what it makes of the outputs: named columns.

A tuple or a dict has several outputs, a list has a value for each sample. Workers and files are
not known here. Way in: `predictor` and `columns`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import RecipeError
from instep.recipe.recipe import Recipe
from instep.words import a_or_an

ALONE = "outputs"
"""The name of an output that is the only one."""

_OF_NUMPY = (".npz", "")
"""Suffixes of files whose types are numpy's."""

RESERVED = ("sample", "skipped", "skipped_samples")
"""Names that the file of predictions has for itself."""

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The number types that can be written, by safetensors' names."""


def predictor(recipe: Recipe) -> Callable[[nn.Module, Any], Any]:
    """The recipe's own `predict`; by default the model on its inputs.

    The inputs are the batch if it is a tensor, and its only element if it has one. If the recipe
    has a `loss`, a batch of two is (inputs, target), and anything else is the inputs.
    """
    return recipe.predict or (lambda model, batch: model(_inputs(batch, recipe)))


def _inputs(batch: Any, recipe: Recipe) -> Any:
    if isinstance(batch, (tuple, list)) and len(batch) == 1:
        return batch[0]
    if isinstance(batch, Tensor):
        return batch
    if recipe.loss is None:
        raise RecipeError(
            f"a batch is {a_or_an(batch)}, and a recipe without loss does not say what of it the "
            "model is called with. Give Recipe(predict=lambda model, batch: ...)."
        )
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def columns(outputs: Any, rows: int) -> dict[str, Tensor | list[Any]]:
    """The outputs of a batch by name, each with a row for each sample.

    Args:
        outputs: a tensor or an array [rows, ...], a list of `rows` values, or a tuple or dict of
            such, nested at will.
        rows: samples in the batch.

    Returns:
        Name to a tensor in host memory, or to a list; `outputs` for one without a name,
        `outputs.0` for the first of a tuple, `a.b` for entry b of a dict in entry a.

    Raises:
        RecipeError: there is none, something else is among them, two have one name, or one has not
            a row for each sample.
    """
    found: dict[str, Tensor | list[Any]] = {}
    for name, value in _each(outputs, ""):
        if name in found or name in RESERVED:
            taken = "is there twice" if name in found else "is a name of the file's own"
            raise RecipeError(f"the output {name!r} of predict {taken}: choose another name.")
        if isinstance(value, list):
            if len(value) != rows:
                raise RecipeError(
                    f"the output {name!r} of predict is a list of {len(value)} for a batch of "
                    f"{rows}: a list has a value for each sample. Give several outputs as a tuple."
                )
        elif not value.dim() or len(value) != rows:
            raise RecipeError(
                f"the output {name!r} of predict has the shape {list(value.shape)} for a batch of "
                f"{rows}: its first dimension has to be that of the batch, a row for each sample."
            )
        found[name] = value
    if not found:
        raise RecipeError("predict returned no outputs: a tensor is wanted, or a tuple or dict.")
    return found


def _each(outputs: Any, name: str) -> Iterator[tuple[str, Tensor | list[Any]]]:
    if isinstance(outputs, np.ndarray):
        outputs = torch.from_numpy(outputs) if outputs.dtype.kind in "fiub" else outputs.tolist()
    if isinstance(outputs, Tensor):
        yield name or ALONE, outputs.detach().to("cpu")
    elif isinstance(outputs, list):
        yield name or ALONE, outputs
    elif isinstance(outputs, Mapping) or hasattr(outputs, "_asdict"):
        parts = outputs if isinstance(outputs, Mapping) else outputs._asdict()
        for key, value in parts.items():
            yield from _each(value, f"{name}.{key}" if name else str(key))
    elif isinstance(outputs, tuple):
        for number, value in enumerate(outputs):
            yield from _each(value, f"{name or ALONE}.{number}")
    else:
        raise RecipeError(
            f"the output {name or ALONE!r} of predict is {a_or_an(outputs)}, but a tensor with a "
            "row for each sample is wanted, a list with a value for each, or a tuple or dict of "
            "these."
        )


def as_rows(found: Mapping[str, Tensor | list[Any]], suffix: str) -> tuple[dict[str, Any], bytes]:
    """Columns as bytes for a file of tensors.

    Args:
        found: from `columns`.
        suffix: of the file; empty for shards.

    Returns:
        Of each column its type, the shape of a row, and where it begins in the bytes.

    Raises:
        RecipeError: one cannot be written to such a file.
    """
    heads: dict[str, Any] = {}
    body, named = bytearray(), suffix or "shard"
    for name, value in found.items():
        if isinstance(value, list):
            raise RecipeError(
                f"the output {name!r} of predict is a list, which a {named} file cannot hold: "
                "give a tensor, padded to one length, or name an --out that ends in .jsonl."
            )
        kind = TYPES.get(value.dtype, "")
        if not kind or (suffix in _OF_NUMPY and kind == "BF16"):
            raise RecipeError(
                f"the output {name!r} of predict has the type {value.dtype}, which a {named} file "
                "cannot hold: convert it, as with .float()."
            )
        heads[name] = [kind, list(value.shape[1:]), len(body)]
        body += value.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return heads, bytes(body)


def as_lines(found: Mapping[str, Tensor | list[Any]], samples: list[int]) -> bytes:
    """Columns as lines of JSON, one for each of `samples`.

    Raises:
        RecipeError: a value is nothing that JSON has.
    """
    plain: dict[str, list[Any]] = {}
    for name, value in found.items():
        if isinstance(value, Tensor):
            if value.dtype not in TYPES:
                raise RecipeError(
                    f"the output {name!r} of predict has the type {value.dtype}, which JSON does "
                    "not have: convert it."
                )
            plain[name] = value.tolist()
        else:
            plain[name] = [each.tolist() if hasattr(each, "tolist") else each for each in value]
    rows = zip(*plain.values(), strict=True)
    made = [
        {"sample": n, **dict(zip(plain, row, strict=True))}
        for n, row in zip(samples, rows, strict=True)
    ]
    try:
        return b"".join(json.dumps(each).encode() + b"\n" for each in made)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"predict returned a value that JSON does not have: {error}.") from None
