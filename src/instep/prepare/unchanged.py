"""Which raw files are those that an earlier command has read, whatever their times say.

A file of the same size, time of change, inode and time of change of the inode is. One that differs
in these is if its checksum is the one in the manifest: then it keeps its version, and nothing of it
is read again. Nothing here knows tasks. Ways in:
`with_versions`, `stamped`; `check_sources` while they are prepared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec.structs import replace

from instep.data.shards.manifest import Manifest, Source
from instep.errors import DataError
from instep.prepare.asked import Asked
from instep.prepare.plan import RawFile, digest_of, files_of
from instep.words import is_url

Hashes = Callable[[list[RawFile]], list[str]]
"""Gives the hash of each file."""


def with_versions(
    files: Sequence[RawFile], before: Sequence[Source], hashes: Hashes, *, all_files: bool
) -> list[RawFile]:
    """Give files the versions that they had, as far as they are what they were.

    Args:
        files: as they are now.
        before: files of the manifest that is there.
        hashes: reads files.
        all_files: compare the contents of all, also where nothing differs.
    """
    known = {source.path: source for source in before if source.key}
    pairs = [(file, known.get(file.name)) for file in files]
    doubtful = [
        file
        for file, source in pairs
        if source is not None and _may_be(file, source) and (all_files or not is_of(file, source))
    ]
    found = dict(zip([file.name for file in doubtful], hashes(doubtful), strict=True))
    return [
        file if source is None else _versioned(file, source, found.get(file.name))
        for file, source in pairs
    ]


def stamped(manifest: Manifest, files: Sequence[RawFile]) -> Manifest:
    """A manifest that knows its files as they are now, which were found to be the same."""
    now = {file.name: file for file in files}
    sources = [
        replace(each, state=now[each.path].state, stamp=now[each.path].stamp)
        if each.path in now
        else each
        for each in manifest.sources
    ]
    return replace(manifest, sources=sources)


def check_sources(asked: Asked, files: Sequence[RawFile]) -> None:
    """Refuse files that are no longer what they were when the command began.

    Raises:
        DataError: names the file.
    """
    for file in files:
        if not file.url and not file.path.exists():
            raise DataError(
                f"{file.name} was removed while it was prepared. Put it back, or name other "
                "sources, and give the command again: what is done is kept."
            )
    here = [each for each in asked.sources if not is_url(each)]  # others are copies
    now = {file.place: (file.state, file.stamp) for file in files_of(replace(asked, sources=here))}
    for file in files:
        if not file.url and now.get(file.place) != (file.state, file.stamp):
            raise DataError(
                f"{file.name} has changed while it was prepared. Give the same command again, "
                "and leave it as it is meanwhile."
            )


def is_of(file: RawFile, source: Source) -> bool:
    """Tell whether nothing differs that can be seen without reading."""
    return (file.state, file.stamp) == (source.state, source.stamp)


def _may_be(file: RawFile, source: Source) -> bool:
    """Whether a file may be the same; names of images count, and no checksum has them."""
    names = file.format != "images" or file.state == source.state
    return not file.url and names and file.bytes == source.bytes


def _versioned(file: RawFile, source: Source, found: str | None) -> RawFile:
    if found is None:
        return file._replace(known=source.key) if is_of(file, source) else file
    if found == source.hash:
        return file._replace(known=source.key)
    return file._replace(known=digest_of([file.state, file.stamp, found]))
