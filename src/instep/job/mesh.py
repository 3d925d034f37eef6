"""The table `[mesh]` of a job, and the place of a rank on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from instep.job.base import Positive, Section


class Coordinate(NamedTuple):
    """The place of a worker in the mesh: its replica, and its index on each axis within that."""

    replica: int
    stage: int
    shard: int
    tensor: int


OF_AXIS = {
    "shard": ("zero",),
    "tensor": ("plan", "sequence"),
    "stages": ("schedule", "pipeline_batches", "cuts"),
}
"""Keys of `[mesh]` that are for one of its axes."""


class MeshSpec(Section, frozen=True, kw_only=True):
    """Processes that share one replica (copy) of the model: shard x tensor x stages of them."""

    shard: Positive = 1
    """Processes that split parameters, gradients and optimizer state."""

    tensor: Positive = 1
    """Processes that share one matrix product."""

    sequence: bool = False
    """Whether `tensor` splits activations between the layers that it cuts too, along the sequence.
    As many bytes, less memory. A model that does not allow it is refused."""

    stages: Positive = 1
    """Pipeline stages, split by layer."""

    zero: Literal[2, 3] = 3
    """What `shard`, above 1, splits: 3: parameters too, which are gathered for each block of layers
    and freed again; 2: parameters stay whole from the forward pass to the end of the backward
    pass."""

    plan: Literal["auto"] | dict[str, str] = "auto"
    """How `tensor` cuts layers: `auto` finds it from the model's structure, by trials. Or a table
    from patterns of module names to `column`, `row`, `column_gather`, `vocabulary` or
    `replicate`."""

    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    """In which order `stages` run their parts: `1f1b` keeps the least activations, `gpipe` runs
    all forward passes first, `interleaved` gives each process several stages and waits less."""

    pipeline_batches: Positive = 8
    """Parts that `stages` cut a micro-batch into; as many as it has samples, if it has fewer. More
    parts, less waiting; smaller parts compute less efficiently."""

    cuts: tuple[str, ...] = ()
    """Names of the modules that begin a stage, without the first one; empty: blocks are timed."""

    checkpointing: Literal["none", "blocks"] = "none"
    """`blocks`: a block of layers keeps only its inputs, and runs again in the backward pass. Less
    memory, about a third more time."""

    offload: Literal["none", "optimizer"] = "none"
    """`optimizer`: on a GPU, the optimizer's state lies in memory of the host, where its step is
    computed. Less memory of the GPU, more time."""

    compile: Literal["none", "blocks"] = "none"
    """`blocks`: each block of layers trains with code that `torch.compile` makes of it."""

    build: Literal["auto", "whole", "parts"] = "auto"
    """How a process of several builds the model: `whole` in memory before it is split, or in
    `parts`, so that no process ever has all of it. `auto`: in parts if its memory is too small for
    the whole."""

    @property
    def ranks(self) -> int:
        """Processes of one replica."""
        return self.shard * self.tensor * self.stages

    @property
    def axes(self) -> str:
        """The axes with several processes, as the job file has them."""
        sizes = {"shard": self.shard, "tensor": self.tensor, "stages": self.stages}
        return ", ".join(f"{axis} = {size}" for axis, size in sizes.items() if size > 1)

    def __post_init__(self) -> None:
        if self.build == "parts" and self.same_batch > 1:
            raise ValueError(
                f"build = 'parts' with {self.axes}: only shard works on a model of which no "
                "process has all. Leave build out, or use shard alone."
            )

    @property
    def same_batch(self) -> int:
        """Processes of a replica that get the same micro-batch: those on `tensor` and `stages`."""
        return self.tensor * self.stages

    def batches_of(self, workers: int) -> int:
        """How many of so many workers get a micro-batch of their own at the same time."""
        return workers // self.same_batch

    def batch_of(self, worker: int) -> int:
        """Which of these a worker gets."""
        place = self.coordinate(worker)
        return place.replica * self.shard + place.shard

    def refusal(self, workers: int) -> str:
        """Why so many workers make no whole replicas; empty if they do."""
        if workers % self.ranks == 0:
            return ""
        return (
            f"workers = {workers}: a replica has {self.ranks} processes ([mesh] {self.axes}), "
            f"so {self.ranks}, {2 * self.ranks}, ..."
        )

    def coordinate(self, worker: int) -> Coordinate:
        """The place of a worker. Workers are numbered replica by replica; within one, neighbours
        on the `tensor` axis are numbered first, then those on `shard`, then `stages`."""
        replica, inner = divmod(worker, self.ranks)
        rest, tensor = divmod(inner, self.tensor)
        stage, shard = divmod(rest, self.shard)
        return Coordinate(replica, stage, shard, tensor)

    def replica(self, number: int) -> range:
        """The workers of a replica, in rank order."""
        return range(number * self.ranks, (number + 1) * self.ranks)

    def column(self, members: Sequence[int], worker: int) -> list[int]:
        """Those of `members` that have the same place in their replicas as `worker`."""
        return [each for each in members if each % self.ranks == worker % self.ranks]


_OF_SEVERAL = {
    "checkpointing": ", or call torch.utils.checkpoint in the model",
    "offload": "",
    "compile": ", or call compile() on the model",
    "build": "",
}


def mismatches(mesh: MeshSpec) -> Iterator[str]:
    """The reasons why axes do not go together, or a key is of an axis that is not there."""
    if mesh.shard > 1 and mesh.stages > 1 and mesh.zero == 3:
        yield (
            f"mesh.zero = 3 with mesh.stages = {mesh.stages}: the parts of a micro-batch go "
            "through a stage in turn, and each would gather its parameters anew. Set mesh.zero "
            "= 2: they are gathered once for a micro-batch."
        )
    default = MeshSpec()
    for key, instead in _OF_SEVERAL.items():
        if mesh.ranks == 1 and (given := getattr(mesh, key)) != getattr(default, key):
            yield (
                f"mesh.{key} = {given!r} is for a replica of several processes, and "
                f"mesh.shard = 1. Leave the key out{instead}."
            )
    if mesh.sequence and mesh.stages > 1:
        yield (
            f"mesh.sequence = true with mesh.stages = {mesh.stages}: what crosses from stage to "
            "stage is whole in this version. Leave one of the two out."
        )
    if mesh.same_batch > 1 and mesh.compile != "none":
        yield (
            f"mesh.compile = {mesh.compile!r} goes together with mesh.shard alone in this "
            "version. Leave it out, or leave mesh.tensor and mesh.stages out."
        )
    for axis, keys in OF_AXIS.items():
        for key in keys if getattr(mesh, axis) == 1 else ():
            if (given := getattr(mesh, key)) != getattr(default, key):
                yield (
                    f"mesh.{key} = {given!r} is for mesh.{axis} above 1. Leave the key out, "
                    f"or set mesh.{axis}."
                )
