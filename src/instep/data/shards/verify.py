"""Whether a folder has what was written: every block's digest, then every file's checksum.

Bytes between samples belong to no block, so a file is compared as a whole, too. Way in: `damaged`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from pathlib import Path

from instep.data.shards.columns import Column
from instep.data.shards.digest import BLOCK, SIZE, blocks_of, digest_blocks, digest_of
from instep.data.shards.manifest import Manifest, Shard, is_kept
from instep.data.shards.writer import ShardFile
from instep.errors import DataError
from instep.plain_file import crc32_of, read_plain

_AT_ONCE = 16
"""Blocks that one thread hashes before it says so."""


def damaged(
    folder: Path, manifest: Manifest, did: Callable[[int], None] = lambda _: None
) -> list[str]:
    """What is not as it was written, in words; hashing gives up Python's lock, so threads do it.

    Args:
        folder: of the manifest.
        manifest: of the folder.
        did: told the samples that were checked, now and then.
    """
    found = [text for shard in manifest.shards if (text := _wrong(folder, shard, manifest.columns))]
    if found:
        return found
    try:
        known = read_plain(folder / manifest.blocks)
    except OSError as error:
        return [f"{folder / manifest.blocks} cannot be read: {error.strerror or error}"]
    if digest_of(manifest.columns, manifest.samples, [known]) != manifest.sha256:
        return [f"{folder / manifest.blocks} is not what was written, or the manifest is not"]
    try:
        found = list(_wrong_blocks(folder, manifest, known, did))
    except DataError as error:  # of a record batch
        return [str(error)]
    return [*found, *(text for text in _wrong_files(folder, manifest) if not found)]


def _wrong(folder: Path, shard: Shard, columns: list[Column]) -> str:
    try:
        file = ShardFile(folder / shard.file, shard.bytes)
    except DataError as error:
        return str(error)
    if file.columns != columns:
        return f"{file.path} has other columns than were written"
    if len(file) != shard.samples:
        return f"{file.path} has {len(file):,} samples, but {shard.samples:,} were written"
    return ""


def _wrong_files(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Find files whose samples are right, and other bytes are not."""
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        sums = pool.map(crc32_of, [folder / shard.file for shard in manifest.shards])
        for shard, crc32 in zip(manifest.shards, sums, strict=True):
            if shard.crc32 not in (None, crc32):
                yield f"{folder / shard.file} has other bytes between its samples than were written"
    by_samples = f"bad-{manifest.sha256[:16]}.jsonl"  # of older predictions: its bytes are unknown
    for name in filter(None, (manifest.bad_file, manifest.tasks)):
        if not (is_kept(folder / name) or (name == by_samples and (folder / name).is_file())):
            yield f"{folder / name} is missing, or is not what was written"


def _wrong_blocks(
    folder: Path, manifest: Manifest, known: bytes, did: Callable[[int], None]
) -> Iterator[str]:
    files = [(folder / shard.file, shard.samples) for shard in manifest.shards]
    starts = [0, *accumulate(shard.samples for shard in manifest.shards)]
    count = blocks_of(manifest.samples)
    spans = [(at, min(at + _AT_ONCE, count)) for at in range(0, count, _AT_ONCE)]

    def hashed(span: tuple[int, int]) -> list[bytes]:
        return list(digest_blocks(files, *span))

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for (first, stop), digests in zip(spans, pool.map(hashed, spans), strict=True):
            for block, digest in enumerate(digests, first):
                if digest != known[block * SIZE : (block + 1) * SIZE]:
                    yield _said(manifest, starts, block)
            did((stop - first) * BLOCK)


def _said(manifest: Manifest, starts: list[int], block: int) -> str:
    first, stop = block * BLOCK, min((block + 1) * BLOCK, manifest.samples)
    names = [
        shard.file
        for shard, begin in zip(manifest.shards, starts, strict=False)
        if begin < stop and begin + shard.samples > first
    ]
    return f"samples {first:,} to {stop - 1:,} are not what was written ({', '.join(names)})"
