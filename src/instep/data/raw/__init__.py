"""How raw files are read: where each may be cut, and which records lie between two cuts.

A file is cut at record boundaries that follow from the file alone, so the records of a piece,
and their order, never depend on how many workers read. To add a format: write a class with the
methods of `RawFormat` in a file of this folder, then add its line to `FORMATS` in `base.py`.
Nothing here knows shards, samples, processes or the user's function. Importing this package does
not import pyarrow or torch. Ways in: `sources` for what a user names, `FORMATS` for a format.
"""

from __future__ import annotations

from instep.data.raw.base import FORMATS, Chunk, Piece, RawFormat
from instep.data.raw.find import format_of, sources

__all__ = ["FORMATS", "Chunk", "Piece", "RawFormat", "format_of", "sources"]
