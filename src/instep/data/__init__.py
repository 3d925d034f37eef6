"""Which samples make a global batch, which worker computes them, and how they are read.

The samples of a step are a pure function of the job (`order.py`), and so is each worker's part
(`dealing.py`). `loader.py` is the way in: it has batches ready when the step wants them.

- `reading/`: how slices become batches, in this process or in others;
- `samples/`: what single samples held, and which of them cannot be read;
- `sources/`: datasets from files on disk;
- `splits/`: which samples are trained on, and which are validated on;
- `shards/`: prepared samples; `raw/`: how raw files are cut and read;
- `torch_loader.py`: what is kept of a `DataLoader` that the user gave.

Nothing here knows networks, ranks or models. To add a source: write a function that returns a
map-style dataset in a file of `sources/`, then add its line to `SOURCES`. Importing this
package does not import torch.
"""

from __future__ import annotations

from instep.registry import Registry

SOURCES = Registry(
    "data source",
    {
        "cifar10": "instep.data.sources.images:cifar10",
        "hugging_face": "instep.data.sources.hugging_face:hugging_face",
        "image_folder": "instep.data.sources.image_folder:image_folder",
        "mnist": "instep.data.sources.images:mnist",
        "shards": "instep.data.sources.shards:shards",
        "text": "instep.data.sources.text:text",
        "tokens": "instep.data.sources.tokens:tokens",
        "webdataset": "instep.data.sources.webdataset:webdataset",
    },
)
"""Datasets that can be read from the disk, by name."""
