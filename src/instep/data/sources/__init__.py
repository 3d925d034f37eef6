"""Datasets from files that people have on disk; nothing is downloaded.

Each source returns a map-style dataset of (inputs, target). Files are checked
when they are opened: a damaged or missing one is a `DataError` that names the
file, what was found and what is wanted. One file each: `images.py` (MNIST and
CIFAR-10), `image_folder.py`, `text.py`.
"""

from __future__ import annotations

from instep.data.sources.image_folder import image_folder
from instep.data.sources.images import cifar10, mnist
from instep.data.sources.text import text

__all__ = ["cifar10", "image_folder", "mnist", "text"]
