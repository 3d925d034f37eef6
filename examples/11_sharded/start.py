"""Write a Llama of 113 million random weights as a folder; yours comes from elsewhere.

python examples/11_sharded/start.py start
python examples/11_sharded/start.py start 4 128
"""

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def config(layers: int = 16, width: int = 768) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=256,  # bytes
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=64,
        use_cache=False,
    )


if __name__ == "__main__":
    folder, *shape = sys.argv[1:]
    torch.manual_seed(1)
    model = LlamaForCausalLM(config(*map(int, shape)))
    model.save_pretrained(folder, max_shard_size="1TB")  # in one file
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters in {folder}")
