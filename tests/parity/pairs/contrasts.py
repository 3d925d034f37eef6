"""Losses that compare the samples of a batch with each other."""

from __future__ import annotations

import torch
from pair import Parts, pair, said, samples_of
from torch.nn import functional as F

from pairs.common import classes, mlp

COMPARED = "apart|gradient|micro-batch|samples"


def info_nce(model, batch):
    """Each sample has to find its other view among those of the batch."""
    one = F.normalize(model(batch[0]), dim=1)
    other = F.normalize(model(batch[0].roll(1, 1) * 0.2 + batch[0]), dim=1)
    logits = one @ other.T / 0.2
    return F.cross_entropy(logits, torch.arange(len(logits), device=logits.device))


def triplets(model, batch):
    """Every sample against all of its class, and all of others."""
    out = model(batch[0])
    far = torch.cdist(out, out).square()
    same = batch[1].unsqueeze(0) == batch[1].unsqueeze(1)
    positive = torch.where(same, far, 0).sum(1) / same.sum(1)
    negative = torch.where(same, 100.0, far).amin(1)
    return F.relu(positive - negative + 1).mean()


@pair("contrastive within the batch", said(COMPARED))
def contrastive():
    return Parts(
        model=mlp(outputs=8),
        train=classes(),
        compute_loss=info_nce,
        given={"weight": samples_of},
    )


@pair("contrastive within the batch, no weight", said(COMPARED + "|weight|loss"))
def contrastive_unsaid():
    return Parts(model=mlp(outputs=8), train=classes(), compute_loss=info_nce)


@pair("triplets within the batch", said(COMPARED))
def triplet():
    return Parts(
        model=mlp(outputs=8),
        train=classes(),
        compute_loss=triplets,
        given={"weight": samples_of},
    )


@pair("a loss that is divided by the batch's largest", said(COMPARED))
def by_largest():
    def loss(outputs, target):
        each = F.cross_entropy(outputs, target, reduction="none")
        return each.mean() / each.detach().max()

    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})


@pair("the hardest half of the batch", said(COMPARED))
def hardest():
    """Online hard example mining."""

    def loss(outputs, target):
        each = F.cross_entropy(outputs, target, reduction="none")
        return each.topk(max(1, len(each) // 2)).values.mean()

    return Parts(model=mlp(), train=classes(), loss=loss, given={"weight": samples_of})
