"""The tables `[start]` and `[lora]` of a job: the model that it starts from, and its adapters."""

from __future__ import annotations

import math
from typing import Annotated

from msgspec import Meta, field

from instep.job.base import Positive, Section


class StartSpec(Section, frozen=True, kw_only=True):
    """The model that a run starts from, what stays frozen, and learning rates by pattern."""

    model: str = ""
    """Safetensors file to load, or the index of several; or the folder of a run, a checkpoint or a
    Hugging Face model; or its URL. Relative to the job file; empty: as the recipe builds it."""

    version: str = ""
    """The version of a model at a URL, which a run writes into its `job.toml` when it begins."""

    partial: bool = False
    """Load tensors that match in name and shape, and report others; false: all must match."""

    freeze: tuple[str, ...] = ()
    """Patterns such as `"encoder.*"`: parameters with such names keep their values, and layers that
    are frozen as a whole keep their running statistics."""

    learning_rates: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    """Pattern to learning rate, such as `"encoder.*" = 0.0001`; other parameters have the
    optimizer's own. If several match, the one with the most letters wins, not counting
    wildcards."""

    def __post_init__(self) -> None:
        if self.partial and not self.model:
            raise ValueError(
                "partial = true says how to load a file, but no model is given. "
                "Give model, or leave partial out."
            )
        for pattern, rate in self.learning_rates.items():
            if not math.isfinite(rate):
                raise ValueError(
                    f"learning_rates gives {pattern!r} the rate {rate}: needs to be a finite "
                    "number."
                )


class LoraSpec(Section, frozen=True, kw_only=True):
    """Train low-rank adapters (LoRA) of some layers, and freeze the model itself."""

    modules: tuple[str, ...] = ()
    """Patterns such as `"*.q_proj"`: which Linear layers (and Conv1D layers of transformers) get an
    adapter. Empty: none, and nothing is frozen."""

    rank: Positive = 8
    """Rows of an adapter's first factor; at most the smaller side of each layer."""

    alpha: Annotated[float, Meta(gt=0)] = 16.0
    """What an adapter adds is multiplied by `alpha / rank`."""

    dropout: Annotated[float, Meta(ge=0)] = 0.0
    """Share of an adapter's inputs that are set to 0 in training; below 1."""

    also_train: tuple[str, ...] = ()
    """Patterns such as `"head.*"`: parameters that are trained as a whole beside the adapters."""

    def __post_init__(self) -> None:
        others = (self.rank, self.alpha, self.dropout, self.also_train)
        if not self.modules and others != (8, 16.0, 0.0, ()):
            raise ValueError(
                "modules is missing or empty: no layer would get an adapter. "
                'Give patterns of layers, such as modules = ["*.q_proj", "*.v_proj"].'
            )
        if not self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: needs to be below 1.")
        if not math.isfinite(self.alpha):
            raise ValueError(f"alpha = {self.alpha}: needs to be a finite number.")

    @property
    def scale(self) -> float:
        """What the product of an adapter's factors is multiplied by (Hu et al. 2021, section 4)."""
        return self.alpha / self.rank
