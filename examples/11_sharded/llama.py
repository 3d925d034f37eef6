"""A Llama that no process has memory for is fine-tuned by four, each with a quarter of it.

    python examples/11_sharded/start.py start
    ulimit -d 1200000      # kB of data that each process may have; the model needs 1,800,000
    instep run examples/11_sharded/job.toml
    instep export runs/sharded --to tuned
    python examples/11_sharded/compare.py start tuned

Shows a model of Hugging Face that is built without memory, read from a safetensors file in parts,
and exported as a folder that `from_pretrained` opens. With `--workers 1 --set mesh.shard=1` the
same job ends with "cannot allocate memory".
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from instep.data.sources import text

try:
    from transformers import AutoConfig, LlamaForCausalLM
except ImportError as error:
    raise ImportError("the model comes with transformers: pip install transformers") from error


def recipe(
    start: str = "start", length: int = 32, samples: int = 64, lr: float = 1e-4
) -> instep.Recipe:
    """Fine-tune the model of a folder on the files beside this one."""
    config = AutoConfig.from_pretrained(start)
    data = text([Path(__file__)], length)
    return instep.Recipe(
        model=lambda: LlamaForCausalLM(config),  # a function: each process decides what it builds
        compute_loss=loss,
        weight=lambda batch: batch[1].numel(),  # a mean over characters
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=torch.utils.data.Subset(data, range(min(samples, len(data)))),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    logits = model(input_ids=inputs).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
