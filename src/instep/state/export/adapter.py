"""LoRA adapters out of a model file: merged into the model, or as a folder that `peft` opens.

The model of a run with LoRA has its own tensors under the names of the model without adapters, and
of each adapted layer two more, `lora_A` and `lora_B`, laid out as the layer's weight is (see
`recipe/lora.py`). So a file says by itself which layers those are. Tensors are read and written one
after the other: a process never holds the whole model. Way in: `write_merged`, `write_adapter`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from instep.errors import SpecError
from instep.job.start import LoraSpec
from instep.plain_file import replace_plain
from instep.state.export.whole import save_whole
from instep.state.files.model_file import check_hash
from instep.state.files.open_file import FACTS, OpenFile
from instep.state.files.sharded import open_model

FACTORS = (".lora_A", ".lora_B")
"""What the names of both factors of an adapter end in."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls the files of its folder."""

_PREFIX = "base_model.model."  # peft's, before every name


def adapted_layers(path: Path) -> list[str]:
    """The layers of which a model has adapters; headers of its files alone are read.

    Raises:
        CheckpointError: it is no safetensors file.
    """
    with open_model(path) as file:
        names = set(file.entries)
    layers = (name.removesuffix(FACTORS[0]) for name in names if name.endswith(FACTORS[0]))
    return sorted(layer for layer in layers if layer + FACTORS[1] in names)


def write_merged(
    source: Path, target: Path, lora: LoraSpec, metadata: Mapping[str, str] = MappingProxyType({})
) -> int:
    """Write the whole model, each adapter added to the weight of its layer; atomically.

    Its names are those of the model without adapters. Sums are computed in float64, and rounded
    once.

    Args:
        source: the model of a run or of one of its checkpoints; every byte is checked.
        target: a safetensors file to write.
        lora: of the run's job.
        metadata: of the file.

    Returns:
        The size in bytes.

    Raises:
        CheckpointError: the source is not as it was saved, or the target cannot be written.
    """
    layers = adapted_layers(source)
    check_hash(source)
    with OpenFile(source, facts=FACTS) as file:
        entries = {name: file.like(name) for name in file.names if not name.endswith(FACTORS)}
        tied = {alias: kept for alias, kept in file.tied.items() if kept in entries}
        adapted = {f"{layer}.weight": layer for layer in layers}

        def merged(name: str) -> Tensor:
            weight = file.tensor(name)
            if name not in adapted:
                return weight
            first, second = (file.tensor(adapted[name] + factor).double() for factor in FACTORS)
            change = first @ second if _transposed(first, second, weight) else second @ first
            return change.mul_(lora.scale).add_(weight).to(weight.dtype)

        return save_whole(target, entries, tied, merged, metadata)[0]


def write_adapter(source: Path, folder: Path, lora: LoraSpec, base: str) -> int:
    """Write the adapters, and what was trained as a whole, as a folder that peft opens.

    `peft.PeftModel.from_pretrained(model, folder)` gives the outputs of the run, if `model` is the
    one that the run started from.

    Args:
        source: the model of a run or of one of its checkpoints; every byte is checked.
        folder: to write; made if there is none, and overwritten if it has an adapter.
        lora: of the run's job.
        base: the folder that the run's model started from, if that is one of Hugging Face.

    Returns:
        The size of the weights in bytes.

    Raises:
        SpecError: the folder has other files; or peft cannot have the adapter: a layer has two
            names, or `lora.also_train` names parts of a layer.
        CheckpointError: the source is not as it was saved, or the weights cannot be written.
    """
    check_folder(folder)
    layers = adapted_layers(source)
    check_hash(source)
    with OpenFile(source, facts=FACTS) as file:
        _check_shared(ties := file.tied)
        firsts = {name: name for name in file.names} | ties
        likes = {name: file.like(first) for name, first in firsts.items()}
        own = [name for name in likes if not name.endswith(FACTORS)]
        kept = _whole_modules(lora.also_train, {name: firsts[name] for name in own})
        sources = {_PREFIX + name: firsts[name] for name in own if _within(kept, name)}
        turned = set[str]()
        for layer in layers:
            factors = {f"{_PREFIX}{layer}{factor}.weight": layer + factor for factor in FACTORS}
            sources |= factors
            if _transposed(*(likes[each] for each in (*factors.values(), f"{layer}.weight"))):
                turned |= set(factors)

        def as_peft(name: str, tensor: Tensor) -> Tensor:
            return tensor.T.contiguous() if name in turned else tensor

        entries = {name: as_peft(name, likes[first]) for name, first in sources.items()}
        folder.mkdir(parents=True, exist_ok=True)
        size, _ = save_whole(
            folder / WEIGHTS,
            entries,
            tied={},
            gather=lambda name: as_peft(name, file.tensor(sources[name])),
            metadata={},
        )
    config = _config(lora, base) | {
        "target_modules": _targets(layers, own),
        "modules_to_save": kept or None,
        "fan_in_fan_out": bool(turned),
        "bias": "none",
        "inference_mode": True,
    }
    if any(_within(kept, alias) for alias in ties):
        config["ensure_weight_tying"] = True
    replace_plain(folder / CONFIG, json.dumps(config, indent=2) + "\n")
    return size


def _check_shared(ties: Mapping[str, str]) -> None:
    """Refuse a layer that has two names.

    Raises:
        SpecError: names both.
    """
    for alias, kept in ties.items():
        if kept.endswith(FACTORS):
            one, other = (name.rpartition(".")[0] for name in (kept, alias))
            raise SpecError(
                f"{one!r} and {other!r} are one layer, and peft would give an adapter to the first "
                "alone. Export the whole model, with --merged."
            )


def _config(lora: LoraSpec, base: str) -> dict[str, Any]:
    """The configuration of peft, as far as the job says it."""
    known = base and (Path(base) / "config.json").is_file()
    return {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": base if known else None,
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        "lora_dropout": lora.dropout,
    }


def check_folder(folder: Path) -> None:
    """Refuse to write an adapter among other files.

    Raises:
        SpecError: names the folder.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).is_file():
        raise SpecError(
            f"--to '{folder}' has other files in it, and no adapter. Name a new folder."
        )
    if folder.exists() and not folder.is_dir():
        raise SpecError(f"--to '{folder}' is a file: an adapter is a folder. Name a new folder.")


def _transposed(first: Tensor, second: Tensor, weight: Tensor) -> bool:
    """Whether the layer's weight is [inputs, outputs].

    The shapes tell: `recipe/lora.py` refuses the one rank at which they would not.
    """
    return (second.shape[0], first.shape[1]) != weight.shape


def _within(modules: Iterable[str], name: str) -> bool:
    """Whether a tensor belongs to one of the modules, as peft matches them: by their ends."""
    above = [name[: at.start()] for at in re.finditer(r"\.", name)]
    return any(each.endswith(module) for each in above for module in modules)


def _whole_modules(patterns: Iterable[str], firsts: Mapping[str, str]) -> list[str]:
    """The modules of which all tensors are trained as a whole; also by their other names.

    Args:
        patterns: of the trained parameters.
        firsts: each name of a tensor, and the first name of that tensor.
    """
    patterns = list(patterns)
    hits = {first for name, first in firsts.items() if any(fnmatchcase(name, p) for p in patterns)}
    trained = {name for name, first in firsts.items() if first in hits}
    modules = list(dict.fromkeys(name.rpartition(".")[0] for name in firsts if name in trained))
    for module in modules:
        inside = [name for name in firsts if name.startswith(f"{module}.")]
        if left := [name for name in inside if name not in trained]:
            raise SpecError(
                f"lora.also_train trained a part of {module!r} and not {left[0]!r}, and peft keeps "
                "whole layers only. Export the whole model, with --merged."
            )
    return modules


def _targets(layers: list[str], names: Iterable[str]) -> list[str] | str:
    """What peft is to adapt: the ends of names if they say it, else a regular expression."""
    modules = {name[: at.start()] for name in names for at in re.finditer(r"\.", name)}
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    if {each for each in modules if each.rpartition(".")[2] in ends} == set(layers):
        return ends
    return "|".join(re.escape(layer) for layer in layers)
