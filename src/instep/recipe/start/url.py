"""The model that a run starts from, where that lies on another file system: a copy on this host.

All files that `start.model` needs are copied, of one version, and what is not a model is refused
as it is of a folder here. The client finds the version, which the job then has; other hosts get
the same one, and a process that comes later does not ask the file system. What the files are is
checked by the code that opens them. Way in: `local_copy`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instep.data.shards.urls.download import chunks, is_there, tried
from instep.data.shards.urls.elsewhere import side_by_side
from instep.errors import CheckpointError, DataError, RunError, SpecError
from instep.job.start import StartSpec
from instep.recipe.start.converting import how_to_convert
from instep.state.files.manifest import MANIFEST
from instep.state.files.sharded import INDEX, MODEL
from instep.store.folder import ID
from instep.words import shown_url

_BESIDE = ("job.toml", ID, MANIFEST)
"""Files by which the folder of a run, or a checkpoint, is known, and its hashes."""


def local_copy(start: StartSpec) -> tuple[Path, str]:
    """The copy of what `start.model` names, a file or a folder, and its version.

    Raises:
        SpecError: there is no model, or one of another version than `start.version`; or a package
            is not installed.
        DataError: a file cannot be read.
        RunError: there is no room.
        CheckpointError: an index is damaged.
    """
    try:
        return side_by_side(start.model, partial(_files_of, start.model), start.version)
    except (SpecError, DataError, RunError, CheckpointError) as error:
        error.args = (f"start.model = {shown_url(start.model)!r}: {error}",)
        raise


def _files_of(url: str, files: Any) -> list[str]:
    """The URLs of all files of a model."""
    path = urlsplit(url).path
    if path.endswith(INDEX):
        return [url, *_of_index(files, url)]
    if path.endswith(".safetensors") or "?" in url:
        return [url]
    base = url.rstrip("/")
    for name in (MODEL, f"{MODEL}{INDEX}"):
        if is_there(files, model := f"{base}/{name}"):
            more = _of_index(files, model) if name.endswith(INDEX) else ()
            beside = (f"{base}/{each}" for each in _BESIDE)
            return [model, *more, *(each for each in beside if is_there(files, each))]
    if files.isfile(url):
        return [url]
    with suppress(FileNotFoundError):  # else it may not be read, which is another thing
        tried(lambda _: files.info(f"{base}/{MODEL}"), shown_url(f"{base}/{MODEL}"))
    raise SpecError(_no_model(url, [*_names_in(files, url)]))


def _of_index(files: Any, url: str) -> list[str]:
    """The URLs of the files that an index names."""
    data = tried(lambda _: b"".join(chunks(files, url)), shown_url(url))
    try:
        names = dict.fromkeys(map(str, json.loads(data)["weight_map"].values()))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"its index is damaged ({error}). Copy it there again.") from None
    if away := [each for each in names if each != Path(each).name]:
        raise CheckpointError(
            f"its index names {away[0]!r}: the files of a model are in the folder of their index."
        )
    return [f"{url.rpartition('/')[0]}/{name}" for name in names]


def _names_in(files: Any, url: str) -> Iterator[str]:
    with suppress(Exception):  # of whatever kind: a web server may have no list, or there is none
        for each in files.ls(url, detail=False):
            yield Path(str(each).rstrip("/")).name


def _no_model(url: str, names: list[str]) -> str:
    if any(each.startswith("part-") for each in names):
        return (
            "the ranks of a mesh saved this checkpoint in parts. Make one file of its model where "
            "its run is (instep export RUN --to FILE.safetensors), and give that."
        )
    if convert := how_to_convert(names, shown_url(url)):
        return convert
    return (
        f"there is no {MODEL}. Give the folder of a run that has ended, or of a Hugging Face "
        "model, or a safetensors file."
    )
