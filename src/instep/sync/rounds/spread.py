"""How far the participants of a round are apart: their parameters, and what they predict.

Every rank measures its own participants against what all have agreed on; one small message adds
that up. Nothing that is trained depends on it. What a participant predicts on samples that stay the
same is given as probabilities; how it came to them, `worker/rounds/probe.py` knows.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm


class Contribution(NamedTuple):
    """What one participant gave."""

    unit: int
    weight: float
    way: list[tuple[int, Tensor]]
    """How far it came, backwards, by the parameter's number."""
    predicted: Tensor | None = None
    """Probabilities [samples, classes]."""


class Spread(NamedTuple):
    """Of one round; the same on every rank."""

    distance: float
    """Of the participants' parameters from those agreed on: the root of the mean square, by
    weight."""
    way: float
    """From the round's beginning to the parameters agreed on."""
    divergence: float | None
    """Kullback-Leibler divergence of the participants' predictions from their mean prediction, in
    nats; the mean over participants, by weight, and samples. None where there are none."""

    @property
    def ratio(self) -> float:
        """Of the two lengths: how much larger than what they agree on is what they do not."""
        return self.distance / self.way if self.way else math.inf if self.distance else 0.0


@torch.no_grad()
def spread(
    given: Sequence[Contribution],
    agreed: Sequence[Tensor | None],
    comm: Comm,
    *,
    holders: Sequence[int],
    replicas: int,
    first: bool,
    device: torch.device,
    local: Collection[int] = (),
) -> Spread:
    """Measure a round; every rank calls it.

    Args:
        given: by the participants of this rank.
        agreed: by parameter, what to take off it to come to the mean.
        comm: all ranks.
        holders: of each parameter, how many ranks of a replica have the same of it.
        replicas: how many of them there are.
        first: whether this rank is one of the first replica.
        device: of what `comm` sums.
        local: parameters that stay with their participant, and do not count.

    Raises:
        PeerError: a rank went away.
    """
    agreed = [None if slot in local else mean for slot, mean in enumerate(agreed)]
    given = [e._replace(way=[w for w in e.way if w[0] not in local]) for e in given]
    seen = [(each.weight, each.predicted) for each in given if each.predicted is not None]
    own = torch.zeros(6, dtype=torch.float64)
    for each in given:
        own[0] += each.weight if each.way else 0.0
        own[1] += each.weight * _apart(each, agreed, holders)
    for tensor, count in zip(agreed, holders, strict=True):
        if first and tensor is not None:
            own[2] += _square(tensor) / count
    if seen:
        own[3:] = torch.tensor([1, *seen[0][1].shape])
    told = own.to(device)
    comm.all_reduce(told).wait()
    weight, apart, way, those, samples, classes = told.tolist()
    square = comm.size // replicas * apart / weight if weight else 0.0
    divergence = None
    if those:
        shape = round(samples / those), round(classes / those)
        divergence = _divergence(seen, shape, comm, device)
    return Spread(math.sqrt(square), math.sqrt(way), divergence)


def _apart(given: Contribution, agreed: Sequence[Tensor | None], holders: Sequence[int]) -> float:
    total = 0.0
    for slot, way in given.way:
        mean = agreed[slot]
        total += _square(way if mean is None else way - mean) / holders[slot]
    return total


def _square(tensor: Tensor) -> float:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    length = float(torch.linalg.vector_norm(dense, dtype=torch.float64))
    return length * length


def _divergence(
    seen: Sequence[tuple[float, Tensor]], shape: tuple[int, int], comm: Comm, device: torch.device
) -> float:
    """The entropy of the mean prediction less the mean entropy of the predictions."""
    table = torch.zeros(2 + math.prod(shape), dtype=torch.float64)
    for weight, predicted in seen:
        exact = predicted.double().cpu()
        entropy = float(torch.special.entr(exact).sum(-1).mean())
        table += weight * torch.cat([torch.tensor([1.0, entropy]), exact.flatten()])
    shared = table.to(device)
    comm.all_reduce(shared).wait()
    _, entropy, *mean = shared.cpu().div(shared[0].cpu()).tolist()
    of_mean = torch.special.entr(torch.tensor(mean, dtype=torch.float64).view(shape)).sum(-1).mean()
    return max(0.0, float(of_mean) - float(entropy))
