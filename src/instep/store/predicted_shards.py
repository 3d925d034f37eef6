"""Predictions as a folder of shards, as `instep prepare` writes them.

Samples that were skipped are no rows, but bad records; the column `sample` says which sample of the
dataset a row is of. Nothing here knows models or torch. Way in: `write_shards`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from instep.data.shards.columns import Column
from instep.data.shards.digest import blocks_of, digest_blocks, digest_of
from instep.data.shards.manifest import Manifest, Shard, kept_name, lines_of, write_manifest
from instep.data.shards.statistics import Figures, take_batch
from instep.data.shards.views import View, bytes_of
from instep.data.shards.writer import BATCH_BYTES, ShardWriter
from instep.plain_file import crc32_of
from instep.store.predictions import Part

SHARD_BYTES = 32 << 20
"""A shard has at least so much, but for the last."""

Outputs = dict[str, tuple[np.dtype[Any], list[int]]]
"""Outputs by name: the type of a value, and the shape of a row."""


def write_shards(
    to: Path,
    parts: Iterable[Part],
    outputs: Outputs,
    made_by: dict[str, Any],
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write a folder of shards; returns it.

    Args:
        to: the folder; what lies there is removed.
        parts: of all batches, in their order.
        outputs: of every part.
        made_by: for the manifest.
        shard_bytes: of a shard at least.

    Raises:
        OSError: it cannot be written.
    """
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir()
    columns = [Column("sample", "number", "int64")]
    for name, (dtype, shape) in outputs.items():
        columns.append(Column(name, "array" if shape else "number", dtype.name, tuple(shape)))
    figures = [Figures() for _ in columns]
    bad = list[dict[str, Any]]()
    batches = _grouped(_views(parts, outputs, bad))
    shards = list(_written(to, columns, batches, figures, shard_bytes))
    samples = sum(shard.samples for shard in shards)
    files = [(to / shard.file, shard.samples) for shard in shards]
    blocks = b"".join(digest_blocks(files, 0, blocks_of(samples)))
    digest = digest_of(columns, samples, [blocks])
    tables = {c.name: own.as_table(c) for c, own in zip(columns, figures, strict=True)}
    lines = lines_of(bad)
    manifest = Manifest(
        columns=columns,
        samples=samples,
        bytes=sum(shard.bytes for shard in shards),
        sha256=digest,
        bad=len(bad),
        shards=shards,
        blocks=_kept(to / f"blocks-{digest[:16]}.sha256", blocks),
        bad_file=_kept(to / kept_name("bad", lines, ".jsonl"), lines) if lines else "",
        statistics={name: table for name, table in tables.items() if table},
        made_by=made_by,
    )
    write_manifest(to, manifest)
    return to


def _views(
    parts: Iterable[Part], outputs: Outputs, bad: list[dict[str, Any]]
) -> Iterator[list[View]]:
    """Read the rows of each part; what was skipped goes to `bad`."""
    for part in parts:
        skipped = dict(part.head["skipped"])
        bad += [{"where": f"sample {at}", "error": cause} for at, cause in skipped.items()]
        if not part.rows:
            continue
        numbers = [at for at in range(part.head["first"], part.head["stop"]) if at not in skipped]
        views = [View(np.array(numbers, np.int64))]
        for name, (dtype, shape) in outputs.items():
            count, begin = (
                part.rows * int(np.prod(shape, dtype=np.int64)),
                part.head["columns"][name][2],
            )
            values = np.frombuffer(part.body, dtype, count, begin)
            views.append(View(values.reshape(part.rows, *shape)))
        yield views


def _grouped(parts: Iterable[list[View]]) -> Iterator[list[View]]:
    """Join the rows in batches of a few MB."""
    held, size = list[list[View]](), 0
    for views in parts:
        held.append(views)
        size += bytes_of(views)
        if size >= BATCH_BYTES:
            yield _joined(held)
            held, size = [], 0
    if held:
        yield _joined(held)


def _joined(parts: Sequence[list[View]]) -> list[View]:
    return [
        View(np.concatenate([view.data for view in column])) for column in zip(*parts, strict=True)
    ]


def _written(
    to: Path,
    columns: Sequence[Column],
    batches: Iterable[list[View]],
    figures: Sequence[Figures],
    shard_bytes: int,
) -> Iterator[Shard]:
    """Write shards one after the other."""
    rest, number = iter(batches), 0
    views = next(rest, None)
    while views is not None:
        path, size = to / f"shard-{number:05d}.arrow", 0
        with ShardWriter(path, columns) as writer:
            while views is not None and size < shard_bytes:
                writer.write(views)
                take_batch(figures, columns, views)
                size += bytes_of(views)
                views = next(rest, None)
            writer.close(durable=True)
        yield Shard(path.name, writer.samples, writer.bytes, crc32_of(path))
        number += 1


def _kept(path: Path, data: bytes) -> str:
    """Write a small file; returns its name."""
    path.write_bytes(data)
    return path.name
