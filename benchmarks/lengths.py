"""What do batches by length save, and what do they cost? Beside fixed sizes, and Hugging Face.

The text is what packages of Python say of themselves: docstrings of the standard library, numpy
and scikit-learn, bytes as tokens, 16 to 2,000 of them. Most are short, a few very long. A small
convolutional net learns them in one process, and each batch is cut into 4 micro-batches, each
padded to its longest. Three ways to make batches of about as many tokens each:

- "fixed": as many samples in each batch, in the keyed global order;
- "hugging face": the same, by the sampler behind `group_by_length` of Hugging Face's Trainer;
- "tokens": `train.tokens_per_batch`.

Each way trains on a thousand of the texts, each once, so on the same tokens; in turns of some
steps, so that all meet the same load of the machine. Tokens per second are of processor time.
Padding, and the correlation of the mean lengths of neighbouring batches, are of an epoch of all.

    python benchmarks/lengths.py [--seeds 4] [--texts 1000] [--json FILE]
"""

from __future__ import annotations

import argparse
import ast
import datetime
import json
import os
import statistics
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers.trainer_pt_utils import LengthGroupedSampler

from instep.data.lengths import ByLength
from instep.data.order import Indices, Order, micro_batch

SHORTEST, LONGEST, BATCH, PARTS, WINDOW, HELD_OUT, TURN = 16, 2000, 16, 4, 4096, 256, 6
WAYS = ("fixed", "hugging face", "tokens")

Batch = list[Indices]
"""The samples of each micro-batch."""


def documents() -> list[bytes]:
    """Docstrings, each once, in the order of files."""
    places = [Path(sysconfig.get_path("stdlib"))]
    places += [Path(sysconfig.get_path("purelib"), name) for name in ("numpy", "sklearn")]
    others = {"site-packages", "dist-packages", "test", "tests"}
    found: dict[bytes, None] = {}
    for place in places:
        for folder, inner, files in os.walk(place):
            inner[:] = sorted(set(inner) - others)
            for name in sorted(each for each in files if each.endswith(".py")):
                _take(Path(folder, name), found)
    return [*found]


def _take(file: Path, found: dict[bytes, None]) -> None:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # some are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
            text = (ast.get_docstring(node) or "").encode()
            if len(text) >= SHORTEST:
                found.setdefault(text[:LONGEST])


class Net(nn.Module):
    """Predicts the next byte from the 37 before it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.Conv1d(width, width, 4, dilation=dilation) for dilation in (1, 3, 8)
        )
        self.out = nn.Linear(width, 256)

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows).transpose(1, 2)
        for layer, dilation in zip(self.layers, (1, 3, 8), strict=True):
            before = nn.functional.pad(x, (3 * dilation, 0))  # it sees nothing that comes later
            x = x + nn.functional.gelu(layer(before))
        out: Tensor = self.out(x.transpose(1, 2))
        return out


def loss_of(net: nn.Module, texts: list[Tensor]) -> tuple[Tensor, int]:
    """Sum over the bytes to predict, and how many there are."""
    rows = pad_sequence(texts, batch_first=True, padding_value=-1)
    targets = rows[:, 1:]
    outputs = net(rows[:, :-1].clamp_min(0))
    total = nn.functional.cross_entropy(
        outputs.reshape(-1, 256), targets.reshape(-1), ignore_index=-1, reduction="sum"
    )
    return total, int((targets >= 0).sum())


def fixed_batches(indices: Indices) -> list[Batch]:
    return [
        [
            indices[slice(*micro_batch(first, min(first + BATCH, len(indices)), n, PARTS))]
            for n in range(PARTS)
        ]
        for first in range(0, len(indices), BATCH)
    ]


def batches_of(way: str, lengths: Indices, seed: int, epoch: int) -> list[Batch]:
    """The batches of an epoch."""
    samples = len(lengths)
    order = Order(samples, seed)
    if way == "fixed":
        return fixed_batches(order.indices(epoch, 0, samples))
    if way == "hugging face":
        g = torch.Generator().manual_seed(1000 * seed + epoch)
        sampler = LengthGroupedSampler(BATCH, lengths=lengths.tolist(), generator=g)
        return fixed_batches(np.array([*sampler]))
    tokens = round(BATCH * float(lengths.mean()))
    planned = ByLength(
        order,
        samples,
        lambda indices: lengths[indices],
        window=WINDOW,
        seed=seed,
        micro_batches=PARTS,
        tokens=tokens,
    )
    return [
        [planned.indices(epoch, *where.micro_batch(n, PARTS)) for n in range(PARTS)]
        for where in (planned.of(epoch, number) for number in range(planned.steps))
    ]


def shape_of(lengths: Indices, seed: int, way: str) -> dict[str, float]:
    """Padding, and how much neighbouring batches are alike in length, of an epoch."""
    batches = batches_of(way, lengths, seed, 0)
    cost = sum(len(p) * int(lengths[p].max()) for batch in batches for p in batch if len(p))
    means = np.array([lengths[np.concatenate(batch)].mean() for batch in batches])
    tokens = np.array([lengths[np.concatenate(batch)].sum() for batch in batches])
    return {
        "padding": 1 - int(lengths.sum()) / cost,
        "correlation": float(np.corrcoef(means[1:], means[:-1])[0, 1]),
        "steps": len(batches),
        "tokens_of_a_batch_cv": float(tokens.std() / tokens.mean()),
    }


class Learner:
    """One way, on its way to so many tokens."""

    def __init__(self, way: str, texts: list[Tensor], lengths: Indices, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net()
        self._optimizer = torch.optim.AdamW(self.net.parameters(), lr=3e-3)
        self._texts, self._batches = texts, batches_of(way, lengths, seed, 0)[::-1]
        self.tokens, self.seconds = 0, 0.0

    @property
    def ended(self) -> bool:
        return not self._batches

    def turn(self, steps: int) -> None:
        """Take some steps."""
        began = time.process_time()
        for batch in [self._batches.pop() for _ in range(min(steps, len(self._batches)))]:
            count = 0
            for part in batch:
                if len(part):
                    total, tokens = loss_of(self.net, [self._texts[n] for n in part])
                    total.backward()
                    count += tokens
            for parameter in self.net.parameters():
                assert parameter.grad is not None
                parameter.grad /= count
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.tokens += count
        self.seconds += time.process_time() - began


def loss_on(net: nn.Module, texts: list[Tensor]) -> float:
    """Per byte, of texts that nobody has trained on."""
    total, count = 0.0, 0
    ranked = sorted(texts, key=len)
    with torch.no_grad():
        for first in range(0, len(ranked), 16):
            found, tokens = loss_of(net, ranked[first : first + 16])
            total, count = total + float(found), count + tokens
    return total / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    every = [torch.tensor([*text]) for text in documents()]
    kept = Order(len(every), 7).indices(0, 0, len(every)).tolist()
    held_out, texts = ([every[n] for n in part] for part in (kept[:HELD_OUT], kept[HELD_OUT:]))
    lengths = np.array([len(text) for text in texts])
    quantiles = {q: int(np.quantile(lengths, q / 100)) for q in (5, 50, 95, 100)}
    print(f"{len(texts):,} texts, mean {lengths.mean():.0f}, quantiles {quantiles}", flush=True)
    results: dict[str, Any] = {way: shape_of(lengths, 1, way) for way in WAYS}
    rates: dict[str, list[float]] = {way: [] for way in WAYS}
    losses: dict[str, list[float]] = {way: [] for way in WAYS}
    for seed in range(args.seeds):
        few = texts[: args.texts], lengths[: args.texts]
        learners = {way: Learner(way, *few, seed) for way in WAYS}
        turn = 0
        while not all(each.ended for each in learners.values()):
            for way in WAYS[turn % 3 :] + WAYS[: turn % 3]:
                learners[way].turn(TURN)
            turn += 1
        assert len({each.tokens for each in learners.values()}) == 1
        for way in WAYS:
            rates[way] += [learners[way].tokens / learners[way].seconds]
            losses[way].append(loss_on(learners[way].net, held_out))
        print(
            seed,
            {way: (round(rates[way][-1]), round(losses[way][-1], 4)) for way in WAYS},
            flush=True,
        )
    for way in WAYS:
        ratios = [mine / theirs for mine, theirs in zip(rates[way], rates["fixed"], strict=True)]
        results[way] |= {
            "tokens_per_second": [round(each) for each in rates[way]],
            "over_fixed": [round(each, 3) for each in ratios],
            "losses": [round(each, 4) for each in losses[way]],
            "loss": round(statistics.mean(losses[way]), 4),
            "loss_deviation": round(statistics.stdev(losses[way]), 4) if args.seeds > 1 else None,
        }
        print(way, json.dumps(results[way]))
    if args.json:
        told = {
            "date": datetime.date.today().isoformat(),
            "torch": torch.__version__,
            "load": [round(each) for each in os.getloadavg()[:2]],
            "texts": len(texts),
            "mean_length": round(float(lengths.mean()), 1),
            "length_quantiles": quantiles,
            "batch": BATCH,
            "micro_batches": PARTS,
            "window": WINDOW,
            "tokens_per_batch": round(BATCH * float(lengths.mean())),
            "texts_trained_on": args.texts,
            "tokens_trained_on": int(lengths[: args.texts].sum()),
            "seeds": args.seeds,
            "results": results,
        }
        args.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
