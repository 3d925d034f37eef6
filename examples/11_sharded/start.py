"""Write a Llama of random weights as a folder; yours comes from elsewhere.

python examples/11_sharded/start.py runs/llama
"""

import sys

import torch
from llama import llama

if __name__ == "__main__":
    torch.manual_seed(1)
    model = llama()
    model.save_pretrained(sys.argv[1], max_shard_size="1TB")  # in one file
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {sys.argv[1]}")
