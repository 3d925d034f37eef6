"""Datasets from files that people have on disk; nothing is downloaded.

Each source returns a map-style dataset, of (inputs, target) where it says nothing else. Files are
checked when they are opened: a damaged or missing one is a `DataError` that names the file, what it
is, and what is expected. `images.py` has MNIST and CIFAR-10, `image_folder.py` a folder for each
class, `text.py` windows of bytes, `tokens.py` of tokens, `shards.py` prepared samples,
`hugging_face.py` those of the package `datasets`, `webdataset.py` those in tar files; `files.py` is
what they share. Way in: `SOURCES` of `data`, by name. A source that has only its line in
`SOURCES` can be imported from here too. Nothing here knows jobs, seeds or batches.
"""

from __future__ import annotations

from instep.data import SOURCES
from instep.data.sources.hugging_face import hugging_face
from instep.data.sources.image_folder import image_folder
from instep.data.sources.images import cifar10, mnist
from instep.data.sources.shards import shards
from instep.data.sources.text import text
from instep.data.sources.tokens import tokens
from instep.data.sources.webdataset import webdataset

__all__ = [
    "cifar10",
    "hugging_face",
    "image_folder",
    "mnist",
    "shards",
    "text",
    "tokens",
    "webdataset",
]

# now, and not when a name is first wanted: a file of that name would be in its place
globals().update({name: SOURCES[name] for name in SOURCES})
