"""Claims that accounting rests on, tested on what canaries saw: noise, clipping, sampling.

Whoever runs this has the secret of the steps, so it is known what each released number should be
without noise. What is left is to be Gaussian, of the claimed size in every step, and independent of
other steps and numbers. A test fails where what it sees has a probability below 1e-7 or so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from instep.lab.privacy.canaries import CanaryRun, CanaryStep
from instep.privacy.sampling import PrivateSampling

_FAR = 5.5
"""Standard deviations at which a test fails."""

_EPOCHS = 60
"""Epochs that are drawn to look at the sampling alone."""

Floats = NDArray[np.float64]


def measured_noise(step: CanaryStep, run: CanaryRun) -> float:
    """Standard deviation of the noise that was seen, over the sensitivity."""
    rest = run.released - step.amplitude * run.given
    return math.sqrt(float((rest**2).mean())) / step.grid.sensitivity


def broken_claims(step: CanaryStep, run: CanaryRun) -> list[str]:
    """Sentences on what is not as accounting assumes; none where all is."""
    rest = (run.released - step.amplitude * run.given) / step.sigma
    return [*_of_noise(rest, run.given), *_of_sampling(step.drawn, step.sampling)]


def _of_noise(rest: Floats, given: NDArray[np.bool_]) -> Iterator[str]:
    """Tests of what is left of the released numbers, [steps, canaries]."""
    count, width = rest.size, rest.shape[1]
    square = float((rest**2).mean())
    if abs(square - 1) * math.sqrt(count / 2) > _FAR:
        yield f"noise and rounding are {math.sqrt(square):.4g} of the claimed noise"
    if abs(float(rest.mean())) * math.sqrt(count) > _FAR:
        yield "what is added to sums has a mean that is not 0"
    by_step = (rest**2).mean(1) - 1
    if np.abs(by_step).max() * math.sqrt(width / 2) > _FAR + 0.5:
        yield f"step {int(np.abs(by_step).argmax()) + 1} has noise of another size than is claimed"
    elif float((by_step**2).mean()) * width / 2 > 1 + _FAR * math.sqrt(2 / len(rest)):
        yield "the size of the noise differs from step to step"
    for name, part in (("present", rest[given]), ("absent", rest[~given])):
        if len(part) and abs(float((part**2).mean()) - 1) * math.sqrt(len(part) / 2) > _FAR:
            yield f"numbers of canaries that are {name} have noise of another size"
        if len(part) and abs(float(part.mean())) * math.sqrt(len(part)) > _FAR:
            yield f"a clipped gradient counts more or less than the limit ({name} canaries)"
    fourth = float((rest**4).mean()) - 3
    if abs(fourth) * math.sqrt(count / 96) > _FAR + 2:
        yield "the noise is not Gaussian: its tails are others"
    for what, one, other in (
        ("steps", rest[1:], rest[:-1]),
        ("numbers", rest[:, 1:], rest[:, :-1]),
        ("every second step", rest[2:], rest[:-2]),
    ):
        if one.size and abs(float((one * other).sum())) / math.sqrt(one.size) > _FAR + 0.5:
            yield f"the noise of neighbouring {what} is not independent"


def _of_sampling(drawn: PrivateSampling, sampling: str) -> Iterator[str]:
    """Tests of which samples are in which step."""
    steps, samples = drawn.steps, drawn.samples
    if steps == 1:
        return
    table = np.zeros((steps, samples), np.int64)
    sizes = np.zeros((_EPOCHS, steps))
    repeats = unseen = 0
    for epoch in range(_EPOCHS):
        uses = np.zeros(samples, np.int64)
        for place in range(steps):
            some = drawn.of_step(epoch, place)
            sizes[epoch, place] = len(some)
            np.add.at(uses, some, 1)
            np.add.at(table[place], some, 1)
        repeats, unseen = repeats + int((uses > 1).sum()), unseen + int((uses == 0).sum())
    if sampling == "allocation" and (repeats or unseen):
        yield f"{repeats + unseen} samples are not in exactly one step of an epoch"
    rate = 1 / steps
    expected = samples * rate * (1 - rate)
    found, freedom = float(((sizes - samples * rate) ** 2).mean()) / expected, _EPOCHS * (steps - 1)
    if abs(found - 1) * math.sqrt(freedom / 2) > _FAR:
        yield f"sizes of steps vary {found:.3g} times as much as those of drawn ones"
    chi = float(((table - _EPOCHS * rate) ** 2).sum()) / (_EPOCHS * rate * (1 - rate))
    if abs(chi / table.size - 1) * math.sqrt(table.size / 2) > 2 * _FAR:
        yield "samples are not in all steps equally often"
    by_step = (table.sum(1) - _EPOCHS * samples * rate) / math.sqrt(_EPOCHS * expected)
    if np.abs(by_step).max() > _FAR:
        yield "some steps have more samples than others"
