"""A Hugging Face model as a folder that `from_pretrained` opens.

The weights alone do not say which class they are of: a run keeps the model's configuration
(`huggingface/config.json`) from its start, and an export puts both into one folder. Nothing here
imports `transformers` or torch. Way in: `keep_config` in a run, `kept_config` and `copy_config` to
export.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

from instep.errors import RunError

FOLDER = "huggingface"
"""Where a run keeps the configuration of its model."""

_CONFIG, _GENERATION = "config.json", "generation_config.json"


def keep_config(model: Any, run: Path) -> None:
    """Write the configuration of a model of the library `transformers`; of others there is none.

    Raises:
        OSError: it cannot be written.
        TypeError, ValueError: it holds what is not JSON.
    """
    kinds = type(model).__mro__
    if not any(kind.__name__ == "PreTrainedModel" for kind in kinds):
        return
    # a sharded model is of a class that torch makes from its own
    own = next(kind for kind in kinds if not kind.__module__.startswith("torch."))
    config = copy.deepcopy(model.config)
    config.architectures = [own.__name__]
    config.dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    files = {_CONFIG: config.to_json_string()}
    if (generation := getattr(model, "generation_config", None)) is not None:
        files[_GENERATION] = generation.to_json_string()
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        temporary = folder / f".{name}.part"
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(folder / name)


def kept_config(run: Path) -> dict[str, Any] | None:
    """The configuration that a run has kept; None if its model is not of `transformers`.

    Raises:
        RunError: it is damaged.
    """
    file = run / FOLDER / _CONFIG
    try:
        config: Any = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not isinstance(config["architectures"][0], str):
            raise ValueError("it names no class")
    except FileNotFoundError:
        return None
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise RunError(
            f"{file} is damaged: {error}. Restore it from a copy, or export the weights alone: "
            "--to FILE.safetensors."
        ) from None
    return config


def copy_config(run: Path, folder: Path) -> None:
    """Put it beside the model's file.

    Raises:
        OSError: it cannot be read, or not be written.
    """
    for name in (_CONFIG, _GENERATION):
        kept = run / FOLDER / name
        if kept.is_file():
            (folder / name).write_text(kept.read_text(encoding="utf-8"), encoding="utf-8")
