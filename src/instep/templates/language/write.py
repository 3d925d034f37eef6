"""Writes on from a beginning, with the model of a run.

python write.py ../runs/language "The value of"
"""

import sys
from pathlib import Path

import torch
from recipe import GPT, LENGTH

import instep


def main(run: str, beginning: str = "The ") -> None:
    model = GPT(layers=2, width=64).eval()
    instep.load_model(Path(run) / "model.safetensors", model)
    text = list(beginning.encode("ascii", "replace"))
    with torch.inference_mode():
        for _ in range(200):
            scores = model(torch.tensor([text[-LENGTH:]]))[0, -1]
            text.append(int((scores / 0.7).softmax(dim=0).multinomial(1)))
    print(bytes(text).decode("ascii", "replace"))


if __name__ == "__main__":
    main(*sys.argv[1:])
