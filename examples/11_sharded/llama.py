"""A Llama that no process has memory for is fine-tuned by four, each with a quarter of it.

    python examples/11_sharded/start.py runs/llama
    (ulimit -d 900000; instep run examples/11_sharded/job.toml)
    instep export runs/sharded --to runs/tuned
    python examples/11_sharded/compare.py runs/llama runs/tuned

Shows a model of Hugging Face that is built without memory, read from a safetensors file in parts,
and exported as a folder that `from_pretrained` opens. `ulimit` leaves each process 900,000 kB for
its data, of which importing takes 400,000. Parameters, gradients and AdamW's state are 940,000 kB:
with `--workers 1 --set mesh.shard=1 --set mesh.checkpointing=none` the same job ends with "can't
allocate memory".
"""

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


def recipe(length: int = 32, lr: float = 1e-4) -> instep.Recipe:
    data = book(length)
    return instep.Recipe(
        model=llama,  # the function: instep calls it where there is no memory for the model
        compute_loss=loss,
        weight=lambda batch: batch[1].numel(),  # a mean over characters
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=Subset(data, range(32)),
    )


def llama(layers: int = 12, width: int = 640) -> LlamaForCausalLM:
    """59 million parameters. A real one: LlamaForCausalLM(AutoConfig.from_pretrained(FOLDER))."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # bytes
            hidden_size=width,
            intermediate_size=8 * width // 3,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def book(length: int = 32) -> Dataset[tuple[Tensor, Tensor]]:
    """The text of this file."""
    return text([Path(__file__)], length)
