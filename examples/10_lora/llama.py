"""A small Llama that has learnt Python from the standard library learns to SHOUT it, with LoRA.

    instep run examples/10_lora/pretrain.toml --name base
    instep run examples/10_lora/job.toml
    instep export runs/shouting --adapter --to runs/adapter
    python examples/10_lora/write.py runs/base runs/adapter

Shows a model of Hugging Face made from a configuration, adapters beside the frozen model, and an
adapter that peft opens. What is adapted is in the job file; the recipe knows nothing of it.
"""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

import instep
from instep.data.sources import text

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError("the model comes with transformers: pip install transformers") from error


def recipe(
    shouting: bool = False, layers: int = 2, width: int = 96, length: int = 64, lr: float = 3e-3
) -> instep.Recipe:
    files = library()
    held_out = text(files[::20], length)
    train: Dataset[tuple[Tensor, Tensor]] = text(files[1::20], length)
    few = Subset(held_out, range(0, len(held_out), max(1, len(held_out) // 64)))
    return instep.Recipe(
        model=lambda: llama(layers, width, length),
        compute_loss=loss,
        weight=lambda batch: batch[1].numel(),  # a mean over characters
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=Shouted(train) if shouting else train,
        validate=Shouted(few) if shouting else few,
    )


def llama(layers: int = 2, width: int = 96, length: int = 64) -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # bytes
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=width // 32,
            max_position_embeddings=length,
            use_cache=False,
        )
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Bits per character."""
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / math.log(2)


class Shouted(Dataset[tuple[Tensor, Tensor]]):
    """The same text in capital letters."""

    def __init__(self, quiet: Dataset[tuple[Tensor, Tensor]]) -> None:
        self.quiet = quiet

    def __len__(self) -> int:
        return len(self.quiet)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.quiet[index]
        return shout(inputs), shout(targets)


def shout(text: Tensor) -> Tensor:
    small = (text >= ord("a")) & (text <= ord("z"))
    return torch.where(small, text - ord("a") + ord("A"), text)


def library() -> list[Path]:
    """The standard library's files, without its tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    others = {"site-packages", "dist-packages", "test", "tests"}
    return sorted(file for file in root.rglob("*.py") if not others & set(file.parts))
