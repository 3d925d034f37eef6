"""How buckets become their sum over the ranks where a codec encodes them: the table of reducers.

A reducer is given flat float32 memory, bucket by bucket. It knows nothing of parameters' gradients,
weights, steps or votes. What a rank alone carries over (residuals) lies in two slots of flat memory
that outlives the process; the strategy lays them out, and fills them by the reducer's `Layout`.

To add one: write a class that keeps the promises of `Reducer` in a file of its own (`TwoSlots` has
the half of it that all share), and add its line to `REDUCERS`. `reducer_of` is the one place that
says which codec gets which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec
from instep.registry import Registry

REDUCERS = Registry(
    "reducer",
    {
        "dgc": "instep.sync.reducers.dgc:Dgc",
        "hook": "instep.sync.reducers.hook:Hook",
        "gather": "instep.sync.reducers.gather:Gather",
        "powersgd": "instep.sync.reducers.powersgd:PowerSgd",
        "two_phase": "instep.sync.reducers.two_phase:TwoPhase",
    },
)


class Place(NamedTuple):
    """A parameter within a bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32


class Buckets:
    """Where parameters lie in the flat memory of each bucket: one after the other, without gaps."""

    def __init__(self, buckets: Sequence[Sequence[Place]]) -> None:
        self.buckets = [list(bucket) for bucket in buckets]
        self.lengths = [sum(math.prod(place.shape) for place in bucket) for bucket in self.buckets]
        """Elements of each."""

    def members(self, number: int, flat: Tensor) -> list[Tensor]:
        """The parts of a bucket, in their shapes, as views."""
        shapes = [place.shape for place in self.buckets[number]]
        parts = flat[: self.lengths[number]].split([math.prod(shape) for shape in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def places(self, number: int, names: Collection[str]) -> Iterator[slice]:
        """Where some members of a bucket lie."""
        at = 0
        for place in self.buckets[number]:
            begin, at = at, at + math.prod(place.shape)
            if place.name in names:
                yield slice(begin, at)


class Layout(Protocol):
    """How what a rank carries over lies in one slot of its memory.

    A process that finds the memory of one that is gone reads it by the same layout.
    """

    @property
    def lengths(self) -> Sequence[int]:
        """Elements of each bucket."""

    @property
    def owners(self) -> tuple[int, ...]:
        """The ranks on which it depends where things lie, beside a rank's own number."""

    def places(self, number: int, names: Collection[str]) -> Iterator[slice]:
        """Where some members of a bucket lie."""

    def room(self, rank: int) -> int:
        """Elements of a slot, float32."""

    def state_of(self, slot: Tensor, rank: int) -> dict[str, Tensor]:
        """What is carried over, as `KIND/NAME`: copies, in the shape of the parameter."""

    def fill(self, slot: Tensor, rank: int, state: Mapping[str, Tensor]) -> None:
        """Have a slot hold this state; zero for what is not named."""


class Room(NamedTuple):
    """Where a rank keeps what it carries over from one step to the next."""

    device: torch.device | str = "cpu"
    """Where the buckets live."""
    slots: tuple[Tensor, Tensor] | None = None
    """Each of `Layout.room` float32 elements. The first is the committed one, and what stands in it
    counts. None: memory of the reducer's own, of zeros."""
    staged: Callable[[int], None] | None = None
    """Called in each step once all that this step leaves lies in the staged slot, and before the
    last message without which no other rank can finish, with the number of that slot, 0 or 1."""


OWN_ROOM = Room()


class Reducer(Protocol):
    """Sums of buckets over the ranks of a group, one transaction after another.

    A step: `begin` for each bucket in its order, `finish`, and `apply` or `abandon`. Every
    rank makes the same calls in the same order; each talks in the order of the buckets, from the
    thread that calls.
    """

    unused: Collection[str]
    """The members that no rank has used in this step; the same on every rank, and said before
    `finish`. Their sum is zero, and what is carried over of them is still carried over."""

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """What a rank alone carries over with this codec, such as `residual`. Only the sum over
        the ranks counts, for each. With none there is no memory, and a commit needs no vote."""

    @staticmethod
    def layout(buckets: Sequence[Sequence[Place]], size: int, idle: Sequence[int]) -> Layout:
        """How it lies.

        Args:
            buckets: for each, its members in the order in which they lie in its flat memory,
                without gaps; what follows them there is not summed.
            size: ranks.
            idle: those that leave, and are to carry nothing for others.
        """

    def __init__(self, codec: Codec, comm: Comm, layout: Layout, room: Room = OWN_ROOM) -> None:
        """A generation begins.

        Args:
            codec: one that `reducer_of` gives this reducer.
            comm: the ranks.
            layout: what `layout` gave, for as many ranks.
            room: where this rank keeps what it carries over.
        """

    @property
    def carried(self) -> Tensor:
        """The committed slot: what this rank carries over since the last commit."""

    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Send a bucket on its way.

        Args:
            number: of the bucket, the next one.
            flat: its memory, float32: this rank's contribution, weighted so that those of
                all ranks add up to what is wanted. Not to be touched until `finish` is over.
            key: the number of the commit: the same for the whole step on every rank, and another
                in each step.

        Raises:
            PeerError: a rank went away; the step can only be abandoned.
        """

    def finish(self) -> None:
        """Wait for all; each bucket then holds the sum, with the same bits on every rank.

        Raises:
            PeerError: a rank went away. What this rank has staged stays as it is.
        """

    def apply(self) -> None:
        """The step happens: what is staged is committed. `finish` may have raised after that."""

    def abandon(self) -> None:
        """The step does not happen: all is as before it. A second call does nothing.

        After a PeerError the group can do nothing more; another object takes `carried` up.
        """

    def own_state(self) -> dict[str, Tensor]:
        """What this rank carries over, as committed: `state_of` the committed slot."""

    def state(self) -> dict[str, Tensor]:
        """What is the same on every rank after a commit, by a name of the reducer's own."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave, here or elsewhere, before the first step; other names may be
        among it, and those of the reducer's own may be missing."""


class Reduction(NamedTuple):
    """The reducer of a strategy, before a group is there."""

    kinds: tuple[str, ...]
    """Names of what a rank alone carries over: `Reducer.kinds`."""
    layout: Callable[[Sequence[Sequence[Place]], int, Sequence[int]], Layout]
    """Lays that out: `Reducer.layout`."""
    make: Callable[[Comm, Layout, Room], Reducer]
    """Makes it for the ranks of a group."""


def reduction_of(codec: Codec) -> Reduction:
    """The reduction by a codec."""
    kind = reducer_of(codec)
    return Reduction(kind.kinds(codec), kind.layout, partial(kind, codec))


def reducer_of(codec: Codec) -> type[Reducer]:
    """The reducer for a codec: the one that its attribute `reducer` names, or else by its flags."""
    name = getattr(codec, "reducer", None)
    if name is None:
        name = "two_phase" if codec.segmentable and codec.fixed_size else "gather"
    found: type[Reducer] = REDUCERS[name]
    return found
