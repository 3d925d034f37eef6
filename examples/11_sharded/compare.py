"""What two models of Hugging Face say about the text that one was tuned on; by transformers alone.

python examples/11_sharded/compare.py runs/llama runs/tuned
"""

import sys

import torch
from llama import book, loss
from transformers import AutoModelForCausalLM


@torch.no_grad()
def mean_loss(folder: str) -> float:
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    data = book()
    inputs, targets = zip(*(data[number] for number in range(32)), strict=True)
    return float(loss(model, (torch.stack(inputs), torch.stack(targets))))


if __name__ == "__main__":
    for folder in sys.argv[1:]:
        print(f"{folder}  {mean_loss(folder):.5f}")
