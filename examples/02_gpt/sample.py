"""Let a trained GPT continue a text.

python examples/02_gpt/sample.py runs/gpt
python examples/02_gpt/sample.py runs/gpt "class Tree:" 500
"""

import sys
import tomllib
from pathlib import Path

import torch
from gpt import recipe
from safetensors.torch import load_file


@torch.no_grad()
def write(run: Path, start: str, count: int, temperature: float = 0.8) -> str:
    arguments = tomllib.loads((run / "job.toml").read_text()).get("arguments", {})
    model = recipe(**arguments).model.eval()  # the run's own recipe, so the same shape
    model.load_state_dict(load_file(run / "model.safetensors"))
    written = list(start.encode())
    for _ in range(count):
        window = torch.tensor([written[-model.place.num_embeddings :]])
        chances = (model(window)[0, -1] / temperature).softmax(0)
        written.append(int(chances.multinomial(1)))
    return bytes(written).decode(errors="replace")


if __name__ == "__main__":
    run, start, count = sys.argv[1:] + ["runs/gpt", "def ", "300"][len(sys.argv) - 1 :]
    print(write(Path(run), start, int(count)))
