"""Samples, in an order that depends on nothing but the job.

Which samples make a global batch is a pure function (`order.py`), who computes
which part of it is another (`balance.py`); `loader.py` has them ready when the
step wants them, and `sources.py` reads the files that people have on disk.
Nothing here knows of networks, ranks or models.

To add a source: write a function that returns a map-style dataset, then add its
line to `SOURCES`. Importing this package does not import torch.
"""

from __future__ import annotations

from instep.registry import Registry

SOURCES = Registry(
    "data source",
    {
        "cifar10": "instep.data.images:cifar10",
        "image_folder": "instep.data.image_folder:image_folder",
        "mnist": "instep.data.images:mnist",
        "text": "instep.data.text:text",
    },
)
"""Datasets that can be read from a user's disk, by name."""
