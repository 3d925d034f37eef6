"""Models for the equality gate on meshes of our own, and what is broken in these meshes."""

import dataclasses

import predicts_words
import splits
import torch
from torch import nn
from torch.nn import functional

from instep.comm.alone import AloneComm
from instep.data.order import key
from instep.parallel.global_batch.reads import Reads
from instep.parallel.pipeline.pipeline import Pipeline
from instep.parallel.tensor.links import GroupLinks
from instep.worker.mesh_trial import gradients as mesh_check
from instep.worker.passes import whole_batch
from instep.worker.trial import moves

TOGETHER = 2
"""Micro-batches that two ranks of a shard compute at the same time."""


def shared_gradients_stay_apart():
    Pipeline.sum_shared = lambda self: None


def products_stay_apart():
    GroupLinks._sum = lambda self, part, site: part


def gradients_stay_apart():
    GroupLinks._copy = lambda self, whole, group: whole


def one_key_for_all_ranks():
    def key_of_first(seed, of, step, number):
        return key(seed, of, step, number - number % TOGETHER)

    whole_batch.key = key_of_first


def each_rank_normalises_alone():
    join = Reads.join
    Reads.join = lambda self, comm, waiting: join(self, AloneComm(), waiting)


BROKEN = {
    "": lambda: None,
    "shared gradients": shared_gradients_stay_apart,
    "products": products_stay_apart,
    "gradients": gradients_stay_apart,
    "keys": one_key_for_all_ranks,
    "norm": each_rank_normalises_alone,
    "shards": splits.sabotaged,
}


def recipe(
    broken="",
    largest=0,
    moved=True,
    zero=False,
    evaluates="",
    mixed=False,
    hooked=False,
    **options,
):
    """A model in which a mesh is broken; with `largest` parameters at most compared as a whole.

    Args:
        moved: whether the gate moves parameters off their start.
        zero: whether the head starts at zero, as in `splits.Net`.
        evaluates: `otherwise`: the model computes otherwise in evaluation on a mesh.
        mixed: whether a parameter is of float32, whatever the others are.
        hooked: whether the optimizer has a hook.
    """
    BROKEN[broken]()
    mesh_check.LARGEST = largest or mesh_check.LARGEST
    moves._BY *= moved
    made = splits.recipe(**options)
    if zero:
        nn.init.zeros_(made.model.head.weight)
    if evaluates:
        made.model.head = Otherwise(made.model.head)
    if mixed:
        made.model.norm = Gain()
    if hooked:
        made = dataclasses.replace(made, optimizer=watched)
    return made


def watched(parameters):
    optimizer = splits.sgd(parameters)
    optimizer.register_step_post_hook(lambda *_: None)
    return optimizer


class Gain(nn.Module):
    """A layer whose parameter stays in float32."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(splits.WIDTH))

    def forward(self, x):
        return x * self.gain.to(x.dtype)


class Otherwise(nn.Module):
    """A layer that in evaluation uses what it has of its weight as if that were all of it."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        found = self.layer(x)
        if self.training or not torch.distributed.is_initialized():
            return found
        return found * 1.01


class Lines(nn.Module):
    """Blocks that compute each position by itself."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(predicts_words.WORDS, splits.WIDTH)
        self.blocks = nn.ModuleList(splits.Block(0.1) for _ in range(3))
        self.norm = nn.LayerNorm(splits.WIDTH)
        self.head = nn.Linear(splits.WIDTH, predicts_words.WORDS)

    def forward(self, tokens):
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def lines(largest=0):
    return dataclasses.replace(words(largest=largest), model=Lines)


def words(broken="", largest=0):
    """A transformer whose embedding is its head's weight."""
    BROKEN[broken]()
    mesh_check.LARGEST = largest or mesh_check.LARGEST
    tokens = predicts_words.inputs()
    return dataclasses.replace(
        predicts_words.recipe(),
        train=torch.utils.data.TensorDataset(tokens, tokens.roll(-1, 1)),
        loss=lambda scores, targets: functional.cross_entropy(scores.mT, targets),
    )
