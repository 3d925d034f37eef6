"""Let the model continue a text, with the adapter or without; by peft and transformers alone.

python examples/10_lora/write.py runs/base runs/adapter
python examples/10_lora/write.py runs/base runs/adapter "class Tree:" 200
"""

import sys
import tomllib
from pathlib import Path

import peft
import torch
from llama import llama
from safetensors.torch import load_file
from torch import nn


def opened(base: Path, adapter: Path | None) -> nn.Module:
    arguments = tomllib.loads((base / "job.toml").read_text()).get("arguments", {})
    shape = ("layers", "width", "length")
    model = llama(**{name: arguments[name] for name in shape if name in arguments})
    model.load_state_dict(load_file(base / "model.safetensors"))
    return peft.PeftModel.from_pretrained(model, adapter).eval() if adapter else model.eval()


@torch.no_grad()
def write(model: nn.Module, start: str, count: int) -> str:
    written = list(start.encode())
    for _ in range(count):
        logits = model(input_ids=torch.tensor([written[-32:]])).logits[0, -1]
        written.append(int((logits / 0.7).softmax(0).multinomial(1)))
    return bytes(written).decode(errors="replace")


if __name__ == "__main__":
    base, adapter, start, count = sys.argv[1:] + ["", "", "def ", "100"][len(sys.argv) - 1 :]
    print(write(opened(Path(base), None), start, int(count)))
    print("----")
    print(write(opened(Path(base), Path(adapter)), start.upper(), int(count)))
