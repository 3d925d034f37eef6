"""A convolutional net with BatchNorm on CIFAR-10, or on your own folder of images.

    instep run examples/05_cifar/job.toml --set arguments.data=DIR
    instep run examples/05_cifar/job.toml --set arguments.data=DIR --set arguments.folder=true

DIR holds data_batch_1.bin to data_batch_5.bin and test_batch.bin (the binary
version); or, with folder = true, train/CLASS/*.png and test/CLASS/*.png.
Shows augmentation, which draws from the generator that it gets, so a sample is
changed in the same way at any number of workers. BatchNorm sees micro-batches,
which the job fixes, so it gives the same result too.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import instep
from instep.data import sources

EDGE, SHIFT = 32, 4  # pixels


def recipe(data: str, folder: bool = False, lr: float = 2e-3) -> instep.Recipe:
    if folder:
        train, validate = (sources.image_folder(Path(data) / p, EDGE) for p in ("train", "test"))
        classes = len(train.classes)
    else:
        train, validate = sources.cifar10(data, train=True), sources.cifar10(data, train=False)
        classes = 10
    return instep.Recipe(
        model=nn.Sequential(
            *layer(3, 32), *layer(32, 64), *layer(64, 128), nn.Flatten(), nn.Linear(2048, classes)
        ),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.05),
        train=train,
        validate=validate,
        augment=shift_and_flip,
        metrics={"accuracy": accuracy},
    )


def layer(inputs: int, outputs: int) -> list[nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


def shift_and_flip(
    sample: tuple[Tensor, Tensor], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    image, label = sample  # [3, EDGE, EDGE], []
    down, right = torch.randint(2 * SHIFT + 1, (2,), generator=generator).tolist()
    image = F.pad(image, [SHIFT] * 4)[:, down : down + EDGE, right : right + EDGE]
    flip = torch.rand((), generator=generator) < 0.5
    return image.flip(2) if flip else image, label


def accuracy(outputs: Tensor, target: Tensor) -> Tensor:
    return (outputs.argmax(dim=1) == target).float().mean()
