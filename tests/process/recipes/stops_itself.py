"""A script for Slurm or nobody: sessions that rules end, for a recipe and in loops of their own."""

import sys

import tiny
import torch
from torch import nn
from torch.nn import functional

import instep

RUNS = sys.argv[1]
COMMON = {"runs": RUNS, "seed": 5, "quiet": True}


def train_a_recipe_to_a_target() -> None:
    train = {"epochs": 50, "global_batch": 16}
    stop = {"metric": "accuracy", "target": 0.8}
    session = instep.join(tiny.recipe, name="recipe", train=train, stop=stop, **COMMON)
    last = list(session.steps())[-1]
    assert last.metrics is not None
    assert last.metrics["accuracy"] >= 0.8


def train_in_a_loop_of_its_own(name: str, **stop: object) -> None:
    with instep.join(name=name, train={"global_batch": 16}, stop=stop, **COMMON) as session:
        mine = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        model, optimizer, loader = session.prepare(
            mine, torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9), tiny.recipe().train
        )
        held_out = tiny.recipe().validate.tensors
        for _ in range(50):
            for inputs, target in loader:
                loss = functional.cross_entropy(model(inputs), target)
                session.backward(loss)
                optimizer.step()
            with torch.no_grad():
                accuracy = float(tiny.accuracy(model(held_out[0]), held_out[1]))
            session.validated(len(held_out[0]), accuracy=accuracy)
            if session.stopped:
                break
        else:
            raise AssertionError("nothing stopped the loop")


if __name__ == "__main__":
    train_a_recipe_to_a_target()
    train_in_a_loop_of_its_own("validated", metric="accuracy", target=0.8)
    train_in_a_loop_of_its_own("steps", gradient_norm=0.2)
