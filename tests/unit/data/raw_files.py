"""Raw files that are cut anywhere, and read whole."""

from itertools import pairwise

import pyarrow as pa

from instep.data.raw import Piece


def read(form, pieces):
    """All records with their places, and all that are bad."""
    rows, bad = [], []
    for piece in pieces:
        for chunk in form.read(piece):
            rows += zip(chunk.rows, chunk.places, strict=True)
            bad += chunk.bad
    return rows, bad


def cut_at(path, name, cuts):
    """Pieces of a file that is cut at any bytes."""
    size = path.stat().st_size
    edges = sorted({0, size, *(cut % size for cut in cuts if size)})
    return [Piece(str(path), name, *edge) for edge in pairwise(edges)]


def zstd_frames(parts, sizes_known):
    if sizes_known:  # written by hand: raw blocks, in frames that say what they hold
        head = b"\x28\xb5\x2f\xfd\xa0"
        block = [(1 | len(part) << 3).to_bytes(3, "little") + part for part in parts]
        size = [len(part).to_bytes(4, "little") for part in parts]
        return [head + a + b for a, b in zip(size, block, strict=True)]
    made = []
    for part in parts:
        sink = pa.BufferOutputStream()
        with pa.CompressedOutputStream(sink, "zstd") as stream:
            stream.write(part)
        made.append(sink.getvalue().to_pybytes())
    return made
