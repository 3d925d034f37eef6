"""What a preparation is asked for. Way in: `Asked`."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import msgspec

from instep.formats import INSTEP
from instep.words import shown_url

Unreadable = Literal["some", "skip", "stop"]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The sources, what is made of them, and where."""

    sources: list[str]
    """Files, folders or patterns, as they were typed."""
    to: str
    """The folder of the shards."""
    map: str | None = None
    """`file.py:function`: gives the sample, several, or None of one raw record."""
    key: str | None = None
    """The column whose equal values have samples put together, by `reduce`."""
    reduce: str | None = None
    """`file.py:function`: gives the sample, several, or None of all samples of one key."""
    tokens: str | None = None
    """A `tokenizers` file, or "bytes": the text of each record becomes numbers."""
    length: int | None = None
    """Most tokens of a sample."""
    unreadable: Unreadable = "some"
    """What a record does that is damaged, or for which the function raises ValueError: "some" and
    "skip" leave it out, but only "skip" also where a file has no others."""
    types: dict[str, str] = {}
    """Types of columns of CSV files, where their heads say another one."""
    seed: int = 0
    """Of the function's random draws, and of `shuffle`."""
    shuffle: bool = False
    """Whether samples are put into a keyed random order."""
    keep: bool = True
    """Whether, if samples are put into another order, they also stay as tasks have made them: then
    the next command makes again only those of what has changed."""
    checksums: bool = False
    """Whether the contents of all sources are compared with those that were prepared before."""
    shard_bytes: int = 32 << 20
    """About so large a shard becomes."""

    def decides(self) -> dict[str, Any]:
        """What decides the samples of a task, beside its raw records."""
        return {
            "map": hash_of_file(self.map.rpartition(":")[0]) if self.map else None,
            "function": self.map.rpartition(":")[2] if self.map else None,
            "tokens": self.tokens_hash(),
            "length": self.length,
            "seed": self.seed,
            "stops": self.unreadable == "stop",
        }

    def exchanges(self) -> dict[str, Any] | None:
        """What decides the samples beside tasks, if these are shuffled or put together."""
        if self.key is None and not self.shuffle:
            return None
        file, _, name = (self.reduce or "").rpartition(":")
        return {
            "key": self.key,
            "reduce": [hash_of_file(file), name] if self.reduce else None,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def made_by(self, plan: str) -> dict[str, Any]:
        """Say what has decided the samples, beside the sources, for the manifest.

        Args:
            plan: a digest of the tasks.
        """
        versions = {"instep": INSTEP, "pyarrow": version("pyarrow"), "numpy": version("numpy")}
        asked = msgspec.to_builtins(self)
        asked["sources"] = [*map(shown_url, asked["sources"])]
        functions = {"map": self.map, "reduce": self.reduce}
        hashes = {
            name: hash_of_file(given.rpartition(":")[0])
            for name, given in functions.items()
            if given
        }
        return {"asked": asked, "functions": hashes, "plan": plan, "versions": versions}

    def tokens_hash(self) -> str | None:
        """The hash of the tokenizer's file."""
        return hash_of_file(self.tokens) if self.tokens and self.tokens != "bytes" else self.tokens


def hash_of_file(path: str) -> str:
    """SHA-256 of a small file's bytes, as hexadecimal digits."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()
