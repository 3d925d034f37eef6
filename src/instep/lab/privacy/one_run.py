"""A lower bound of epsilon from one run: how well can it be guessed which canaries were in it?

Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846). Each canary is in with probability 1/2, by
itself. Whatever is (epsilon, delta)-private lets nobody guess too many of them right, so that many
right guesses prove a larger epsilon. It assumes nothing of the distribution of scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PARTS = (1.0, 0.5, 0.2, 0.1, 0.04)
"""How much of the canaries is guessed: the best of these counts, at a share of the confidence."""

_LARGEST = 64.0


def lower_bound(
    scores: NDArray[np.float64], inside: NDArray[np.bool_], delta: float, confidence: float
) -> float:
    """Epsilon that the guesses prove.

    Args:
        scores: [canaries], higher for those that seem to be in.
        inside: [canaries], which of them were.
        delta: of the claim.
        confidence: with which the bound holds, such as 0.99.

    Returns:
        0 where nothing is proved.
    """
    canaries, order, found = len(scores), np.argsort(scores, kind="stable"), 0.0
    for part in _PARTS:
        each = int(part * canaries) // 2
        if not each:
            continue
        right = int(inside[order[canaries - each :]].sum() + (~inside[order[:each]]).sum())
        doubt = (1 - confidence) / len(_PARTS)
        found = max(found, _proved(right, 2 * each, canaries, delta, doubt))
    return found


def _proved(right: int, guesses: int, canaries: int, delta: float, doubt: float) -> float:
    """The largest epsilon with which so many right guesses have a probability below `doubt`."""
    low, high = 0.0, _LARGEST
    if _chance(right, guesses, canaries, low, delta) > doubt:
        return 0.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        if _chance(right, guesses, canaries, middle, delta) > doubt:
            high = middle
        else:
            low = middle
    return low


def _chance(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """The most that the probability of so many right guesses can be (theorem 5.2)."""
    odds = 1 / (1 + math.exp(-epsilon))
    tail = tails(guesses, odds)
    gains = tail[:right][::-1] - tail[right]  # of 1, 2, ... fewer right guesses
    slack = float((gains / np.arange(1, right + 1)).max(initial=0.0))
    return float(min(1.0, tail[right] + 2 * canaries * delta * slack))


def tails(count: int, chance: float) -> NDArray[np.float64]:
    """[count + 1]: the probability that a binomial is at least 0, 1, 2, ..."""
    numbers: NDArray[Any] = np.arange(1, count + 1)
    logs = np.concatenate([[0.0], np.cumsum(np.log((count - numbers + 1) / numbers))])
    with np.errstate(divide="ignore"):
        wrong = np.log1p(-chance) if chance < 1 else -np.inf
        each = np.arange(count + 1)
        logs = logs + each * math.log(chance) + np.where(each < count, (count - each) * wrong, 0.0)
    found: NDArray[np.float64] = np.cumsum(np.exp(logs)[::-1])[::-1]
    return np.minimum(found, 1.0)
